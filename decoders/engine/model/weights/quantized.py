"""Products with quantized weights, and the layers that use them in the place of linear ones.

Three kernels, each with the same bits for a row whatever the number of rows:

=================  =========================================  ==============================================
kernel             weights                                    activations
=================  =========================================  ==============================================
``int8``           int8, one scale per output                 two or three bytes each, one scale per row
``weight_int8``    int8, one scale per output                 in bfloat16
``weight_int4``    4 bits, step and offset per group          in bfloat16
=================  =========================================  ==============================================

``int8`` is oneDNN's product of bytes, whose sums are integers. With one byte per activation, outliers leave few levels for the other
numbers (SmolLM2-135M: a KL divergence of 0.045 per token, where 4 bits per weight cost 0.013); with two bytes it is 0.002. A row then
counts as two rows of bytes, which is still the fastest product with int8 weights on CPUs with VNNI.

The others multiply only bfloat16: for other types PyTorch's kernels work on one number at a time and take 30 times as long. The time
of ``weight_int4`` is proportional to the number of rows. For long texts the matrix is therefore dequantized to bfloat16 or float32
first where that is faster (:func:`dequantized_products`).
"""

from __future__ import annotations

import functools
import threading
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from .. import torch_compat
from .fused import Latest, share_of

#: Weights of one row that share a step and an offset: the smallest number that the kernel supports.
GROUP = 32
#: Number of tokens from which on a text is long: dequantizing costs as much as 40 rows of the kernel, and the products the rest.
LONG_TEXT = 96
#: Largest temporary tensor, in elements: above 32 MiB the C library fetches new pages for each.
TEMPORARY = 2**20
#: Shares of a group's range that are tried for its 16 values: cutting off outliers may reduce the sum of squares.
CUTS = (1.0, 0.96, 0.92, 0.88, 0.84, 0.8)

_library = torch.library.Library("decoders", "FRAGMENT")
_library.define("multiply_int8(Tensor x, Tensor packed, Tensor scale, Tensor zero, int out_features) -> Tensor")
_library.define("multiply_weight_int8(Tensor x, Tensor weight, Tensor scale) -> Tensor")
_library.define("multiply_int4(Tensor x, Tensor packed, int group, Tensor scales) -> Tensor")
for _name in ("multiply_int8", "multiply_weight_int8", "multiply_int4"):
    for _key in ("CPU", "MkldnnCPU"):
        _library.impl(_name, getattr(torch_compat, _name), _key)


@torch.library.register_fake("decoders::multiply_int8", lib=_library)
def _(x: Tensor, packed: Tensor, scale: Tensor, zero: Tensor, out_features: int) -> Tensor:
    return x.new_empty((x.shape[0], out_features), dtype=torch.float32)


@torch.library.register_fake("decoders::multiply_weight_int8", lib=_library)
def _(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]))


@torch.library.register_fake("decoders::multiply_int4", lib=_library)
def _(x: Tensor, packed: Tensor, group: int, scales: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], scales.shape[1]))


@functools.cache
def use_quantized_kernels() -> None:
    """Makes inductor call the kernels directly."""
    operators = torch.ops.decoders
    torch_compat.lower_to_quantized_kernels(
        operators.multiply_int8.default, operators.multiply_weight_int8.default, operators.multiply_int4.default
    )


def kernel(name: str) -> Any:
    """A kernel of :mod:`~decoders.engine.model.torch_compat`, or its operator during tracing."""
    # Not is_compiling(): in torch 2.13 that is true in every thread while one of them compiles.
    return getattr(torch.ops.decoders if torch.compiler.is_dynamo_compiling() else torch_compat, name)


def quantize_activations(x: Tensor, digits: int = 2) -> tuple[Tensor, Tensor]:
    """Rows of `x` ``[rows, in]`` as integers of two or three bytes.

    Returns:
        ``[digits·rows, in]`` uint8, first all upper bytes, the lowest ones last; 128 stands for zero in each. And the value of 1,
        ``[rows, 1]`` float32.
    """
    most = 127 * 256 ** (digits - 1)  # so that the upper byte is at most 127
    step = x.abs().amax(-1, keepdim=True).float().clamp_min(1e-20) / most
    left, parts = (x / step).round_(), []
    for place in range(digits - 1, 0, -1):
        unit = 256**place
        below = 128 * (unit - 1) // 255  # the most that all lower bytes can subtract
        parts.append(left.add(below).div_(unit).floor_())
        left = left.sub_(parts[-1], alpha=unit)
    return torch.cat([*parts, left]).add_(128).to(torch.uint8), step


_activations = Latest()


def _quantized(x: Tensor, digits: int) -> tuple[Tensor, Tensor]:
    def rows(x: Tensor) -> tuple[Tensor, Tensor]:
        return quantize_activations(x.reshape(-1, x.shape[-1]), digits)

    if torch.compiler.is_dynamo_compiling():  # the compiler merges equal computations
        return rows(x)
    result: tuple[Tensor, Tensor] = _activations.of(x, digits, rows)
    return result


class _Quantized:
    """Base of the layers below.

    Attributes:
        packed: the matrix; that of several layers if these are multiplied as one (:mod:`.fused`).
        scale: the scales of `packed`.
        columns: this layer's columns of the product; None: all.
    """

    packed: Tensor
    scale: Tensor
    columns: tuple[int, int] | None = None

    @abstractmethod  # without ABC: a module cannot be turned into a class that has it as a base
    def product(self, x: Tensor) -> Tensor:
        """``[…, in]`` → ``[…, out]``, without the bias."""

    def forward(self, x: Tensor) -> Tensor:
        out = self.product(x) if self.columns is None else share_of(x, self.packed, self.columns, self.product)
        return out if self.bias is None else out + self.bias  # type: ignore[attr-defined]


