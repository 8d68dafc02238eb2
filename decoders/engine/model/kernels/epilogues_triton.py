"""Epilogues of products on CUDA: activations, residuals, norms and rotary positions, in the kernel that adds up partial sums.

The input `parts` holds a product's partial sums, ``[stretches, rows, outputs]`` in float32: each is the sum of a stretch of the terms
(:mod:`.products_triton`). Or `parts` is the whole product, ``[1, rows, outputs]``. Without epilogues, a step of a small model would
have about a hundred more launches, of two microseconds each. Sums are rounded where the model rounds them.

PyTorch's mean distributes a row to threads depending on the number of rows, and inductor chooses the loops of a sum by timing. In both
cases, bits would vary. Here one program normalizes a row (or head), and the order of its sum depends only on the width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import MOST_MATRICES, Norm

#: Number of outputs of one program.
BLOCK = 256


@triton.jit
def activated(x, KIND: tl.constexpr):  # type: ignore[no-untyped-def]  # its arguments are Triton's
    """silu of `x` if KIND is 0, gelu approximated by tanh if KIND is 1. Both are ``x sigmoid(u)``."""
    u = x
    if KIND == 1:
        u = 1.5957691216057308 * (x + 0.044715 * x * x * x)
    return x / (1.0 + tl.exp(-tl.maximum(u, -80.0)))  # below -80 the result is 0, and exp would overflow


@triton.jit
def _normed(values, squares, weight, place, here, width, epsilon, ONE_ADDED: tl.constexpr, ROUNDED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Applies RMSNorm and its weight to `values`, a row or a part of a row. squares: the squares of all values of the row."""
    values *= tl.rsqrt(tl.sum(squares) / width + epsilon)
    if ROUNDED:
        values = values.to(weight.dtype.element_ty).to(tl.float32)
    scale = tl.load(weight + place, mask=here, other=0.0).to(tl.float32)
    if ONE_ADDED:
        scale += 1.0
    return (values * scale).to(weight.dtype.element_ty).to(tl.float32)


