"""The kernels of :mod:`.products` on CUDA.

cuBLAS chooses its kernel by the number of rows, and its kernels add up the terms of a sum in different orders. Here the order depends
only on the matrix. Each sum is cut into stretches at fixed places ("split-K", :func:`plan`). Tensor cores add up each stretch from
beginning to end, and then the stretches are added in order.

A program reads its part of the matrix once for up to 128 rows, and holds the rows' sums in registers. Every block of outputs reads the
rows again, mostly from the L2 cache. In programs of 64 or 128 rows, the rows would be no less data than a block's part of the matrix,
so blocks are twice as large, which does not change bits. Further rows of a batch run in other programs, in parallel.

The kernel that adds up stretches also computes the epilogue (:mod:`.epilogues_triton`). If there is a single stretch, the kernel of the
product computes activations itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from . import LARGEST_BLOCK, MOST_MATRICES, Norm
from .epilogues_triton import activated, added, added_to_residual, rotated_to_cache
from .products_cuda import new_keys

#: Number of rows of a tensor-core instruction; fewer rows cost the same.
TILE = 16
#: Greatest number of tiles of rows that a program multiplies.
MOST_TILES = 8
#: With more nodes per row of the batch than this (long texts), PyTorch computes the product, because cuBLAS is fast with many rows.
MOST_ROWS = TILE * MOST_TILES
#: Wanted number of programs of a product: about two for each multiprocessor of an H100. The number is fixed, because bits depend on it.
PROGRAMS = 256
#: Shortest stretch of a sum, in terms; a shorter stretch would cost more than it saves.
LEAST_STRETCH = 256
#: Bytes of a row that a program reads at once.
STEP_BYTES = 128
#: Maps a program's number of row tiles to the number of steps that it reads ahead. With these numbers, two programs fit into the
#: shared memory of a multiprocessor.
STAGES = {1: 8, 2: 6, 4: 5, 8: 4}
#: Greatest number of bytes that a program reads ahead; GPUs since Ampere have 99 KB of shared memory.
MOST_AHEAD = 96 << 10


class LaunchPlan(NamedTuple):
    """How a product is distributed to programs.

    Attributes:
        outputs: number of outputs per program.
        stretches: number of stretches that a sum is cut into.
        stretch: number of terms of each stretch except the last.
        step: number of terms that are read at once.
    """

    outputs: int
    stretches: int
    stretch: int
    step: int


def plan(outputs: int, inputs: int, itemsize: int) -> LaunchPlan:
    """The plan for any number of rows and a matrix ``[outputs, inputs]``, or several matrices with this total of outputs.

    Large matrices get blocks of 64 outputs, which read the rows half as often as blocks of 32 and still give enough programs. Smaller
    matrices get blocks of 32, and their sums are cut into stretches until there are about :data:`PROGRAMS` programs: 3072 x 2048 has 96
    blocks of 4 stretches, 2048 x 8192 has 64 blocks of 4, and 16384 x 2048 has 256 blocks of 1.
    """
    block = LARGEST_BLOCK if outputs >= LARGEST_BLOCK * PROGRAMS else 32
    blocks, stretches, step = triton.cdiv(outputs, block), 1, STEP_BYTES // itemsize
    while blocks * stretches < PROGRAMS and inputs >= 2 * stretches * LEAST_STRETCH:
        stretches *= 2
    stretch = triton.cdiv(triton.cdiv(inputs, step), stretches) * step
    return LaunchPlan(block, triton.cdiv(inputs, stretch), stretch, step)


@triton.jit(do_not_specialize=["rows"])
def _multiply(  # type: ignore[no-untyped-def]  # its arguments are Triton's
    x, matrix, second, third, bias, second_bias, third_bias, out, rows, outputs, inputs, matrix_output, matrix_input, stretch,
    first_outputs, second_outputs,
    TILES: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
    WHOLE: tl.constexpr, BIAS: tl.constexpr, MATRICES: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Multiplies ``TILES * TILE`` rows by a block of outputs, over a stretch of the sums. WHOLE: whether there is only one stretch. If
    KIND is not negative, the matrices are gate and up with `outputs` outputs each, and the result is ``activation(gate) * up``."""
    block, part = tl.program_id(1), tl.program_id(2)
    output = block * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(0) * (TILES * TILE) + tl.arange(0, TILE)
    begin = part * stretch
    end = tl.minimum(begin + stretch, inputs)
    own = output
    if KIND < 0 and MATRICES > 1:
        behind = block * BLOCK >= first_outputs
        matrix, bias = tl.where(behind, second, matrix), tl.where(behind, second_bias, bias)
        own -= tl.where(behind, first_outputs, 0)
    if KIND < 0 and MATRICES > 2:
        behind = block * BLOCK >= first_outputs + second_outputs
        matrix, bias = tl.where(behind, third, matrix), tl.where(behind, third_bias, bias)
        own -= tl.where(behind, second_outputs, 0)
    columns = matrix + own.to(tl.int64)[None, :] * matrix_output  # matrices of 2^31 elements exist
    factors = second + own.to(tl.int64)[None, :] * matrix_output
    sums = ()
    for _ in tl.static_range(TILES if KIND < 0 else 2 * TILES):
        sums += (tl.zeros([TILE, BLOCK], tl.float32),)  # type: ignore[assignment]  # one for each row tile
    for first in range(begin, end, STEP):
        term = first + tl.arange(0, STEP)
        place = term.to(tl.int64)[:, None] * matrix_input
        there = (term < end)[:, None] & (output < outputs)[None, :]
        weights = tl.load(columns + place, mask=there, other=0.0)
        if KIND >= 0:
            others = tl.load(factors + place, mask=there, other=0.0)
        added, more = (), ()
        for i in tl.static_range(TILES):
            values = tl.load(
                x + (row + i * TILE).to(tl.int64)[:, None] * inputs + term[None, :],  # large batches have 2^31 numbers
                mask=(row + i * TILE < rows)[:, None] & (term < end)[None, :],
                other=0.0,
            )
            added += (tl.dot(values, weights, sums[i], input_precision="ieee"),)  # type: ignore[assignment]
            if KIND >= 0:
                more += (tl.dot(values, others, sums[TILES + i], input_precision="ieee"),)  # type: ignore[assignment]
        sums = added + more
    for i in tl.static_range(TILES):
        result = sums[i]  # type: ignore[var-annotated]
        if BIAS:
            result += tl.load(bias + own, mask=output < outputs, other=0.0).to(tl.float32)[None, :]
        if KIND >= 0:
            factor = sums[TILES + i]  # type: ignore[var-annotated]
            if BIAS:
                factor += tl.load(second_bias + own, mask=output < outputs, other=0.0).to(tl.float32)[None, :]
            gate = result.to(out.dtype.element_ty).to(tl.float32)  # type: ignore[var-annotated]
            result = activated(gate, KIND) * factor.to(out.dtype.element_ty).to(tl.float32)
        target = (row + i * TILE).to(tl.int64)
        if not WHOLE:
            target += part * rows
        here = (row + i * TILE < rows)[:, None] & (output < outputs)[None, :]
        tl.store(out + target[:, None] * outputs + output[None, :], result.to(out.dtype.element_ty), mask=here)


