"""Launches the attention kernels of :mod:`.attention_triton`: one program for each tile of queries in each split of the keys."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import operator

#: Number of bits in a word of the mask. A bit says whether a node is visible.
WORD = 64
#: Sizes of splits: the first 2 * OCTAVE splits have FIRST_SPLIT slots each, the next OCTAVE splits twice as many, the next OCTAVE
#: splits four times as many, and so on. The splits up to slot 32,768 thus have at most 1,024 slots.
FIRST_SPLIT, OCTAVE = 128, 16
#: FIRST_SPLIT for text: with many queries, adding up the results of shorter splits would take longer than it saves.
FIRST_TEXT_SPLIT = 1024
#: Rows of a tile. A tensor-core instruction also has 16 rows, so a query's products use the same instructions in every block.
ROWS = 16
#: Greatest number of bytes for the results of all splits in a launch. If the rows need more, there are several launches.
MOST_SCRATCH = 256 << 20
#: Greatest number of pairs of a row and a key head in a launch: CUDA's limit for the later axes of a grid.
MOST_PAIRS = (1 << 16) - 1


def split_count(view: int, first_split: int = FIRST_SPLIT) -> int:
    """The number of splits for `view` slots; see :func:`~decoders.engine.model.kernels.attention_triton.split_start`."""
    first = first_split * OCTAVE
    octave = max((view - 1) // first, 0).bit_length()
    size = first_split << max(octave - 1, 0)
    start = first << (octave - 1) if octave else 0
    return octave * OCTAVE + -(-(view - start) // size)


class Tiles(NamedTuple):
    """Sizes of the tiles of a program. They fit into 99 KB of shared memory, which every GPU since Ampere has.

    Attributes:
        rows: number of rows of a tile, one for each query and head; larger for text, where products take most of the time.
        keys: number of slots, at most :data:`WORD`.
        stages: number of tiles of keys that are read ahead.
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
    """The tiles for heads of these widths. Float32 tiles are small: their products are unrolled loops, which compile slowly."""
    wide, value_wide = (max(1 << (size - 1).bit_length(), 16) for size in (width, value_width))
    narrow = max(wide, value_wide) <= 128
    if dtype == torch.float32:
        rows, keys = (32, 16) if text else (ROWS, 32 if narrow else 16)
        return Tiles(rows, keys, 2, 4, wide, value_wide)
    if text and not narrow:  # three stages would exceed 99 KB, and the sums would exceed the registers of four warps
        return Tiles(64, 32, 2, 8, wide, value_wide)
    return Tiles(64 if text else ROWS, WORD if narrow else 32, 3, 4, wide, value_wide)


def launch(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, sinks: Tensor | None, window: int, chunk: int, scale: float,
    softcap: float,
) -> Tensor:  # fmt: skip
    """Launches the kernels of :data:`tree_attention`; returns attention ``[B, N, Hq, Dv]``."""
    from .attention_triton import attend_kernel, merge_kernel

    query, key, value = (t if t.stride(3) == 1 else t.contiguous() for t in (query, key, value))
    (rows, heads, queries, width), (kv_heads, view, value_width) = query.shape, value.shape[1:]
    out, (nodes, columns) = query.new_empty(rows, queries, heads, value_width), mask.shape[2:]
    text, group = columns == 2, heads // kv_heads
    tile = tiles_for(width, value_width, query.dtype, text=text)
    tiles = -(-queries * group // tile.rows)
    # Bits depend on the tiles, so the tiles must not depend on the number of queries or rows.
    first_split = FIRST_TEXT_SPLIT if text else FIRST_SPLIT
    splits = split_count(view, first_split)
    splits = splits if splits > 1 else 0  # 0: the kernel reads all keys at once, with the same bits as in one split
    per_pair = tiles * tile.rows
    shared: dict[str, Any] = dict(
        HEADS=kv_heads, G=group, DV=value_width, VWIDTH=tile.value_width, WORDS=columns - 2, M=tile.rows, BN=tile.keys,
        FIRST=first_split, OCTAVE=OCTAVE, TEXT=text, WINDOW=window > 0, CHUNK=chunk > 0, SINK=sinks is not None,
    )  # fmt: skip
    scratch = per_pair * kv_heads * splits * (value_width + 2) * 4
    at_once = max(min(MOST_SCRATCH // max(scratch, 1), MOST_PAIRS // kv_heads), 1)
    for begin in range(0, rows, at_once):
        q, k, v, m, o = (tensor[begin : begin + at_once] for tensor in (query, key, value, mask, out))
        pairs = len(q) * kv_heads
        count = pairs * per_pair * splits
        parts = o.new_empty(max(count * (value_width + 2), 1), dtype=torch.float32)
        sums = parts[: count * value_width], parts[count * value_width :], parts[count * (value_width + 1) :]
        attend_kernel[(max(splits, 1), tiles, pairs)](
            q, k, v, m, sinks, o, *sums, scale, softcap, window, chunk, view, nodes, queries, splits,
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], m.stride(0), m.stride(2), *o.stride()[:3],
            D=width, WIDTH=tile.width, SPLIT=splits > 0, CAP=softcap > 0, IEEE=query.dtype == torch.float32,
            num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=True, **shared,
        )  # fmt: skip
        if splits:
            merge_kernel[(queries * group, pairs)](
                m, sinks, o, *sums, window, chunk, view, nodes, queries, splits, per_pair,
                m.stride(0), *o.stride()[:3], num_warps=1, enable_fp_fusion=True, **shared,
            )  # fmt: skip
    return out


tree_attention = operator(
    "tree_attention(Tensor query, Tensor key, Tensor value, Tensor mask, Tensor? sinks, int window, int chunk, float scale, "
    "float softcap) -> Tensor",
    "attention_cuda.launch",
    lambda query, key, value, *_: query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3]),
)
