"""Attention of a block of nodes to the slot cache. Its cost depends on each row's length, and it needs no mask over all slots.

A small 4-D tensor in place of the mask describes the block (:func:`pack_mask`); model code passes it on unchanged. The operators are
opaque to the compiler: compiled steps call them, and CUDA graphs record their kernels.

On CUDA, programs split the keys at fixed slots ("flash decoding", https://pytorch.org/blog/flash-decoding/; longer splits for text) and
add the parts in a fixed order: a query's result depends neither on the number of queries or rows nor on the capacity of the cache.
On the CPU (:mod:`.cpu`), keys are added in the order of the query's path, so that the result does not depend on the path's slots
either: a branch of a tree has the same bits as the same tokens in a chain or in text.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..attention import LayerKind, kind_of, refuse_position_bias, register
from ..cache import LayerSpec, Levels
from . import cpu, operator, runs_kernels

#: Names in transformers' registry of the CUDA kernel and of the CPU kernel.
NAME, CPU_NAME = "decoders_kernel", "decoders_cpu_kernel"
#: Bits per word of visibility.
WORD = 64
#: The widest heads that the kernel supports. Heads narrower than 16 are padded.
WIDEST_HEAD = 256
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: Triton's kernels for CUDA, or the C++ kernels for CPUs.
Kernel = Literal["triton", "cpu"]

#: Slots of a split in the first two octaves, and splits per octave: up to 32,768 slots, a split has at most 1,024.
FIRST_SPLIT, OCTAVE = 128, 16
#: Slots of a text's first splits: with many queries, adding the parts of shorter splits would take longer than it saves.
FIRST_TEXT_SPLIT = 1024
#: Rows of a tile: as many as in a tensor-core instruction, so that a query's products use the same instructions in every block.
ROWS = 16
#: Greatest size in bytes of the parts of a launch; more rows need several launches.
MOST_SCRATCH = 256 << 20


#: The CPU kernels' operator, set by :func:`preferred`, because compiled code must not look for kernels.
_slot_attention: Callable[..., Tensor] | None = None


def preferred(device: torch.device) -> Kernel | None:
    """The kernel that attention='auto' means on `device`, if it fits the model."""
    global _slot_attention
    if device.type == "cpu":
        kernels = cpu.chosen().kernels
        _slot_attention = None if kernels is None else kernels.slot_attention
        return None if kernels is None else "cpu"
    return "triton" if device.type == "cuda" else None


def unfit(kernel: Kernel, layout: Sequence[LayerSpec], own_layers: int, device: torch.device) -> str | None:
    """Why a kernel cannot run a model whose cache has this `layout`; None if it can.

    own_layers: number of layers that call the attention function in their config.
    """
    with_keys = [spec for spec in layout if spec.key_heads]
    if kernel == "triton" and not runs_kernels(device):
        return (
            f"Triton does not run on {device}"
            if device.type == "cuda"
            else f"it runs on CUDA, the model is on {device}"
        )
    if own_layers < len(with_keys):
        return "its layers have an attention of their own"
    widest = max(max(spec.key_dim, spec.value_dim) for spec in with_keys)
    if kernel == "triton" and widest > WIDEST_HEAD:
        return f"its heads are {widest} wide, {WIDEST_HEAD} are possible"
    dtypes = {spec.dtype for spec in with_keys} - set(DTYPES)
    return f"it computes in {dtypes.pop()}, possible are float32, bfloat16 and float16" if dtypes else None


def pack_mask(base: Tensor, offsets: Tensor, visible: Tensor | None) -> Tensor:
    """``[B, 1, K, words + 2]`` int64, per node of a block: bits for the nodes that it sees, its offset, and its row's base.

    Args:
        base: ``[B]`` int64, slot and position of node 0. It may be negative.
        offsets: ``[B, K]`` int64, positions of the nodes relative to `base`.
        visible: ``[B, N, K]`` bool, for the last ``N`` nodes. None for text, in which a token sees all tokens before it: no words.
    """
    rows, nodes = offsets.shape
    columns = [offsets[..., None], base[:, None, None].expand(rows, nodes, 1)]
    if visible is not None:
        # At least two words on the CPU, where compiled code with dynamic sizes would specialize on one word.
        queries, count = visible.shape[1], nodes // WORD + 2 if base.device.type == "cpu" else -(-nodes // WORD)
        bits = F.pad(visible, (0, count * WORD - nodes)).view(rows, queries, count, WORD).long()
        words = (bits << torch.arange(WORD, device=base.device)).sum(-1)
        columns.insert(0, F.pad(words, (0, 0, nodes - queries, 0)))
    return torch.cat(columns, dim=-1)[:, None]


def split_count(view: int, first_split: int = FIRST_SPLIT) -> int:
    """The number of splits for `view` slots; see :func:`~decoders.engine.model.kernels.attention_triton.split_start`."""
    first = first_split * OCTAVE
    octave = max((view - 1) // first, 0).bit_length()
    size = first_split << max(octave - 1, 0)
    start = first << (octave - 1) if octave else 0
    return octave * OCTAVE + -(-(view - start) // size)


def attend(
    query: Tensor, key: Tensor | Levels, value: Tensor | Levels, mask: Tensor, sinks: Tensor | None = None,
    kind: LayerKind = LayerKind(), scale: float | None = None, softcap: float | None = None, kernel: Kernel = "triton",
) -> Tensor:  # fmt: skip
    """Attention of the last ``N`` nodes of a block, ``[B, N, Hq, Dv]``.

    Args:
        query: ``[B, Hq, N, D]``.
        key: ``[B, Hkv, view, D]``, the block's own keys in their slots included; on the CPU, keys and values may be quantized.
        value: ``[B, Hkv, view, Dv]``.
        mask: of :func:`pack_mask`.
        sinks: ``[Hq]``, an additional score per head without a value.
        kind: how far the layer looks back.
        scale: factor of the scores; ``D ** -0.5`` by default.
        softcap: bound of the scores, by tanh.
    """
    scale = query.shape[3] ** -0.5 if scale is None else scale
    compute = tree_attention if kernel == "triton" else _on_cpu
    return compute(query, key, value, mask, sinks, kind.window or 0, kind.chunk or 0, scale, softcap or 0.0)


def kernel_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, scaling: float | None = None,
    kernel: Kernel = "triton", **given: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """:func:`decoders.engine.model.attention.tree_attention` by a kernel, with a mask of :func:`pack_mask`."""
    refuse_position_bias(module, given)
    sinks, softcap, kind = given.get("s_aux"), given.get("softcap"), kind_of(module)

    def compute(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, *_: int) -> Tensor:
        return attend(query, key, value, mask, sinks, kind, scaling, softcap, kernel)

    shape = getattr(attention_mask, "decoders_shape", None)  # of a mixed pass
    if shape is not None:
        return shape.attend(query, key, value, attention_mask, 0, compute), None
    return compute(query, key, value, attention_mask), None


class Tiles(NamedTuple):
    """Sizes of the tiles of a program; they fit 99 KB of shared memory, which every GPU since Ampere has.

    Attributes:
        rows: queries times heads of a group; more for text, where products take most of the time.
        keys: slots, at most :data:`WORD`.
        stages: tiles of keys to read ahead.
        warps: number of warps per tile.
        width, value_width: widths of keys and values, rounded up to powers of two.
    """

    rows: int
    keys: int
    stages: int
    warps: int
    width: int
    value_width: int


def tiles_for(width: int, value_width: int, dtype: torch.dtype, *, text: bool) -> Tiles:
    """The tiles for heads of these widths. Products in float32 are unrolled loops, which compile slowly for large tiles."""
    wide, value_wide = (max(1 << (size - 1).bit_length(), 16) for size in (width, value_width))
    narrow = max(wide, value_wide) <= 128
    if dtype == torch.float32:
        rows, keys = (32, 16) if text else (ROWS, 32 if narrow else 16)
        return Tiles(rows, keys, 2, 4, wide, value_wide)
    if text and not narrow:  # three stages exceed 99 KB, and sums exceed the registers of four warps
        return Tiles(64, 32, 2, 8, wide, value_wide)
    return Tiles(64 if text else ROWS, WORD if narrow else 32, 3, 4, wide, value_wide)


@dataclass(frozen=True)
class Launch:
    """How far a layer looks back, and how its queries and keys are distributed to programs.

    Attributes:
        tile: the sizes of a tile.
        tiles: number of tiles per row of the batch and key head.
        splits: number of splits of the keys; 0 if they are not split, with the same bits as one split.
        first_split: slots of the first splits.
        window: positions that each query looks back; 0: all.
        chunk: length of the chunks within which queries look back; 0: unlimited.
        scale, softcap: factor and bound of the scores; softcap 0: no bound.
    """

    tile: Tiles
    tiles: int
    splits: int
    first_split: int
    window: int
    chunk: int
    scale: float
    softcap: float


def _tree_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, sinks: Tensor | None, window: int, chunk: int, scale: float,
    softcap: float,
) -> Tensor:  # fmt: skip
    query, key, value = (t if t.stride(3) == 1 else t.contiguous() for t in (query, key, value))
    (rows, heads, queries, width), value_width = query.shape, value.shape[3]
    out = query.new_empty(rows, queries, heads, value_width)
    text = mask.shape[3] == 2
    tile = tiles_for(width, value_width, query.dtype, text=text)
    tiles = -(-queries * heads // key.shape[1] // tile.rows)
    first_split = (
        FIRST_TEXT_SPLIT if text else FIRST_SPLIT
    )  # bits depend on it: not on how many queries or rows there are
    splits = split_count(key.shape[2], first_split)
    splits = splits if splits > 1 else 0
    launch = Launch(tile, tiles, splits, first_split, window, chunk, scale, softcap)
    at_once = max(MOST_SCRATCH // max(tiles * tile.rows * key.shape[1] * splits * (value_width + 2) * 4, 1), 1)
    for begin in range(0, rows, at_once):
        part = slice(begin, begin + at_once)
        _launch(launch, query[part], key[part], value[part], mask[part], sinks, out[part])
    return out


def _launch(
    launch: Launch, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, sinks: Tensor | None, out: Tensor
) -> None:
    """Writes the attention of some rows to `out`."""
    from .attention_triton import attend_kernel, merge_kernel

    tile, tiles, splits, window, chunk = launch.tile, launch.tiles, launch.splits, launch.window, launch.chunk
    (rows, heads, queries, width), (_, kv_heads, view, value_width) = query.shape, value.shape
    nodes, columns = mask.shape[2:]
    pairs, per_pair = rows * kv_heads, tiles * tile.rows
    parts = out.new_empty(pairs * per_pair * max(splits, 1) * (value_width + 2) if splits else 1, dtype=torch.float32)
    count = pairs * per_pair * splits
    part_out, part_max, part_sum = (
        parts[: count * value_width],
        parts[count * value_width :],
        parts[count * (value_width + 1) :],
    )
    shared: dict[str, Any] = dict(
        HEADS=kv_heads, G=heads // kv_heads, DV=value_width, VWIDTH=tile.value_width, WORDS=columns - 2, M=tile.rows, BN=tile.keys,
        FIRST=launch.first_split, OCTAVE=OCTAVE, TEXT=columns == 2, WINDOW=window > 0, CHUNK=chunk > 0, SINK=sinks is not None,
    )  # fmt: skip
    attend_kernel[(max(splits, 1), tiles, pairs)](
        query, key, value, mask, sinks, out, part_out, part_max, part_sum,
        launch.scale, launch.softcap, window, chunk, view, nodes, queries, splits,
        *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], mask.stride(0), mask.stride(2), *out.stride()[:3],
        D=width, WIDTH=tile.width, SPLIT=splits > 0, CAP=launch.softcap > 0, IEEE=query.dtype == torch.float32,
        num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=True, **shared,
    )  # fmt: skip
    if splits:
        merge_kernel[(queries * heads // kv_heads, pairs)](
            mask, sinks, out, part_out, part_max, part_sum, window, chunk, view, nodes, queries, splits, per_pair,
            mask.stride(0), *out.stride()[:3], num_warps=1, enable_fp_fusion=True, **shared,
        )  # fmt: skip


def _fake(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
    rows, heads, queries, _width = query.shape
    return query.new_empty(rows, queries, heads, value.shape[3])


tree_attention = operator(
    "tree_attention(Tensor query, Tensor key, Tensor value, Tensor mask, Tensor? sinks, int window, int chunk, float scale, "
    "float softcap) -> Tensor",
    _tree_attention,
    _fake,
)


def _on_cpu(
    query: Tensor, key: Tensor | Levels, value: Tensor | Levels, mask: Tensor, sinks: Tensor | None, window: int, chunk: int,
    scale: float, softcap: float,
) -> Tensor:  # fmt: skip
    assert _slot_attention is not None
    seen = tuple(states if isinstance(states, Levels) else (states, None) for states in (key, value))
    (keys, key_scales), (values, value_scales) = seen
    query, keys, values = (t if t.stride(3) == 1 else t.contiguous() for t in (query, keys, values))
    return _slot_attention(query, keys, values, mask, sinks, key_scales, value_scales, window, chunk, scale, softcap)


register(NAME, kernel_attention)
register(CPU_NAME, functools.partial(kernel_attention, kernel="cpu"))
