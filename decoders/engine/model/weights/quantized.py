"""Layers that multiply by quantized weights with the CPU kernels (:mod:`~decoders.engine.model.kernels.cpu`).

========  ======================================================  ==================================================
weights   levels                                                  scales
========  ======================================================  ==================================================
``int8``  int8, in the order of the matrix                        one per output, or per output and group of inputs
``int4``  0 … 15, two per byte, in the order that a kernel reads  a step and an offset per output and group of inputs
========  ======================================================  ==================================================

Activations are rounded to 16 bits with a scale per row. With 8 bits, outliers would leave few levels for other numbers: for
SmolLM2-135M the KL divergence per token would be 0.045, more than the 0.013 of 4-bit weights; with 16 bits it is 0.002. Products of
integers are added exactly, and groups in a fixed order, so a row has the same bits for any number of rows.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ..kernels import Operands, cpu
from ..kernels.products import on_cpu, take_cpu_kernels
from ..modules_compat import is_parametrized
from .layers import Joint, biases_of

#: How many weights of a row share a step and an offset in this package's int4.
GROUP = 32


def has_kernels() -> bool:
    """Whether this machine has kernels for quantized weights. Call it before a quantized layer runs."""
    return take_cpu_kernels() is not None


class _Quantized(Joint):
    """Base of linear layers with quantized weights.

    Attributes:
        levels: ``[out, in]`` int8, or ``[out, in / 2]`` uint8 from :func:`~decoders.engine.model.kernels.cpu.four_bits.packed`.
        scales: ``[out, groups]`` float32 for int8, ``[out, 2, groups]`` float32 or bfloat16 for 4 bits.
        after: ``[out]``, scales that multiply the product after it is rounded to the dtype of the activations, as in torchao; or None.
        digits: how many 16-bit numbers represent an activation: two if a library's layer returns float32, else one.
    """

    levels: Tensor
    scales: Tensor
    after: Tensor | None
    digits: int

    @staticmethod
    def operands(layers: Sequence[Any]) -> Operands | None:
        digits = layers[0].digits
        alone = any(layer.after is not None or layer.digits != digits for layer in layers)
        return None if alone else _operands(layers)

    def forward(self, x: Tensor) -> Tensor:
        if is_parametrized(self):
            return super().forward(x)  # type: ignore[misc]  # the forward of the replaced class
        out = self.product(x, _product)
        if self.after is None:
            return out
        out = out * self.after
        return out if self.bias is None else out + self.bias  # type: ignore[attr-defined]


def _operands(layers: Sequence[Any]) -> Operands:
    first = layers[0]
    biases = [] if first.after is not None else biases_of(layers)
    return Operands([layer.levels for layer in layers], [layer.scales for layer in layers], biases, first.digits)


def _product(x: Tensor, layers: tuple[Any, ...]) -> Tensor:
    """The product ``[…, out]`` of `x` and all `layers`."""
    return on_cpu["quantized_linear"](x, *_operands(layers))


def product_kind(layer: Any) -> Hashable:
    """A key for a layer. Layers with equal keys and the same input can be multiplied as one product."""
    inputs, bias = layer.levels.shape[1], None if layer.bias is None else layer.bias.dtype
    scales = layer.scales.dtype, layer.scales.shape[1:]
    return type(layer), inputs, layer.levels.dtype, scales, layer.digits, layer.after is None, bias


class QuantizedLinear(_Quantized, nn.Linear):
    """An ``nn.Linear`` with quantized weights."""


class QuantizedConv1D(_Quantized, Conv1D):
    """GPT-2's linear layer with quantized weights."""


#: Maps the class of a layer to the class that replaces it.
KINDS: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: QuantizedLinear, Conv1D: QuantizedConv1D}


def rounded_to_int8(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """`matrix` ``[out, in]`` as int8, and a scale per output, ``[out, 1]`` float32."""
    wide = matrix.float()
    scale = wide.abs().amax(1, keepdim=True).clamp_min(1e-20) / 127
    return (wide / scale).round_().to(torch.int8), scale


def rounded_to_int4(matrix: Tensor, group: int = GROUP) -> tuple[Tensor, Tensor]:
    """`matrix` ``[out, in]`` as levels 0 … 15, uint8, and scales ``[out, 2, in / group]`` bfloat16: each group's step from level to
    level, and its value of level 8. The range of a group's levels is chosen for the least squared error; it may cut off outliers.
    """
    kernels = cpu.chosen().kernels
    assert kernels is not None
    return kernels.round_to_four_bits(matrix, group)
