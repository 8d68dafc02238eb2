"""A target checked against its model before anything is decoded with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..common.transformers_compat import cache_keyword, cache_of
from ..errors import UnsupportedError
from ..tree import Topology
from .batches import mixed
from .batches.mixed import PromptPiece
from .cache import CacheBuffers, LayerSpec
from .weights.freed import ReadParameters
from .weights.quantization import quantize
from .weights.twin import share_weights

if TYPE_CHECKING:
    from .target import Target


@torch.no_grad()
def check_tree_logits(target: Target, model: PreTrainedModel, layout: list[LayerSpec]) -> None:
    """Verifies a small tree and compares with plain forwards: catches whatever no flag of the config tells.

    Args:
        target: made of `model`.
        layout: of a cache in the model's own precision.

    Raises:
        UnsupportedError: the logits differ by more than rounding.
    """
    prompt, branch, ours = _small_tree(target, layout)
    reference = share_weights(model)  # as in evaluation, whatever mode the user's model is in
    quantize(reference, target.precision.weights, reference.get_output_embeddings(), groups=target.groups)
    ids = torch.tensor([prompt + branch], device=target.device)
    plain = reference(input_ids=ids, use_cache=False).logits[0, -1].float()
    gap, scale = (ours - plain).abs().max().item(), max(plain.abs().max().item(), 1.0)
    tolerance = 1e-4 if target.dtype == torch.float32 and not target.rounds else 0.1
    if not gap <= tolerance * scale and target.recurrent:
        gap = min(gap, (ours - _by_token(reference, ids, len(prompt) - 1)).abs().max().item())
    if not gap <= tolerance * scale:
        raise UnsupportedError(
            f"{type(model).__name__}: logits verified through a token tree differ from a plain forward by {gap:.2g} "
            f"(largest logit {scale:.2g}), so strategies would not be exact. Call generate without strategy=."
        )


def _small_tree(target: Target, layout: list[LayerSpec]) -> tuple[list[int], list[int], Tensor]:
    """Reads a prompt and verifies two branches: the prompt, the second branch, and the logits after it, ``[V]`` float32."""
    vocab, device = target.embeddings, target.device
    prompt, branch = [3 % vocab, 5 % vocab, 7 % vocab], [11 % vocab, 13 % vocab]
    tree = Topology.branches(2, 2)
    nodes = torch.tensor([[prompt[-1], 1, 2 % vocab, *branch]], device=device)
    buffers = CacheBuffers.allocate(layout, 1, 16)
    start = torch.zeros(1, dtype=torch.int64, device=device)
    view = torch.arange(8, device=device)
    target.prefill(torch.tensor([prompt[:-1]], device=device), start, buffers, view, 0)
    return prompt, branch, target.forward(nodes, start + 2, tree.tensors(1, device), buffers, view).logits[0, -1]


@torch.no_grad()
def parameters_read(target: Target) -> set[int]:
    """The ids of the parameters whose values its passes read. Those of packed layers are read by others: a recurrent layer or an
    adapter that multiplies by them itself.
    """
    with ReadParameters() as reads:
        _small_tree(target, target.layout)
    return reads.ids


@torch.no_grad()
def can_mix(target: Target) -> bool:
    """Whether a mixed pass (:mod:`~decoders.engine.batches.mixed`) gives what passes of the rows and of the prompt by themselves give.

    It does for designs whose attention is transformers' function by name. Those that have attention of their own look at whole rows.
    """
    if target.static or target.flex or target.recurrent or target.precision.cache is not None:
        return False
    device, vocab = target.device, min(target.vocab_size, target.embeddings)
    prompts = torch.arange(3, 39, device=device).view(3, 12) % vocab
    rows, start = CacheBuffers.allocate(target.layout, 3, 32), torch.zeros(3, dtype=torch.int64, device=device)
    view, base = torch.arange(16, device=device), torch.tensor([8, 4], device=device)
    target.prefill(prompts[:, :8], start, rows, view, 0)
    nodes, tree = prompts[:2, 8:], Topology.chain(3).tensors(2, device)
    piece = PromptPiece(prompts[2:, 8:], start[:1] + 8, 8, view, rows)
    try:
        ours = mixed.forward(target, nodes, base, tree, view, 0, piece)
    except Exception:  # whatever the model's own attention says of such a mask
        return False
    written = [tensor[2:].clone() for tensor in rows.tensors]
    plain = target.forward(nodes, base, tree, rows.of_rows(0, 2), view)
    target.prefill(*piece.alone)
    pairs = [(ours.logits, plain.logits), *zip(written, (tensor[2:] for tensor in rows.tensors), strict=True)]
    tolerance = 1e-4 if target.dtype == torch.float32 and not target.rounds else 0.1
    return all(
        (one - other).abs().max() <= tolerance * other.abs().max().clamp(min=1.0) for one, other in pairs if one.numel()
    )


def _by_token(model: PreTrainedModel, ids: Tensor, begin: int) -> Tensor:
    """``[V]`` float32, the model's own logits after the last of `ids` ``[1, T]``, with one pass for every token from `begin` on.

    Recurrent layers may read a text in one pass by other equations than token by token: Nemotron-H bounds time steps in the former
    alone. Token by token is how texts are written, here and by transformers.
    """
    out = model(input_ids=ids[:, :begin], use_cache=True)
    for place in range(begin, ids.shape[1]):
        positions = torch.full((1, 1), place, device=ids.device)
        cache = {cache_keyword(model): cache_of(out)}
        out = model(input_ids=ids[:, place : place + 1], position_ids=positions, use_cache=True, **cache)
    return out.logits[0, -1].float()
