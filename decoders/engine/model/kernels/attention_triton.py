"""The Triton kernels of :mod:`.attention`. One computes a tile of queries over a split of the keys, the other adds up the splits.

The queries of a GQA group (``G`` query heads per key head ``h``) are rows of a tile: row ``r`` is query ``r // G`` of head
``h * G + r % G``. A tile of keys begins at a multiple of ``BN`` slots, and a split at a fixed slot. So the order of a query's sums
depends neither on the block nor on the batch. Tiles of keys that a query does not see add zeros.
"""

from __future__ import annotations

import triton
import triton.language as tl

#: Arguments that vary from call to call, and therefore are no compile-time constants.
VARYING = ("window", "chunk", "view", "nodes", "queries", "splits", "smb", "smn", "rows")


@triton.jit
def split_start(split, FIRST: tl.constexpr, OCTAVE: tl.constexpr):
    """The first slot of a split. The first ``2 * OCTAVE`` splits have ``FIRST`` slots, then sizes double every ``OCTAVE`` splits."""
    octave = split // OCTAVE
    doubled = tl.maximum(octave - 1, 0)
    return tl.where(octave == 0, 0, (FIRST * OCTAVE) << doubled) + (split % OCTAVE) * (FIRST << doubled)


@triton.jit
def seen_slots(
    base, tile, view, nodes, queries, window, chunk, G: tl.constexpr, M: tl.constexpr,
    BN: tl.constexpr, TEXT: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The range of slots that the queries of a tile may see: the first slot, rounded down to a multiple of ``BN``, and the end."""
    earliest, end = base, base + nodes
    if TEXT:
        earliest = base + tile * M // G
        end = base + tl.minimum((tile * M + M - 1) // G, queries - 1) + 1
    begin = earliest * 0
    if WINDOW:
        begin = tl.maximum(begin, earliest - window + 1)
    if CHUNK:
        begin = tl.maximum(begin, tl.maximum(earliest, 0) // chunk * chunk)
    return begin // BN * BN, tl.minimum(end, view)


@triton.jit(do_not_specialize=VARYING)
def attend_kernel(
    Q, K, V, MASK, SINKS, OUT, PART_OUT, PART_MAX, PART_SUM,
    scale, softcap, window, chunk, view, nodes, queries, splits,
    sqb, sqh, sqn, skb, skh, skn, svb, svh, svn, smb, smn, sob, son, soh,
    HEADS: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr, VWIDTH: tl.constexpr,
    WORDS: tl.constexpr, M: tl.constexpr, BN: tl.constexpr, FIRST: tl.constexpr, OCTAVE: tl.constexpr, TEXT: tl.constexpr,
    SPLIT: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, CAP: tl.constexpr, SINK: tl.constexpr, IEEE: tl.constexpr,
):  # fmt: skip
    """Attention of a tile of ``M`` rows to a split of the keys, or to all keys if ``SPLIT`` is false.

    MASK: the result of :func:`decoders.engine.model.kernels.attention.pack_mask`. ``D``, ``DV``: widths of keys and values;
    ``WIDTH``, ``VWIDTH``: the next powers of two. ``IEEE``: float32 products without TensorFloat-32.
    """
    split, tile, pair = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    # Indices need 64 bits: 128 heads with 128 numbers in each of 131,072 slots (or queries of a text) are 2^31 numbers.
    b, h = (pair // HEADS).to(tl.int64), (pair % HEADS).to(tl.int64)
    base = tl.load(MASK + b * smb + WORDS + 1).to(tl.int32)
    begin, end = seen_slots(base, tile, view, nodes, queries, window, chunk, G, M, BN, TEXT, WINDOW, CHUNK)
    if SPLIT:
        begin = tl.maximum(begin, split_start(split, FIRST, OCTAVE))
        end = tl.minimum(end, split_start(split + 1, FIRST, OCTAVE))
        if begin >= end:
            return
    row = tile * M + tl.arange(0, M)
    query, head = (row // G).to(tl.int64), h * G + row % G
    valid = query < queries
    node_of_query = nodes - queries + query  # the queries are the last nodes of the block
    d, dv = tl.arange(0, WIDTH), tl.arange(0, VWIDTH)
    q = tl.load(
        Q + b * sqb + head[:, None] * sqh + query[:, None] * sqn + d[None, :],
        mask=valid[:, None] & (d < D)[None, :], other=0.0,
    )  # fmt: skip
    own_mask = MASK + b * smb + node_of_query * smn
    position_q = base + tl.load(own_mask + WORDS, mask=valid, other=0).to(tl.int32)
    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, VWIDTH], tl.float32)
    for start in range(begin, end, BN):
        slot = start + tl.arange(0, BN)
        inside = slot < end
        k = tl.load(
            K + b * skb + h * skh + slot[None, :] * skn + d[:, None], mask=inside[None, :] & (d < D)[:, None], other=0.0
        )
        score = tl.dot(q, k, input_precision="ieee" if IEEE else None) * scale
        if CAP:
            # tanh is written with exp, because every backend of Triton has exp.
            small = tl.exp(-2.0 * tl.abs(score / softcap))
            bent = softcap * (1.0 - small) / (1.0 + small)
            score = tl.where(score < 0, -bent, bent)
        node = slot - base
        position_k = slot
        if TEXT:
            seen = slot[None, :] <= position_q[:, None]
        else:
            # BN is at most 64, so the bits of a tile of slots are in at most two words.
            word = (tl.zeros([M], tl.int32) + start - base) >> 6
            low = tl.load(own_mask + word, mask=valid & (word >= 0) & (word < WORDS), other=0)
            high = tl.load(own_mask + word + 1, mask=valid & (word >= -1) & (word + 1 < WORDS), other=0)
            bits = tl.where((node >> 6)[None, :] == word[:, None], low[:, None], high[:, None])
            in_block = (node >= 0) & (node < nodes)
            bit = (bits >> (node & 63).to(tl.int64)[None, :]) & 1
            seen = (node < 0)[None, :] | (in_block[None, :] & (bit != 0))
            if WINDOW or CHUNK:
                offset = tl.load(MASK + b * smb + node * smn + WORDS, mask=in_block & inside, other=0).to(tl.int32)
                position_k = tl.where(in_block, base + offset, slot)
        if WINDOW:
            seen = seen & (position_q[:, None] - position_k[None, :] < window)
        if CHUNK:
            seen = seen & (position_q[:, None] // chunk == position_k[None, :] // chunk)
        score = tl.where(seen & inside[None, :], score, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, 1))
        finite = tl.where(new_top == float("-inf"), 0.0, new_top)  # -inf - -inf would be NaN
        p = tl.exp(score - finite[:, None])
        shrink = tl.exp(top - finite)
        v = tl.load(
            V + b * svb + h * svh + slot[:, None] * svn + dv[None, :],
            mask=inside[:, None] & (dv < DV)[None, :],
            other=0.0,
        )
        acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee" if IEEE else None)
        total = total * shrink + tl.sum(p, 1)
        top = new_top
    if SPLIT:
        place = (pair.to(tl.int64) * tl.num_programs(1) * M + row) * splits + split
        tl.store(PART_OUT + place[:, None] * DV + dv[None, :], acc, mask=valid[:, None] & (dv < DV)[None, :])
        tl.store(PART_MAX + place, top, mask=valid)
        tl.store(PART_SUM + place, total, mask=valid)
    else:
        if SINK:
            sink = tl.load(SINKS + head, mask=valid, other=0.0).to(tl.float32)
            finite = tl.maximum(top, sink)
            shrink = tl.exp(top - finite)
            acc = acc * shrink[:, None]
            total = total * shrink + tl.exp(sink - finite)
        # Queries before the start of a row see nothing and get zeros.
        out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(
            OUT + b * sob + query[:, None] * son + head[:, None] * soh + dv[None, :], out,
            mask=valid[:, None] & (dv < DV)[None, :],
        )  # fmt: skip


@triton.jit(do_not_specialize=VARYING)
def merge_kernel(
    MASK, SINKS, OUT, PART_OUT, PART_MAX, PART_SUM, window, chunk, view, nodes, queries, splits, rows, smb, sob, son, soh,
    HEADS: tl.constexpr, G: tl.constexpr, DV: tl.constexpr, VWIDTH: tl.constexpr, WORDS: tl.constexpr, M: tl.constexpr,
    BN: tl.constexpr, FIRST: tl.constexpr, OCTAVE: tl.constexpr, TEXT: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr,
    SINK: tl.constexpr,
):  # fmt: skip
    """Adds up the results of all splits for one row of a tile, ``OCTAVE`` splits at a time, from the first slots to the last."""
    row, pair = tl.program_id(0), tl.program_id(1)
    b, h = (pair // HEADS).to(tl.int64), pair % HEADS
    base = tl.load(MASK + b * smb + WORDS + 1).to(tl.int32)
    begin, end = seen_slots(base, row // M, view, nodes, queries, window, chunk, G, M, BN, TEXT, WINDOW, CHUNK)
    dv = tl.arange(0, VWIDTH)
    top, total = float("-inf"), 0.0
    acc = tl.zeros([VWIDTH], tl.float32)
    octaves = (splits + OCTAVE - 1) // OCTAVE
    for octave in range(octaves):
        if split_start(octave * OCTAVE, FIRST, OCTAVE) < end:
            split = octave * OCTAVE + tl.arange(0, OCTAVE)
            written = (split_start(split, FIRST, OCTAVE) < end) & (split_start(split + 1, FIRST, OCTAVE) > begin)
            place = (pair.to(tl.int64) * rows + row) * splits + split
            part_top = tl.load(PART_MAX + place, mask=written, other=float("-inf"))
            part_total = tl.load(PART_SUM + place, mask=written, other=0.0)
            part = tl.load(
                PART_OUT + place[:, None] * DV + dv[None, :], mask=written[:, None] & (dv < DV)[None, :], other=0.0
            )
            new_top = tl.maximum(top, tl.max(part_top, 0))
            finite = tl.where(new_top == float("-inf"), 0.0, new_top)
            share, shrink = tl.exp(part_top - finite), tl.exp(top - finite)
            acc = acc * shrink + tl.sum(part * share[:, None], 0)
            total = total * shrink + tl.sum(part_total * share, 0)
            top = new_top
    head = h * G + row % G
    if SINK:
        sink = tl.load(SINKS + head).to(tl.float32)
        finite = tl.maximum(top, sink)
        shrink = tl.exp(top - finite)
        acc = acc * shrink
        total = total * shrink + tl.exp(sink - finite)
    out = acc / tl.where(total == 0.0, 1.0, total)
    tl.store(OUT + b * sob + (row // G).to(tl.int64) * son + head * soh + dv, out, mask=dv < DV)
