"""Kernels for attention of a block of nodes (a draft tree or a piece of text) to the slot cache. Their cost grows with a row's length,
not with the cache's size, and they need no mask over all slots.

Instead of a mask, a small 4-D tensor describes the block (:func:`pack_mask`). Model code passes this tensor on unchanged. The operators
are opaque to the compiler: compiled steps call them, and CUDA graphs record their kernels.

On CUDA, the keys are split at fixed slots ("flash decoding", https://pytorch.org/blog/flash-decoding/). One program computes one split,
and the splits' results are added in order. So a query's result depends neither on the number of queries or rows nor on the cache size.
On the CPU (:mod:`.cpu`), keys are added in the order of the query's path, so the result does not depend on the path's slots either: a
branch of a tree has the same bits as the same tokens in a chain or in text.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..attention import KIND_ATTRIBUTE, LayerKind, refuse_position_bias, register
from ..slot_cache import Levels
from .attention_cuda import WORD, tree_attention
from .products import on_cpu

#: The names of the CUDA kernel and of the CPU kernel in transformers' registry.
NAME, CPU_NAME = "decoders_kernel", "decoders_cpu_kernel"
#: "triton": our Triton kernels for CUDA; "cpu": our C++ kernels for CPUs.
Kernel = Literal["triton", "cpu"]


def pack_mask(base: Tensor, offsets: Tensor, visible: Tensor | None) -> Tensor:
    """Describes a block as ``[B, 1, K, words + 2]`` int64: for each node, words with a bit per visible node, its offset, and `base`.

    Args:
        base: ``[B]`` int64, slot and position of each row's node 0; may be negative.
        offsets: ``[B, K]`` int64, positions of the nodes relative to `base`.
        visible: ``[B, N, K]`` bool, which nodes each of the last ``N`` nodes sees. None for text, where a token sees all tokens before
            it; the result then has no words.
    """
    rows, nodes = offsets.shape
    columns = [offsets[..., None], base[:, None, None].expand(rows, nodes, 1)]
    if visible is not None:
        # On the CPU there are at least two words, because compiled code with dynamic sizes would specialize on one word.
        queries, count = visible.shape[1], nodes // WORD + 2 if base.device.type == "cpu" else -(-nodes // WORD)
        bits = F.pad(visible, (0, count * WORD - nodes)).view(rows, queries, count, WORD).long()
        words = (bits << torch.arange(WORD, device=base.device)).sum(-1)
        columns.insert(0, F.pad(words, (0, 0, nodes - queries, 0)))
    return torch.cat(columns, dim=-1)[:, None]


def attend(
    query: Tensor, key: Tensor | Levels, value: Tensor | Levels, mask: Tensor, sinks: Tensor | None = None,
    kind: LayerKind = LayerKind(), scale: float | None = None, softcap: float | None = None, kernel: Kernel = "triton",
) -> Tensor:  # fmt: skip
    """Attention of the last ``N`` nodes of a block, ``[B, N, Hq, Dv]``.

    Args:
        query: ``[B, Hq, N, D]``.
        key: ``[B, Hkv, view, D]``, including the block's own keys in their slots. On the CPU, keys and values may be quantized.
        value: ``[B, Hkv, view, Dv]``.
        mask: the result of :func:`pack_mask`.
        sinks: ``[Hq]``, an additional score per head, which belongs to no key and no value.
        kind: the layer's window and chunk, which limit how far back the layer attends.
        scale: factor of the scores; by default ``D ** -0.5``.
        softcap: if given, scores are ``softcap · tanh(scores / softcap)``.
    """
    scale = query.shape[3] ** -0.5 if scale is None else scale
    compute = tree_attention if kernel == "triton" else _cpu_attention
    return compute(query, key, value, mask, sinks, kind.window or 0, kind.chunk or 0, scale, softcap or 0.0)


def kernel_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, scaling: float | None = None,
    kernel: Kernel = "triton", **given: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Like :func:`decoders.engine.model.attention.tree_attention`, but by a kernel. attention_mask: from :func:`pack_mask`."""
    if given.get("position_bias") is not None:
        refuse_position_bias(module)
    sinks, softcap, kind = given.get("s_aux"), given.get("softcap"), getattr(module, KIND_ATTRIBUTE, LayerKind())

    def compute(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, *_: int) -> Tensor:
        return attend(query, key, value, mask, sinks, kind, scaling, softcap, kernel)

    shape = getattr(attention_mask, "decoders_shape", None)  # only the mask of a mixed pass (mixed.py) has it
    if shape is not None:
        return shape.attend(query, key, value, attention_mask, 0, compute), None
    return compute(query, key, value, attention_mask), None


def _cpu_attention(
    query: Tensor, key: Tensor | Levels, value: Tensor | Levels, mask: Tensor, sinks: Tensor | None, window: int, chunk: int,
    scale: float, softcap: float,
) -> Tensor:  # fmt: skip
    seen = tuple(states if isinstance(states, Levels) else (states, None) for states in (key, value))
    (keys, key_scales), (values, value_scales) = seen
    query, keys, values = (t if t.stride(3) == 1 else t.contiguous() for t in (query, keys, values))
    return on_cpu["slot_attention"](
        query, keys, values, mask, sinks, key_scales, value_scales, window, chunk, scale, softcap
    )


#: Maps a kernel to its name in transformers' registry, and to its attention function.
REGISTERED: dict[Kernel, tuple[str, Callable[..., tuple[Tensor, None]]]] = {
    "triton": (NAME, kernel_attention),
    "cpu": (CPU_NAME, functools.partial(kernel_attention, kernel="cpu")),
}
for _name, _function in REGISTERED.values():
    register(_name, _function)
