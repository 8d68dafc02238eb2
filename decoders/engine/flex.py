"""Block-sparse FlexAttention over the slot cache: the CUDA counterpart of the additive masks.

Slots behind the longest row cost nothing: whole blocks of the cache are skipped by a block mask made on the device from
the rows' lengths. What a block mask needs travels to the layers as one small 4-D tensor, in the place of the mask that
model code hands through untouched.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from .attention import KIND_ATTRIBUTE, LayerKind

NAME = "decoders_flex"
KINDS_ATTRIBUTE = "decoders_layer_kinds"
#: Slots per block of keys.
BLOCK = 128


def pack_mask(base: Tensor, offsets: Tensor, visible: Tensor) -> Tensor:
    """``[B, 1, N+1, K+1]`` int32: visibility ``[B, N, K]`` with the nodes' offsets ``[B, K]`` as one more row and their base
    ``[B]`` as one more column.
    """
    table = torch.cat([visible.int(), offsets[:, None].int()], dim=1)
    return torch.cat([table, base[:, None, None].int().expand(-1, table.shape[1], 1)], dim=2)[:, None]


def block_mask(packed: Tensor, kind: LayerKind, slots: int) -> BlockMask:
    """The mask of one kind of layer over `slots` slots; see :func:`decoders.engine.attention.build_mask` for the rule."""
    queries, n = packed.shape[2] - 1, packed.shape[3] - 1
    base, offsets, visible = packed[:, 0, 0, n], packed[:, 0, queries, :n], packed[:, 0, :queries, :n].bool()

    def sees(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        node = k - base[b]
        inside = node.clamp(0, n - 1)
        q = q.clamp(max=queries - 1)  # the kernel also evaluates the padding of its query tile
        in_block = (node >= 0) & (node < n)
        allowed = (node < 0) | (in_block & visible[b, q, inside])
        position_q = base[b] + offsets[b, n - queries + q]
        position_k = torch.where(in_block, base[b] + offsets[b, inside], k)
        return kind.narrow(allowed, position_q, position_k)

    blocks = -(-slots // BLOCK)
    end = (base + n + BLOCK - 1) // BLOCK
    first = torch.zeros_like(end)
    if kind.window is not None:
        first = (base - kind.window + 1).clamp(min=0) // BLOCK
    count = (end - first)[:, None, None].to(torch.int32)
    index = (first[:, None] + torch.arange(blocks, device=packed.device)).clamp(max=blocks - 1)
    tiles = -(-queries // BLOCK)
    return BlockMask.from_kv_blocks(
        count.expand(-1, 1, tiles).contiguous(),
        index[:, None, None].to(torch.int32).expand(-1, 1, tiles, -1).contiguous(),
        BLOCK_SIZE=(BLOCK, BLOCK),
        mask_mod=sees,
        seq_lengths=(queries, slots),
        compute_q_blocks=False,
    )


@cache
def _fused() -> Callable:
    return torch.compile(flex_attention)


def flex_tree_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """Same contract as :func:`decoders.engine.attention.tree_attention`, with a packed mask (:func:`pack_mask`)."""
    kind = getattr(module, KINDS_ATTRIBUTE)[getattr(module, KIND_ATTRIBUTE, 0)]

    def cap(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    attend = flex_attention
    if query.device.type == "cuda" and not torch.compiler.is_compiling():
        attend = _fused()  # prefill runs eagerly, and eager FlexAttention would make the whole score matrix
    result = attend(
        query, key, value,
        score_mod=cap if softcap is not None else None,
        block_mask=block_mask(attention_mask, kind, key.shape[2]),
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
        return_aux=None if s_aux is None else AuxRequest(lse=True),
    )  # fmt: skip
    if s_aux is None:
        return result.transpose(1, 2).contiguous(), None
    # A sink is one more key with value zero: it takes its share of the softmax and nothing else.
    out, aux = result
    out = out * torch.sigmoid(aux.lse - s_aux.float()[None, :, None])[..., None].to(out.dtype)
    return out.transpose(1, 2).contiguous(), None
