"""Packs matrices of 4 bits in panels of 16 outputs for the CPU kernels (``quantized.h``). Scales are per output and group of inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from .....common.devices import narrowed

#: Outputs in a panel. A matrix must have a multiple of this number of outputs.
PANEL = 16


def takes(outputs: int, group: int) -> bool:
    """Whether the kernels support a matrix with `outputs` outputs and groups of `group` inputs."""
    return outputs % PANEL == 0 and group % 8 == 0 and group <= 512


def packed(levels: Tensor) -> Tensor:
    """Packs levels from 0 to 15, ``[out, in]`` uint8, two per byte in the order that the kernels read. Returns ``[out, in / 2]``."""
    # Of eight inputs, the first byte holds inputs 0 and 2; the next bytes hold 4 and 6, 1 and 3, 5 and 7.
    low, high = levels.view(-1, PANEL, levels.shape[1] // 8, 2, 2, 2).unbind(-2)
    return (low | high << 4).mT.transpose(1, 2).reshape(len(levels), -1)


def with_offsets(steps: Tensor, middles: Tensor) -> Tensor:
    """The scales ``[out, 2, groups]`` in the order that the kernels read, in bfloat16 if this loses no bits, else in float32.

    steps: ``[out, groups]``, each group's step from level to level; middles: ``[out, groups]``, each group's value of level 8.
    """
    scales = torch.stack([steps, middles], 1).float()
    short = narrowed(scales, torch.bfloat16)
    return in_panels(scales if short is None else short)


def in_panels(scales: Tensor) -> Tensor:
    """`scales` ``[out, 2, groups]`` in the order that the kernels read: by panel, group, kind of scale, and output."""
    return scales.unflatten(0, (-1, PANEL)).permute(0, 3, 2, 1).reshape(scales.shape)
