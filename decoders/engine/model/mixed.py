"""Mixed passes (chunked prefill): one pass decodes rows and prefills a piece of another row's prompt.

A mixed pass reads the weights once, and the rows do not wait for a separate pass over the prompt (Agrawal et al. 2023, "SARATHI",
arXiv 2308.16369). The ``N`` nodes of ``R`` rows and the ``C`` tokens of the piece form one line of tokens, ``[1, R·N + C]``. Only
attention and the cache need to know each token's row.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...tree import TreeTensors
from .attention import MaskShape, build_mask, repeat_for_group, tell_shape
from .blocks import ForwardResult, PassInput, PromptPiece, causal_block
from .cache import CacheBuffers
from .kernels.attention import pack_mask
from .slot_cache import SlotCache
from .target import Target


def inputs(target: Target, nodes: Tensor, base: Tensor, tree: TreeTensors, view: Tensor, piece: PromptPiece) -> dict:
    """The model's arguments for a mixed pass. nodes, base, tree, view: the input of the decoded rows, see :class:`PassInput`."""
    (rows, n), count, device = nodes.shape, piece.tokens.shape[1], nodes.device
    text = causal_block(1, count, device)
    views = view.shape[0], piece.view.shape[0]
    if target.attends == "sdpa":
        decoded = build_mask(target.attending.kinds, base, tree.offsets, tree.visible, views[0], target.dtype)
        read = build_mask(target.attending.kinds, piece.start, text.offsets, text.visible, views[1], target.dtype)
        decoded, read = (repeat_for_group(mask, target.attending.group) for mask in (decoded, read))
    else:
        decoded, read = pack_mask(base, tree.offsets, tree.visible), pack_mask(piece.start, text.offsets, None)
    mask = torch.cat([mask.transpose(0, 1).flatten(1) for mask in (decoded, read)], dim=1)[None, :, None]
    masks = (rows, 1, *decoded.shape[2:]), (1, 1, *read.shape[2:])
    tell_shape(mask, MixedShape(target.attending.group, rows=rows, nodes=n, views=views, masks=masks))
    stretch = piece.start[:, None] + text.offsets
    slots = torch.cat([(base[:, None] + torch.arange(n, device=device)).reshape(1, -1), stretch], dim=1)
    places, shifts = base[:, None] + tree.offsets, piece.buffers.shifts
    if shifts is not None:
        places, stretch = places + shifts[:rows, None], stretch + shifts[rows:, None]
    positions = torch.cat([places.reshape(1, -1), stretch], dim=1)
    # The row of each token. The prompt's row is the last one.
    row = torch.arange(rows * n + count, device=device).div(n, rounding_mode="floor").clamp(max=rows)
    cache = MixedCache(piece.buffers, row, slots[0], max(view.shape[0], piece.view.shape[0]))
    return target.arguments(torch.cat([nodes.reshape(1, -1), piece.tokens], dim=1), positions, mask, cache)


def with_logits(rows: int, n: int, text: int, device: torch.device) -> Tensor:
    """Indices ``[R · (N - text)]`` int64 of the tokens that get logits: each row's nodes after its first `text` nodes."""
    index = torch.arange(rows * n, device=device).view(rows, n)
    return index[:, text:].reshape(-1)


def by_row(result: ForwardResult, rows: int, n: int) -> ForwardResult:
    """The results of a mixed pass for the decoded rows, ``[R, N, …]``. Only the nodes of :func:`with_logits` have logits."""

    def split(states: Tensor) -> Tensor:
        return states[0, : rows * n].view(rows, n, *states.shape[2:])

    logits = result.logits[0].view(rows, -1, result.logits.shape[-1])
    layers = split(result.layers) if result.layers is not None else None
    return type(result)(logits, split(result.hidden), layers)


def forward(target: Target, given: PassInput, piece: PromptPiece) -> ForwardResult:
    """Runs a mixed pass, which also writes the keys and values of `piece`. Returns the results for the decoded rows."""
    (rows, n), text = given.nodes.shape, given.text.length
    kept = with_logits(rows, n, text, given.nodes.device)
    result = target.results(inputs(target, given.nodes, given.base, given.tree, given.view, piece), kept)
    return by_row(result, rows, n).behind(text)


@dataclass(frozen=True)
class MixedShape(MaskShape):
    """The layout of a mixed pass's mask. This mask is flat: first the entries of the decoded rows' mask, then of the piece's mask.

    Attributes:
        rows, nodes: number of decoded rows, and number of nodes in each row.
        views: numbers of slots that attention reads: for the decoded rows, and for the piece.
        masks: shapes of the decoded rows' mask and of the piece's mask, for one kind of layer.
    """

    rows: int = 0
    nodes: int = 0
    views: tuple[int, int] = (0, 0)
    masks: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, kind: int, kernel: Callable[..., Tensor]
    ) -> Tensor:  # fmt: skip
        rows, n, line, (seen, read) = self.rows, self.nodes, mask[0, 0, 0], self.views
        end = math.prod(self.masks[0])
        decoded_query = query[0, :, : rows * n].unflatten(1, (rows, n)).transpose(0, 1)
        of_rows, of_piece = line[:end].view(self.masks[0]), line[end:].view(self.masks[1])
        decoded = kernel(decoded_query, key[:rows, :, :seen], value[:rows, :, :seen], of_rows, self.group)
        piece = kernel(query[:, :, rows * n :], key[rows:, :, :read], value[rows:, :, :read], of_piece, self.group)
        return torch.cat([decoded.flatten(0, 1)[None], piece], dim=1)


class MixedCache(SlotCache):
    """The cache of several rows for a line of ``T`` tokens. row, slots: ``[T]`` int64, the row and the slot of each token."""

    def __init__(self, buffers: CacheBuffers, row: Tensor, slots: Tensor, view: int) -> None:
        super().__init__(buffers, slots, view)
        self.row = row

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        keys, values = self.buffers.keys[layer_idx], self.buffers.values[layer_idx]
        keys[self.row, :, self.slots] = key_states[0].transpose(0, 1)
        values[self.row, :, self.slots] = value_states[0].transpose(0, 1)
        return keys, values
