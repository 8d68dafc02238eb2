"""Packs matrices of 4 bits for the CPU kernels (``quantized.h``)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

#: Inputs of a block; a row of a matrix is filled up to whole blocks.
BLOCK = 128
#: Numbers after the scales that a kernel may read, because it reads whole vectors.
ROOM = 16


def packed(levels: Tensor) -> Tensor:
    """`levels` ``[out, in]`` of 0 … 15, uint8, two per byte: ``[out, in rounded up to BLOCK / 2]`` uint8."""
    out, inputs = levels.shape
    filled = F.pad(levels, (0, -inputs % BLOCK))
    # A group of 32 inputs is eight words of 16 bits; a word has every eighth input, the first one in its lowest bits.
    low, high = filled.view(out, -1, 2, 2, 8).unbind(-2)
    return (low | high << 4).transpose(-1, -2).reshape(out, -1).contiguous()


def with_room(steps: Tensor, middles: Tensor) -> Tensor:
    """Scales ``[out, 2, groups]``: the steps of groups ``[out, groups]``, and the values of level 8 (`middles`).

    float32, or bfloat16 if it loses nothing.
    """
    scales = torch.stack([steps, middles], 1).float()
    short = scales.bfloat16()
    return roomy(short if torch.equal(short.float(), scales) else scales)


def roomy(scales: Tensor) -> Tensor:
    """A copy of `scales` with :data:`ROOM` numbers of memory after it."""
    whole = scales.new_zeros(scales.numel() + ROOM)
    copy = whole[: scales.numel()].view(scales.shape)
    return copy.copy_(scales)
