"""The operators of :mod:`.products` on CUDA.

cuBLAS chooses its kernel by the number of rows, and another kernel adds the terms of a sum in another order. Here the order depends
only on the matrix: terms are cut into stretches at fixed places (:func:`plan`), tensor cores add up each stretch from beginning to end,
16 rows at a time by the same instruction whatever the rows are, and the stretches are added in order.

A program reads its part of the matrix once, for up to 128 rows, whose sums it holds in registers. Rows are read again for every block
of outputs, mostly from the second-level cache: 32 or 64 rows are as much data as the block's part of the matrix. From 64 rows on blocks
are therefore twice as large, which changes no bits. A batch's rows beyond 128 are other programs, which run beside those of the same
part of the matrix.

PyTorch's mean distributes a row of a norm to threads depending on the number of rows, and inductor chooses the loops of a reduction by
timing. Here each row is one program, and the order of its sum depends only on its width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from . import LARGEST_BLOCK, MOST_MATRICES

#: Rows that a tensor core multiplies at once. Fewer cost the same.
TILE = 16
#: Most row tiles of one program.
MOST_TILES = 8
#: PyTorch computes products of more nodes per row of the batch (long texts), for which cuBLAS is as fast as the device allows.
MOST_ROWS = TILE * MOST_TILES
#: Programs that a product should have: about two for each of the 132 multiprocessors of an H100. It is the same on every device, since
#: bits depend on it.
PROGRAMS = 256
#: Shortest stretch of a sum: shorter ones cost more than they save.
LEAST_STRETCH = 256
#: Bytes of a row that a program reads at once.
STEP_BYTES = 128
#: Steps that are read ahead, by number of row tiles, so that the shared memory of a multiprocessor holds two programs.
STAGES = {1: 8, 2: 6, 4: 5, 8: 4}
#: Bytes that a program may read ahead: less than the 99 KB that every card since Ampere has.
MOST_AHEAD = 96 << 10


class Plan(NamedTuple):
    """How a product is distributed to programs.

    Attributes:
        outputs: outputs per program.
        stretches: number of stretches of a sum.
        stretch: terms of each stretch but the last.
        step: terms that are read at once.
    """

    outputs: int
    stretches: int
    stretch: int
    step: int


def plan(outputs: int, inputs: int, itemsize: int) -> Plan:
    """How a matrix ``[outputs, inputs]`` is multiplied, or several that have so many outputs together, by any number of rows.

    Large matrices have enough programs with blocks of 64 outputs, which read the rows half as often as blocks of 32. The sums of
    smaller ones are cut into stretches until there are about :data:`PROGRAMS`. 3072 x 2048 becomes 96 blocks of 4 stretches,
    2048 x 8192 64 of 4, and 16384 x 2048 256 of 1.
    """
    block = LARGEST_BLOCK if outputs >= LARGEST_BLOCK * PROGRAMS else 32
    blocks, stretches, step = triton.cdiv(outputs, block), 1, STEP_BYTES // itemsize
    while blocks * stretches < PROGRAMS and inputs >= 2 * stretches * LEAST_STRETCH:
        stretches *= 2
    stretch = triton.cdiv(triton.cdiv(inputs, step), stretches) * step
    return Plan(block, triton.cdiv(inputs, stretch), stretch, step)


@triton.jit(do_not_specialize=["rows"])
def _multiply(  # type: ignore[no-untyped-def]  # its arguments are Triton's
    x, matrix, second, third, bias, second_bias, third_bias, out, rows, outputs, inputs, matrix_output, matrix_input, stretch,
    first_outputs, second_outputs,
    TILES: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
    WHOLE: tl.constexpr, BIAS: tl.constexpr, MATRICES: tl.constexpr,
):  # fmt: skip
    """``TILES * TILE`` rows by a block of outputs, over one stretch of the sums. WHOLE: it is the only stretch."""
    block, part = tl.program_id(1), tl.program_id(2)
    output = block * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(0) * (TILES * TILE) + tl.arange(0, TILE)
    begin = part * stretch
    end = tl.minimum(begin + stretch, inputs)
    own = output
    if MATRICES > 1:
        behind = block * BLOCK >= first_outputs
        matrix, bias = tl.where(behind, second, matrix), tl.where(behind, second_bias, bias)
        own -= tl.where(behind, first_outputs, 0)
    if MATRICES > 2:
        behind = block * BLOCK >= first_outputs + second_outputs
        matrix, bias = tl.where(behind, third, matrix), tl.where(behind, third_bias, bias)
        own -= tl.where(behind, second_outputs, 0)
    columns = matrix + own.to(tl.int64)[None, :] * matrix_output  # matrices of 2^31 elements exist
    sums = ()
    for _ in tl.static_range(TILES):
        sums += (tl.zeros([TILE, BLOCK], tl.float32),)  # type: ignore[assignment]  # one for each row tile
    for first in range(begin, end, STEP):
        term = first + tl.arange(0, STEP)
        weights = tl.load(
            columns + term.to(tl.int64)[:, None] * matrix_input,
            mask=(term < end)[:, None] & (output < outputs)[None, :],
            other=0.0,
        )
        added = ()
        for i in tl.static_range(TILES):
            values = tl.load(
                x + (row + i * TILE)[:, None] * inputs + term[None, :],
                mask=(row + i * TILE < rows)[:, None] & (term < end)[None, :],
                other=0.0,
            )
            added += (tl.dot(values, weights, sums[i], input_precision="ieee"),)  # type: ignore[assignment]
        sums = added
    for i in tl.static_range(TILES):
        result = sums[i]  # type: ignore[var-annotated]
        if BIAS:
            result += tl.load(bias + own, mask=output < outputs, other=0.0).to(tl.float32)[None, :]
        place = (row + i * TILE).to(tl.int64)  # large batches have 2^31 logits
        if not WHOLE:
            place += part * rows
        here = (row + i * TILE < rows)[:, None] & (output < outputs)[None, :]
        tl.store(out + place[:, None] * outputs + output[None, :], result.to(out.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=["rows"])
def _add_stretches(  # type: ignore[no-untyped-def]
    parts, bias, second_bias, third_bias, out, rows, outputs, first_outputs, second_outputs,
    STRETCHES: tl.constexpr, BLOCK: tl.constexpr, BIAS: tl.constexpr, MATRICES: tl.constexpr,
):  # fmt: skip
    """``[STRETCHES, rows, outputs]`` → ``[rows, outputs]``, added in order. A program has a block of one row."""
    own = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = own < outputs
    # Multiples of `outputs`, from which the compiler sees that numbers may be loaded four at a time.
    place = tl.program_id(0) * outputs + own
    total = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(STRETCHES):
        total += tl.load(parts + part * rows * outputs + place, mask=here, other=0.0)
    if BIAS:
        of = bias + own
        if MATRICES > 1:
            of = tl.where(own < first_outputs, of, second_bias + (own - first_outputs))
        if MATRICES > 2:
            third = own - first_outputs - second_outputs
            of = tl.where(third < 0, of, third_bias + third)
        total += tl.load(of, mask=here, other=0.0).to(tl.float32)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=here)


def few_rows_linear(x: Tensor, matrices: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
    sizes, inputs = [matrix.shape[0] for matrix in matrices], x.shape[-1]
    # Whatever else is in the batch: a node has the bits that it has alone.
    if not 0 < x.shape[-2:].numel() <= MOST_ROWS * inputs or not x.numel():
        return _many_rows_linear(x, matrices, biases)
    flat, outputs = x.reshape(-1, inputs).contiguous(), sum(sizes)
    rows, (block, stretches, stretch, step) = flat.shape[0], plan(outputs, inputs, x.element_size())
    out = x.new_empty((*x.shape[:-1], outputs))
    whole, given = stretches == 1, bool(biases)
    parts = out if whole else x.new_empty((stretches, rows, outputs), dtype=torch.float32)
    # The kernels need some tensor for what there is not.
    first, second, third = (*matrices, *[matrices[0]] * (MOST_MATRICES - len(matrices)))
    added = (*biases, *[flat] * (MOST_MATRICES - len(biases)))
    tiles = 1
    while tiles < MOST_TILES and tiles * TILE < rows:
        tiles *= 2
    lengths = sizes[0], sizes[1] if len(sizes) > 1 else 0
    if tiles >= 4 and (len(sizes) == 1 or not any(size % (2 * block) for size in sizes)):
        block *= 2
    ahead = MOST_AHEAD // ((tiles * TILE + block) * STEP_BYTES)
    _multiply[(triton.cdiv(rows, tiles * TILE), triton.cdiv(outputs, block), stretches)](
        flat, first, second, third, *added, parts, rows, outputs, inputs, *first.stride(), stretch, *lengths,
        TILES=tiles, TILE=TILE, BLOCK=block, STEP=step, WHOLE=whole, BIAS=whole and given, MATRICES=len(matrices),
        # A warp per 16 outputs. Their number changes no bits, since no sum is shared by warps.
        num_warps=block // 16, num_stages=min(STAGES[tiles], ahead), enable_fp_fusion=True,
    )  # fmt: skip
    if not whole:
        _add_stretches[(rows, triton.cdiv(outputs, 256))](
            parts, *added, out, rows, outputs, *lengths, STRETCHES=stretches, BLOCK=256, BIAS=given, MATRICES=len(matrices),
            num_warps=2, enable_fp_fusion=True,
        )  # fmt: skip
    return out


def _many_rows_linear(x: Tensor, matrices: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
    """Products of many rows, or none, by torch's kernels."""
    if len(matrices) == 1:
        return F.linear(x, matrices[0], biases[0] if biases else None)
    out = x.new_empty((*x.shape[:-1], sum(matrix.shape[0] for matrix in matrices)))
    flat, parts = x.reshape(-1, x.shape[-1]), out.view(-1, out.shape[-1]).split([len(m) for m in matrices], -1)
    for place, (matrix, part) in enumerate(zip(matrices, parts, strict=True)):
        if biases:
            torch.addmm(biases[place], flat, matrix.t(), out=part)
        else:
            torch.mm(flat, matrix.t(), out=part)
    return out