class _Int8(_Quantized):
    zero: Tensor
    #: ``[out]`` of the type of the activations: a scale applied after rounding to that type, as in torchao.
    after: Tensor | None
    #: Bytes per activation: three for a library's float32 results to the last bit.
    digits: int

    def product(self, x: Tensor) -> Tensor:
        most = max(TEMPORARY // max(x.shape[-1], self.scale.shape[0]), 32)
        if torch.compiler.is_dynamo_compiling() or x.numel() <= most * x.shape[-1]:
            product = self._product(x, *_quantized(x, self.digits))
        else:
            parts = x.reshape(-1, x.shape[-1]).split(most)
            product = torch.cat([self._product(part, *quantize_activations(part, self.digits)) for part in parts])
        return product.reshape(*x.shape[:-1], self.scale.shape[0])

    def _product(self, x: Tensor, rows: Tensor, step: Tensor) -> Tensor:
        """``[rows, out]``. rows, step: of :func:`quantize_activations`."""
        out = self.scale.shape[0]
        sums = kernel("multiply_int8")(rows, self.packed, self.scale, self.zero, out).view(self.digits, -1, out)
        product = sums[-1]
        for place in range(1, self.digits):
            product = product.add_(sums[-1 - place], alpha=256**place)
        product = product.mul_(step).to(x.dtype)
        return product if self.after is None else product * self.after


class _WeightInt8(_Quantized):
    def product(self, x: Tensor) -> Tensor:
        rows = x.to(self.scale.dtype).reshape(-1, x.shape[-1]).contiguous()
        product = kernel("multiply_weight_int8")(rows, self.packed, self.scale)
        return product.reshape(*x.shape[:-1], -1).to(x.dtype)


class _Reading(threading.local):
    dequantizes = False


_reading = _Reading()


@contextmanager
def dequantized_products() -> Iterator[None]:
    """Within it this thread dequantizes 4-bit matrices before it multiplies, which rounds differently from the kernel."""
    before, _reading.dequantizes = _reading.dequantizes, True
    try:
        yield
    finally:
        _reading.dequantizes = before


class _WeightInt4(_Quantized):
    group: int

    @property
    def dequantizable(self) -> bool:
        """Whether the layout of this matrix allows dequantizing it, and that is faster for long texts."""
        if torch_compat.dequantized_type() is None:
            return False
        block = torch_compat.int4_block()
        return block > 0 and self.scale.shape[1] % block == 0

    def _dequantizes(self, x: Tensor) -> bool:
        # Even of a long text, the output head and experts read only a few tokens.
        return self.dequantizable and x.numel() >= LONG_TEXT * x.shape[-1]

    def product(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_dynamo_compiling() and _reading.dequantizes and self._dequantizes(x):
            wide = x.to(torch_compat.dequantized_type())
            return torch_compat.multiply_dequantized_int4(wide, self.packed, self.group, self.scale).to(x.dtype)
        rows = x.to(self.scale.dtype).reshape(-1, x.shape[-1]).contiguous()
        product = kernel("multiply_int4")(rows, self.packed, self.group, self.scale)
        return product.reshape(*x.shape[:-1], self.scale.shape[1]).to(x.dtype)


class Int8Linear(_Int8, nn.Linear):
    """An ``nn.Linear`` with int8 weights and quantized activations."""


class WeightInt8Linear(_WeightInt8, nn.Linear):
    """An ``nn.Linear`` with int8 weights."""


class WeightInt4Linear(_WeightInt4, nn.Linear):
    """An ``nn.Linear`` with weights of 4 bits."""


class Int8Conv1D(_Int8, Conv1D):
    """GPT-2's linear layer, likewise."""


class WeightInt8Conv1D(_WeightInt8, Conv1D):
    """GPT-2's linear layer, likewise."""


class WeightInt4Conv1D(_WeightInt4, Conv1D):
    """GPT-2's linear layer, likewise."""


def rounded_to_int8(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """`matrix` ``[out, in]`` as int8 and one scale per output, ``[out]`` float32."""
    scale = matrix.float().abs().amax(1).clamp_min(1e-20) / 127
    return (matrix.float() / scale[:, None]).round().to(torch.int8), scale


def rounded_to_int4(matrix: Tensor, group: int = GROUP) -> tuple[Tensor, Tensor]:
    """`matrix` ``[out, in]`` as 0 … 15, int32, and a step and an offset per group, ``[in / group, out, 2]`` bfloat16."""
    rows, columns = matrix.shape
    groups = matrix.float().reshape(rows, columns // group, group)
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    best: tuple[Tensor, Tensor, Tensor, Tensor] | None = None
    for cut in CUTS:
        # The kernel's steps and offsets are bfloat16: they are rounded first, so that the levels fit them.
        step = ((high - low) * cut / 15).clamp_min(1e-20).to(torch.bfloat16).float()
        middle = ((high + low) / 2 + step / 2).to(torch.bfloat16).float()
        levels = ((groups - middle) / step + 8).round().clamp(0, 15)
        error = ((levels - 8) * step + middle - groups).square().sum(-1, keepdim=True)
        if best is None:
            best = error, levels, step, middle
        else:
            better = error < best[0]
            best = tuple(
                torch.where(better, new, old) for new, old in zip((error, levels, step, middle), best, strict=True)
            )  # type: ignore[assignment]
    assert best is not None
    _, levels, step, middle = best
    scales = torch.cat([step, middle], dim=-1).transpose(0, 1).contiguous().to(torch.bfloat16)
    return levels.reshape(rows, columns).to(torch.int32), scales