def parts_of(
    x: Tensor, matrices: Sequence[Tensor], biases: Sequence[Tensor], kind: int = -1
) -> tuple[Tensor, Sequence[Tensor]]:
    """A product's sums over each stretch, ``[stretches, rows, outputs]``, and the biases that the caller has to add.

    kind: the activation. Applied here if there is a single stretch; the sums then have half as many outputs.
    """
    sizes, inputs = [matrix.shape[0] for matrix in matrices], x.shape[-1]
    # The number of nodes per row of the batch decides whether torch multiplies, so that a node's bits do not depend on other rows.
    if not 0 < x.shape[-2:].numel() <= MOST_ROWS * inputs or not x.numel():
        return _many_rows_linear(x, matrices, biases).reshape(1, -1, sum(sizes)), ()
    flat, outputs = x.reshape(-1, inputs).contiguous(), sum(sizes)
    rows, (block, stretches, stretch, step) = flat.shape[0], plan(outputs, inputs, x.element_size())
    whole, given = stretches == 1, bool(biases)
    kind = kind if whole else -1
    dtype = x.dtype if whole else torch.float32
    parts = x.new_empty((stretches, rows, outputs if kind < 0 else sizes[0]), dtype=dtype)
    # Any tensor can stand for absent matrices and biases.
    first, second, third = (*matrices, *[matrices[0]] * (MOST_MATRICES - len(matrices)))
    added_here = (*biases, *[flat] * (MOST_MATRICES - len(biases)))
    tiles = 1
    while tiles < MOST_TILES and tiles * TILE < rows:
        tiles *= 2
    lengths = sizes[0], sizes[1] if len(sizes) > 1 else 0
    if tiles >= 4 and (kind >= 0 or len(sizes) == 1 or not any(size % (2 * block) for size in sizes)):
        block *= 2
    ahead, warps = MOST_AHEAD // ((tiles * TILE + block) * STEP_BYTES), block // 16
    if kind >= 0:  # half of a block's outputs come from each matrix
        outputs, block = sizes[0], block // 2
    _multiply[(triton.cdiv(rows, tiles * TILE), triton.cdiv(outputs, block), stretches)](
        flat, first, second, third, *added_here, parts, rows, outputs, inputs, *first.stride(), stretch, *lengths,
        TILES=tiles, TILE=TILE, BLOCK=block, STEP=step, WHOLE=whole, BIAS=whole and given, MATRICES=len(matrices), KIND=kind,
        # There is a warp per 16 outputs. The number of warps does not change bits, because no sum is split between warps.
        num_warps=warps, num_stages=min(STAGES[tiles], ahead), enable_fp_fusion=True,
    )  # fmt: skip
    return parts, () if whole else biases