@triton.jit
def _normalize(  # type: ignore[no-untyped-def]  # its arguments are Triton's
    x, weight, out, width, epsilon, BLOCK: tl.constexpr, ONE_ADDED: tl.constexpr, ROUNDED_FIRST: tl.constexpr
):
    place = tl.arange(0, BLOCK)
    here = place < width
    first = tl.program_id(0).to(tl.int64) * width
    values = tl.load(x + first + place, mask=here, other=0.0).to(tl.float32)
    values *= tl.rsqrt(tl.sum(values * values) / width + epsilon)
    if ROUNDED_FIRST:
        values = values.to(x.dtype.element_ty).to(tl.float32)
    scale = tl.load(weight + place, mask=here, other=0.0).to(tl.float32)
    if ONE_ADDED:
        scale += 1.0
    tl.store(out + first + place, (values * scale).to(out.dtype.element_ty), mask=here)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float, one_added: bool, rounded_first: bool) -> Tensor:
    width = x.shape[-1]
    flat = x.reshape(-1, width).contiguous()
    out = torch.empty_like(flat)
    block = triton.next_power_of_2(width)
    _normalize[(flat.shape[0],)](
        flat, weight, out, width, epsilon, BLOCK=block, ONE_ADDED=one_added, ROUNDED_FIRST=rounded_first,
        num_warps=min(max(block // 512, 1), 16), enable_fp_fusion=True,
    )  # fmt: skip
    return out.view(x.shape)