@triton.jit
def _summed(parts, place, here, size, STRETCHES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Adds up the entries of all parts at `place`, in order. size: number of entries of each part."""
    total = tl.load(parts + place, mask=here, other=0.0).to(tl.float32)
    for part in tl.static_range(1, STRETCHES):
        total += tl.load(parts + part * size + place, mask=here, other=0.0)
    return total


@triton.jit
def _biases(bias, second_bias, third_bias, own, here, first_outputs, second_outputs, MATRICES: tl.constexpr):  # type: ignore[no-untyped-def]
    """The biases of the outputs with the indices `own`, in a product with up to three matrices."""
    of = bias + own
    if MATRICES > 1:
        of = tl.where(own < first_outputs, of, second_bias + (own - first_outputs))
    if MATRICES > 2:
        third = own - first_outputs - second_outputs
        of = tl.where(third < 0, of, third_bias + third)
    return tl.load(of, mask=here, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["rows"])
def _add_stretches(  # type: ignore[no-untyped-def]
    parts, bias, second_bias, third_bias, out, rows, outputs, inner, first_outputs, second_outputs,
    STRETCHES: tl.constexpr, BLOCK: tl.constexpr, BIAS: tl.constexpr, MATRICES: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Adds up ``[STRETCHES, rows, outputs]`` to ``[rows, outputs]``; if KIND >= 0, to ``activation(gate) * up``, ``[rows, inner]``."""
    own = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here, row, size = own < inner, tl.program_id(0).to(tl.int64), rows.to(tl.int64) * outputs
    total = _summed(parts, row * outputs + own, here, size, STRETCHES)
    if BIAS:
        total += _biases(bias, second_bias, third_bias, own, here, first_outputs, second_outputs, MATRICES)
    if KIND >= 0:
        up = _summed(parts, row * outputs + inner + own, here, size, STRETCHES)
        if BIAS:
            up += tl.load(second_bias + own, mask=here, other=0.0).to(tl.float32)
        gate = total.to(out.dtype.element_ty).to(tl.float32)
        total = activated(gate, KIND) * up.to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * inner + own, total.to(out.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=["rows"])
def _add_to_residual(  # type: ignore[no-untyped-def]
    parts, bias, residual, before, after, out, normed, rows, width, before_epsilon, after_epsilon,
    STRETCHES: tl.constexpr, BLOCK: tl.constexpr, BIAS: tl.constexpr, BEFORE: tl.constexpr, BEFORE_ADDED: tl.constexpr,
    BEFORE_ROUNDED: tl.constexpr, AFTER: tl.constexpr, AFTER_ADDED: tl.constexpr, AFTER_ROUNDED: tl.constexpr,
):  # fmt: skip
    """Adds the sum of a row of ``[STRETCHES, rows, width]`` (normalized if BEFORE) to the residual; if AFTER, also writes the new
    residual normalized.
    """
    place = tl.arange(0, BLOCK)
    here, first = place < width, tl.program_id(0).to(tl.int64) * width
    total = _summed(parts, first + place, here, rows.to(tl.int64) * width, STRETCHES)
    if BIAS:
        total += tl.load(bias + place, mask=here, other=0.0).to(tl.float32)
    total = total.to(out.dtype.element_ty).to(tl.float32)
    if BEFORE:
        total = _normed(total, total * total, before, place, here, width, before_epsilon, BEFORE_ADDED, BEFORE_ROUNDED)
    total += tl.load(residual + first + place, mask=here, other=0.0).to(tl.float32)
    rounded = total.to(out.dtype.element_ty)
    tl.store(out + first + place, rounded, mask=here)
    if AFTER:
        total = rounded.to(tl.float32)
        total = _normed(total, total * total, after, place, here, width, after_epsilon, AFTER_ADDED, AFTER_ROUNDED)
        tl.store(normed + first + place, total.to(out.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=["rows", "nodes", "slots_length"])
def _rotate_to_cache(  # type: ignore[no-untyped-def]
    parts, bias, second_bias, third_bias, query_norm, key_norm, cos, sin, slots, query, keys, values,
    rows, nodes, slots_length, cos_row, epsilon, kb, kh, kn, vb, vh, vn,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, STRETCHES: tl.constexpr, BIAS: tl.constexpr,
    NORM: tl.constexpr, ONE_ADDED: tl.constexpr, ROUNDED: tl.constexpr, CACHE: tl.constexpr,
):  # fmt: skip
    """Adds up the parts for one head of one node; applies norms and rotary positions to queries and keys. Writes keys and
    values to the cache or to new tensors.
    """
    row, head = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, WIDTH)
    here, outputs = d < D, (HEADS + 2 * KEY_HEADS) * D
    first, size = row.to(tl.int64) * outputs, rows.to(tl.int64) * outputs
    own = head * D + d
    total = _summed(parts, first + own, here, size, STRETCHES)
    if BIAS:
        total += _biases(bias, second_bias, third_bias, own, here, HEADS * D, KEY_HEADS * D, 3)
    total = total.to(query.dtype.element_ty).to(tl.float32)
    b, n = (row // nodes).to(tl.int64), row % nodes
    slot = n.to(tl.int64)
    if CACHE:
        slot = tl.load(slots + row)
        slot = tl.where(slot < 0, slot + slots_length, slot)
    if head < HEADS + KEY_HEADS:
        # The sums of the head's other half are computed again here, because other threads hold them.
        turned = tl.where(d < D // 2, d + D // 2, d - D // 2)
        other = _summed(parts, first + head * D + turned, here, size, STRETCHES)
        if BIAS:
            other += _biases(bias, second_bias, third_bias, head * D + turned, here, HEADS * D, KEY_HEADS * D, 3)
        other = other.to(query.dtype.element_ty).to(tl.float32)
        if NORM:
            weight, squares = tl.where(head < HEADS, query_norm, key_norm), total * total
            total = _normed(total, squares, weight, d, here, D, epsilon, ONE_ADDED, ROUNDED)
            other = _normed(other, squares, weight, turned, here, D, epsilon, ONE_ADDED, ROUNDED)
        at = b * cos_row + n * D + d
        straight = total * tl.load(cos + at, mask=here, other=0.0).to(tl.float32)
        across = tl.where(d < D // 2, -other, other) * tl.load(sin + at, mask=here, other=0.0).to(tl.float32)
        straight = straight.to(query.dtype.element_ty).to(tl.float32)
        total = straight + across.to(query.dtype.element_ty).to(tl.float32)
    rounded = total.to(query.dtype.element_ty)
    if head < HEADS:
        tl.store(query + (row.to(tl.int64) * HEADS + head) * D + d, rounded, mask=here)
    elif head < HEADS + KEY_HEADS:
        tl.store(keys + b * kb + (head - HEADS).to(tl.int64) * kh + slot * kn + d, rounded, mask=here)
    else:
        tl.store(values + b * vb + (head - HEADS - KEY_HEADS).to(tl.int64) * vh + slot * vn + d, rounded, mask=here)


@triton.jit
def _normalize(x, weight, out, width, epsilon, BLOCK: tl.constexpr, ONE_ADDED: tl.constexpr, ROUNDED: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.arange(0, BLOCK)
    here, first = place < width, tl.program_id(0).to(tl.int64) * width
    values = tl.load(x + first + place, mask=here, other=0.0).to(tl.float32)
    values = _normed(values, values * values, weight, place, here, width, epsilon, ONE_ADDED, ROUNDED)
    tl.store(out + first + place, values.to(out.dtype.element_ty), mask=here)


def _three(biases: Sequence[Tensor], spare: Tensor) -> tuple[Tensor, ...]:
    """`biases`, filled up with `spare`, because kernels need an argument even for absent biases."""
    return (*biases, *[spare] * (MOST_MATRICES - len(biases)))


def added(parts: Tensor, biases: Sequence[Tensor], sizes: Sequence[int], dtype: torch.dtype, kind: int = -1) -> Tensor:
    """The sum of `parts` plus biases, ``[rows, outputs]``. If `kind` ≥ 0: ``activation(gate) * up``, ``[rows, outputs / 2]``."""
    stretches, rows, outputs = parts.shape
    inner = outputs if kind < 0 else outputs // 2
    out = parts.new_empty((rows, inner), dtype=dtype)
    lengths = sizes[0], sizes[1] if len(sizes) > 1 else 0
    _add_stretches[(rows, triton.cdiv(inner, BLOCK))](
        parts, *_three(biases, parts), out, rows, outputs, inner, *lengths,
        STRETCHES=stretches, BLOCK=BLOCK, BIAS=bool(biases), MATRICES=len(sizes), KIND=kind, num_warps=2, enable_fp_fusion=True,
    )  # fmt: skip
    return out


def _warps(block: int) -> int:
    return min(max(block // 512, 1), 16)


def added_to_residual(
    parts: Tensor, bias: Tensor | None, residual: Tensor, before: Norm, after: Norm
) -> tuple[Tensor, Tensor]:
    """The new residual ``[rows, H]``, and the new residual after the norm `after` (an empty tensor without a norm)."""
    stretches, rows, width = parts.shape
    out = torch.empty_like(residual)
    first, second = before.weight is not None, after.weight is not None
    normed = residual.new_empty(residual.shape if second else 0)
    block = triton.next_power_of_2(width)
    _add_to_residual[(rows,)](
        parts, *(residual if given is None else given for given in (bias, residual, before.weight, after.weight)),
        out, normed, rows, width, before.epsilon, after.epsilon, stretches, block, bias is not None,
        first, *before[2:], second, *after[2:],
        num_warps=_warps(block), enable_fp_fusion=True,
    )  # fmt: skip
    return out, normed


def rotated_to_cache(
    parts: Tensor, biases: Sequence[Tensor], norms: tuple[Norm, Norm], cos: Tensor, sin: Tensor, slots: Tensor | None,
    keys: Tensor, values: Tensor, size: Sequence[int], dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Adds up `parts`, and writes rotated keys and values to `slots` (None: the first slots) of `keys` and `values` ``[B, h, L, d]``.

    Returns the rotated queries, ``[B, N, H, d]``. size: B and N.
    """
    (stretches, rows, outputs), (_, key_heads, _, width) = parts.shape, keys.shape
    heads = outputs // width - 2 * key_heads
    query = parts.new_empty((*size, heads, width), dtype=dtype)
    first, normed = norms[0], norms[0].weight is not None
    weights = (norm.weight if normed else query for norm in norms)
    _rotate_to_cache[(rows, heads + 2 * key_heads)](
        parts, *_three(biases, parts), *weights, cos, sin, sin if slots is None else slots, query, keys, values,
        rows, size[1], keys.shape[2], 0 if len(cos) == 1 else cos.stride(0), first.epsilon, *keys.stride()[:3], *values.stride()[:3],
        HEADS=heads, KEY_HEADS=key_heads, D=width, WIDTH=max(triton.next_power_of_2(width), 16), STRETCHES=stretches,
        BIAS=bool(biases), NORM=normed, ONE_ADDED=first.one_added, ROUNDED=first.rounded_first, CACHE=slots is not None,
        num_warps=1, enable_fp_fusion=True,
    )  # fmt: skip
    return query


def normalized(x: Tensor, weight: Tensor, epsilon: float, one_added: bool, rounded_first: bool) -> Tensor:
    """`x` ``[…, H]`` with each row normalized and multiplied by `weight`."""
    flat = x.reshape(-1, x.shape[-1]).contiguous()
    out, block = torch.empty_like(flat), triton.next_power_of_2(x.shape[-1])
    _normalize[(len(flat),)](
        flat, weight, out, x.shape[-1], epsilon, block, one_added, rounded_first,
        num_warps=_warps(block), enable_fp_fusion=True,
    )  # fmt: skip
    return out.view(x.shape)