def few_rows_linear(x: Tensor, matrices: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
    parts, missing = parts_of(x, matrices, biases)
    sizes = [matrix.shape[0] for matrix in matrices]
    # A single part is the product.
    out = added(parts, missing, sizes, x.dtype) if len(parts) > 1 else parts
    return out.view(*x.shape[:-1], sum(sizes))


def gated_linear(x: Tensor, pair: Sequence[Tensor], biases: Sequence[Tensor], kind: int) -> Tensor:
    parts, missing = parts_of(x, pair, biases, kind)
    inner = pair[0].shape[0]
    done = parts.shape[-1] == inner
    return (parts if done else added(parts, missing, [inner, inner], x.dtype, kind)).view(*x.shape[:-1], inner)


def linear_to_residual(
    x: Tensor, matrix: Tensor, bias: Tensor | None, residual: Tensor, *norms: Any
) -> tuple[Tensor, Tensor]:
    before, after = Norm(*norms[:4]), Norm(*norms[4:])
    parts, missing = parts_of(x, [matrix], [] if bias is None else [bias])
    flat = residual.reshape(-1, residual.shape[-1]).contiguous()
    out, normed = added_to_residual(parts, missing[0] if missing else None, flat, before, after)
    return out.view(residual.shape), normed.view(residual.shape) if normed.numel() else normed


def linear_rotated(
    x: Tensor, matrices: Sequence[Tensor], biases: Sequence[Tensor], *around: Any
) -> tuple[Tensor, Tensor, Tensor]:
    keys, values = (new_keys(x, matrices, around[-2]) for _ in range(2))
    given: tuple[Any, ...] = *around, None, keys, values
    return linear_to_cache(x, matrices, biases, *given), keys, values


def linear_to_cache(
    x: Tensor, matrices: Sequence[Tensor], biases: Sequence[Tensor], query_norm: Tensor | None, key_norm: Tensor | None, epsilon: float,
    one_added: bool, rounded_first: bool, cos: Tensor, sin: Tensor, slots: Tensor | None, keys: Tensor, values: Tensor,
) -> Tensor:  # fmt: skip
    norms = Norm(query_norm, epsilon, one_added, rounded_first), Norm(key_norm, epsilon, one_added, rounded_first)
    parts, missing = parts_of(x, matrices, biases)
    slots = None if slots is None else slots.contiguous()
    return rotated_to_cache(
        parts, missing, norms, cos.contiguous(), sin.contiguous(), slots, keys, values, x.shape[:2], x.dtype
    )


def _many_rows_linear(x: Tensor, matrices: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
    """The product of many rows, or of no rows, by torch's kernels, ``[…, outputs]``."""
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
