"""Root-mean-square norms in which a row has the same bits however many rows there are.

PyTorch's mean deals a row out to more or fewer threads by the number of rows, and inductor chooses the loops of a reduction by timing.
Here a row is one program, and its width alone decides how that adds up.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import operator


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


def _rms_norm(x: Tensor, weight: Tensor, epsilon: float, one_added: bool, rounded_first: bool) -> Tensor:
    width = x.shape[-1]
    flat = x.reshape(-1, width).contiguous()
    out = torch.empty_like(flat)
    block = triton.next_power_of_2(width)
    _normalize[(flat.shape[0],)](
        flat, weight, out, width, epsilon, BLOCK=block, ONE_ADDED=one_added, ROUNDED_FIRST=rounded_first,
        num_warps=min(max(block // 512, 1), 16), enable_fp_fusion=True,
    )  # fmt: skip
    return out.view(x.shape)


def _fake(x: Tensor, weight: Tensor, epsilon: float, one_added: bool, rounded_first: bool) -> Tensor:
    return x.new_empty(x.shape)


#: ``x / sqrt(mean(x²) + epsilon) * weight`` along the last dimension, computed in float32. x: ``[…, H]``, weight: ``[H]``, of one type.
#: one_added: the factor is ``1 + weight``; rounded_first: the quotient is rounded to that type before it is multiplied.
rms_norm = operator(
    "rms_norm(Tensor x, Tensor weight, float epsilon, bool one_added, bool rounded_first) -> Tensor", _rms_norm, _fake
)
