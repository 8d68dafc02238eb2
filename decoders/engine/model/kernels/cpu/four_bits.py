"""Packs matrices of 4 bits for the CPU kernels (``quantized.h``). Each group of a row's inputs has its own scales."""

from __future__ import annotations

import torch
from torch import Tensor

from .....common.devices import narrowed

#: Kernels read whole vectors and blocks: up to this many numbers past the end of the scales, and bytes past the end of the levels.
ROOM, ROOM_OF_LEVELS = 16, 48


def packed(levels: Tensor) -> Tensor:
    """Packs `levels` ``[out, in]`` uint8, 0 … 15, two per byte: ``[out, in / 2]`` uint8. `in` must be a multiple of 32."""
    # A group of 32 inputs is eight words of 16 bits. A word holds every eighth input of the group, the first in the lowest bits.
    low, high = levels.view(len(levels), -1, 2, 2, 8).unbind(-2)
    return roomy((low | high << 4).transpose(-1, -2).reshape(len(levels), -1), ROOM_OF_LEVELS)


def with_room(steps: Tensor, middles: Tensor) -> Tensor:
    """Scales ``[out, 2, groups]``: each group's step from level to level (`steps` ``[out, groups]``) and value of level 8 (`middles`).

    They are float32, or bfloat16 if bfloat16 holds the same numbers.
    """
    scales = torch.stack([steps, middles], 1).float()
    short = narrowed(scales, torch.bfloat16)
    return roomy(scales if short is None else short)


def roomy(numbers: Tensor, room: int = ROOM) -> Tensor:
    """A copy of `numbers`, with memory for `room` more numbers behind it."""
    whole = numbers.new_zeros(numbers.numel() + room)
    copy = whole[: numbers.numel()].view(numbers.shape)
    return copy.copy_(numbers)
