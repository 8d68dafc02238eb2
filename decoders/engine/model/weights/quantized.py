"""Layers that multiply by quantized weights with the CPU kernels (:mod:`~decoders.engine.model.kernels.cpu`).

========  ======================================================  ==================================================
weights   levels                                                  scales
========  ======================================================  ==================================================
``int8``  int8, as they lie                                       one per output, or per output and group of inputs
``int4``  0 … 15, two per byte, in the order that a kernel reads  a step and an offset per output and group of inputs
========  ======================================================  ==================================================

Activations are rounded to 16 bits with a scale per row: with 8 bits, outliers leave few levels for other numbers (SmolLM2-135M: a KL
divergence of 0.045 per token, more than the 0.013 of 4 bits per weight); with 16 bits it is 0.002. Products of integers are added
exactly, and groups in a fixed order: a row has the same bits for any number of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ..kernels import cpu
from ..kernels.cpu import four_bits
from .fused import Joint

#: Weights of a row that share a step and an offset in this package's int4: the smallest number that the kernels support.
GROUP = 32

_operators: dict[str, Callable[..., Tensor]] = {}


def has_kernels() -> bool:
    """Whether this machine has kernels for quantized weights; must be called before a layer runs."""
    kernels = cpu.chosen().kernels
    if kernels is not None:
        _operators["multiply"] = kernels.quantized_linear
    return kernels is not None


class _Quantized(Joint):
    """Base of the layers below.

    Attributes:
        levels: ``[out, in]`` int8, or ``[out, …]`` uint8 of :func:`~decoders.engine.model.kernels.cpu.four_bits.packed`.
        scales: ``[out, groups]`` float32 for int8, ``[out, 2, groups]`` float32 or bfloat16 for 4 bits.
        after: ``[out]`` in the dtype of the activations: scales applied after rounding to this dtype, as in torchao, or None.
        digits: 16-bit numbers per activation: two for a library's float32 results, else one.
    """

    levels: Tensor
    scales: Tensor
    after: Tensor | None
    digits: int

    def forward(self, x: Tensor) -> Tensor:
        out = self.product(x, _product)
        if self.after is None:
            return out
        out = out * self.after
        return out if self.bias is None else out + self.bias  # type: ignore[attr-defined]


def _product(x: Tensor, layers: tuple[Any, ...]) -> Tensor:
    """``[…, out]`` of all `layers`."""
    first = layers[0]
    biases = [] if first.bias is None or first.after is not None else [layer.bias for layer in layers]
    levels, scales = [layer.levels for layer in layers], [layer.scales for layer in layers]
    return _operators["multiply"](x, levels, scales, biases, first.digits)


def product_kind(layer: Any) -> Hashable:
    """A value that is equal for layers that can be multiplied as one if they have the same input."""
    inputs, bias = layer.levels.shape[1], None if layer.bias is None else layer.bias.dtype
    scales = layer.scales.dtype, layer.scales.shape[1:]
    return type(layer), inputs, layer.levels.dtype, scales, layer.digits, layer.after is None, bias


class QuantizedLinear(_Quantized, nn.Linear):
    """An ``nn.Linear`` with quantized weights."""


class QuantizedConv1D(_Quantized, Conv1D):
    """GPT-2's linear layer with quantized weights."""


#: Class of a layer → class that replaces it.
KINDS: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: QuantizedLinear, Conv1D: QuantizedConv1D}


def rounded_to_int8(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """`matrix` ``[out, in]`` as int8, and a scale per output, ``[out, 1]`` float32."""
    wide = matrix.float()
    scale = wide.abs().amax(1, keepdim=True).clamp_min(1e-20) / 127
    return (wide / scale).round_().to(torch.int8), scale


def rounded_to_int4(matrix: Tensor, group: int = GROUP) -> tuple[Tensor, Tensor]:
    """`matrix` ``[out, in]`` as levels 0 … 15, uint8, and ``[out, 2, in / group]`` bfloat16: the steps of groups, and the values of
    level 8. The levels cover the part of a group's range with the least squared error: cutting off outliers may reduce it.
    """
    kernels = cpu.chosen().kernels
    assert kernels is not None
    levels, scales = kernels.round_to_four_bits(matrix, group)
    return levels, scales[: -four_bits.ROOM].view(len(matrix), 2, -1)
