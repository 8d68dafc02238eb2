"""Products with quantized weights, and the layers that use them in the place of linear ones.

Three kernels, each with the same bits for a row whatever the number of rows:

=================  =========================================  ==============================================
kernel             weights                                    activations
=================  =========================================  ==============================================
``int8``           int8, one scale per output                 two or three bytes each, one scale per row
``weight_int8``    int8, one scale per output                 in bfloat16
``weight_int4``    4 bits, step and offset per group          in bfloat16
=================  =========================================  ==============================================

``int8`` is oneDNN's product of bytes, whose sums are whole numbers. With one byte per activation, outliers leave little of the
rest (SmolLM2-135M: a KL divergence of 0.045 per token, 4 bits per weight cost 0.013); with two, 0.002 is left. A row then counts
as two rows of bytes, which is still the fastest of the products with int8 weights where there is VNNI.

The others multiply bfloat16 alone: of other types PyTorch's kernels take one number at a time, and 30 times as long. ``weight_int4``
takes as long for every row as for the one before. Long texts are read otherwise where that pays
(:func:`dequantized_products`): the matrix is made one of bfloat16 or float32, and multiplied by as such.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from .. import torch_compat
from .fused import Latest, share_of

#: Weights of one row that share a step and an offset: the smallest that the kernel knows.
GROUP = 32
#: Tokens from which on a text is long: what making a wider matrix costs is 40 rows of the kernel, and products take the rest.
LONG_TEXT = 96
#: Numbers of what is computed on the way that are in memory at a time: above 32 MiB the C library fetches new pages for each.
TEMPORARY = 2**20
#: Shares of a group's range that are tried for its 16 values: outliers may be cut off where the sum of squares gains.
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


def use_quantized_kernels() -> None:
    """Lets inductor call the kernels itself."""
    operators = torch.ops.decoders
    torch_compat.lower_to_quantized_kernels(
        operators.multiply_int8.default, operators.multiply_weight_int8.default, operators.multiply_int4.default
    )


def kernel(name: str) -> Any:
    """A kernel of :mod:`~decoders.engine.model.torch_compat`, as an operator while it is traced."""
    # Not is_compiling(): in torch 2.13 that is true in every thread while one of them compiles.
    return getattr(torch.ops.decoders if torch.compiler.is_dynamo_compiling() else torch_compat, name)


def quantize_activations(x: Tensor, digits: int = 2) -> tuple[Tensor, Tensor]:
    """Rows of `x` ``[rows, in]`` as whole numbers of two or three bytes, and what 1 stands for, ``[rows, 1]`` float32.

    Returns:
        ``[digits·rows, in]`` uint8, first all upper bytes, the lowest ones last; 128 is the zero of each.
    """
    most = 127 * 256 ** (digits - 1)  # the upper byte then is at most 127
    step = x.abs().amax(-1, keepdim=True).float().clamp_min(1e-20) / most
    left, parts = (x / step).round_(), []
    for place in range(digits - 1, 0, -1):
        unit = 256**place
        below = 128 * (unit - 1) // 255  # what all bytes below it can take away at most
        parts.append(left.add(below).div_(unit).floor_())
        left = left.sub_(parts[-1], alpha=unit)
    return torch.cat([*parts, left]).add_(128).to(torch.uint8), step


_activations = Latest()


def _quantized(x: Tensor, digits: int) -> tuple[Tensor, Tensor]:
    def rows(x: Tensor) -> tuple[Tensor, Tensor]:
        return quantize_activations(x.reshape(-1, x.shape[-1]), digits)

    if torch.compiler.is_dynamo_compiling():  # the compiler sees for itself what is computed twice
        return rows(x)
    result: tuple[Tensor, Tensor] = _activations.of(x, digits, rows)
    return result


class _Quantized:
    """What the layers below have in common.

    Attributes:
        packed: the matrix; of several layers where these are multiplied as one (:mod:`.fused`).
        scale: what its numbers stand for, of the same layers.
        columns: which outputs of that are this layer's; None is all.
    """

    packed: Tensor
    scale: Tensor
    columns: tuple[int, int] | None = None

    def product(self, x: Tensor) -> Tensor:
        """``[…, in]`` → ``[…, out]``, without the bias."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        out = self.product(x) if self.columns is None else share_of(x, self.packed, self.columns, self.product)
        return out if self.bias is None else out + self.bias  # type: ignore[attr-defined]


class _Int8(_Quantized):
    zero: Tensor
    #: ``[out]`` of the type of the activations: multiplies what has been rounded to that type, as torchao's product does.
    after: Tensor | None
    #: Bytes of an activation: three where a library's float32 counts to the last bit.
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
        """``[rows, out]``. rows, step: `x` as :func:`quantize_activations` has it."""
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
    """Within it this thread dequantizes 4-bit matrices before it multiplies by them; this rounds otherwise than the kernel."""
    before, _reading.dequantizes = _reading.dequantizes, True
    try:
        yield
    finally:
        _reading.dequantizes = before


class _WeightInt4(_Quantized):
    group: int

    @property
    def dequantizable(self) -> bool:
        """Whether dequantized products are faster for long texts, and the layout of this matrix allows them."""
        if torch_compat.dequantized_type() is None:
            return False
        block = torch_compat.int4_block()
        return block > 0 and self.scale.shape[1] % block == 0

    def _dequantizes(self, x: Tensor) -> bool:
        # Of a long text the head is given a few tokens, and an expert some.
        return self.dequantizable and x.numel() >= LONG_TEXT * x.shape[-1]

    def product(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_dynamo_compiling() and _reading.dequantizes and self._dequantizes(x):
            wide = x.to(torch_compat.dequantized_type())
            return torch_compat.multiply_dequantized_int4(wide, self.packed, self.group, self.scale).to(x.dtype)
        rows = x.to(self.scale.dtype).reshape(-1, x.shape[-1]).contiguous()
        product = kernel("multiply_int4")(rows, self.packed, self.group, self.scale)
        return product.reshape(*x.shape[:-1], self.scale.shape[1]).to(x.dtype)


class Int8Linear(_Int8, nn.Linear):
    """An ``nn.Linear`` with int8 weights, multiplied by bytes."""


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
        # What the kernel multiplies by is bfloat16: rounded first, the levels fit what it has.
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
