"""Formats in which other libraries pack matrices of 4 and 8 bits into words of 32 bits. A layer's tensors show its format.

An entry of :data:`FORMATS` describes where levels, scales and zeros are, and how they are packed. A format is used for a layer if the
matrix, unpacked in this format, gives the layer's own output for a random input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from ..modules_compat import hooks_of
from .twin import share_weights


class Levels(NamedTuple):
    """The matrix ``scales * (levels - zeros)``. levels: ``[out, in]`` uint8; scales, zeros: ``[out, groups]`` float32."""

    levels: Tensor
    scales: Tensor
    zeros: Tensor

    def product(self, x: Tensor) -> Tensor:
        """``x @ matrix.T`` in float32."""
        groups = self.levels.float().unflatten(1, (self.scales.shape[1], -1))
        return x.float() @ ((groups - self.zeros[..., None]) * self.scales[..., None]).flatten(1).T


@dataclass(frozen=True)
class Format:
    """How a library packs a matrix.

    Attributes:
        levels, scales, zeros: names of the layer's tensors. If a layer has no zeros, the middle level stands for zero.
        inputs_first: whether shapes are ``[in, out]`` and ``[groups, out]``, not ``[out, in]`` and ``[out, groups]``.
        packed, zeros_packed: the dimensions along which a word holds several levels, and several zeros.
        order: the order of the numbers in a word, from the lowest bits on; empty for ascending order.
        less: the number that was subtracted from the zeros before they were stored.
    """

    levels: str
    scales: str
    zeros: str
    inputs_first: bool
    packed: int
    zeros_packed: int
    order: tuple[int, ...] = ()
    less: int = 0

    def bits(self, layer: nn.Module) -> int | None:
        """The bits per level of a layer in this format, 4 or 8; None for other layers."""
        words, scales = (getattr(layer, name, None) for name in (self.levels, self.scales))
        sizes = getattr(layer, "in_features", 0), getattr(layer, "out_features", 0)
        if (
            not isinstance(words, Tensor)
            or not isinstance(scales, Tensor)
            or words.dtype != torch.int32
            or words.dim() != 2
        ):
            return None
        size = sizes if self.inputs_first else sizes[::-1]
        along, across = size[self.packed], size[1 - self.packed]
        fits = words.device.type == "cpu" and along and words.shape[1 - self.packed] == across and scales.dim() == 2
        grouped = fits and not sizes[0] % scales.shape[0 if self.inputs_first else 1]
        known = [bits for bits in (4, 8) if len(self.order) in (0, 32 // bits)]
        return next((bits for bits in known if grouped and words.shape[self.packed] * 32 == along * bits), None)

    def sources(self, layer: nn.Module) -> list[Tensor]:
        named = (getattr(layer, name, None) for name in (self.levels, self.scales, self.zeros))
        return [each for each in named if isinstance(each, Tensor)]

    def unpacked(self, bits: int, words: Tensor, scales: Tensor, zeros: Tensor | None = None) -> Levels:
        """The matrix that is packed in the tensors of :meth:`sources`."""
        levels = self._numbers(words, bits, self.packed).to(torch.uint8)
        steps, middles = scales.float(), self.middles(bits, scales, zeros)
        return Levels(*(each.t().contiguous() if self.inputs_first else each for each in (levels, steps, middles)))

    def middles(self, bits: int, scales: Tensor, zeros: Tensor | None) -> Tensor:
        """The zeros as float32, in the shape of `scales`."""
        if zeros is None:
            return torch.full_like(scales, 1 << (bits - 1), dtype=torch.float32)
        return self._numbers(zeros, bits, self.zeros_packed).float() + self.less

    def _numbers(self, words: Tensor, bits: int, dim: int) -> Tensor:
        shifts = torch.arange(0, 32, bits, device=words.device, dtype=words.dtype)
        numbers = (words.movedim(dim, -1)[..., None] >> shifts) & ((1 << bits) - 1)
        if self.order:
            numbers = numbers[..., torch.tensor(self.order, device=words.device).argsort()]
        return numbers.flatten(-2).movedim(-1, dim)


#: The formats of GPTQ, of older GPTQ files (which store zeros minus one), of AWQ, and of compressed-tensors.
FORMATS = (
    Format("qweight", "scales", "qzeros", True, 0, 1),
    Format("qweight", "scales", "qzeros", True, 0, 1, less=1),
    Format("qweight", "scales", "qzeros", True, 1, 1, order=(0, 2, 4, 6, 1, 3, 5, 7)),
    Format("weight_packed", "weight_scale", "weight_zero_point", False, 1, 0),
)


def format_of(layer: nn.Module, hooks: Sequence[Callable[..., object]] = ()) -> tuple[Format, int] | None:
    """The format of a layer's matrix and the bits per level; None for a layer in none of the formats.

    hooks: the model's pre-hooks. If the layer raises an error, they run first, on a copy: compressed-tensors unpacks in a pre-hook.
    """
    fitting = [(each, bits) for each in FORMATS if (bits := each.bits(layer))]
    if not fitting or getattr(layer, "adapter", None):
        return None
    dtype = getattr(layer, fitting[0][0].scales).dtype
    x = torch.randn(4, cast(int, layer.in_features), generator=torch.Generator().manual_seed(0), device="cpu").to(dtype)
    x[0] = 1  # to detect zeros that are off by one
    tolerance = max(2 * torch.finfo(dtype).eps, 1e-3)
    try:
        expected = _output(layer, hooks, x).float()
        bias = getattr(layer, "bias", None)
        for each, bits in fitting:
            ours = each.unpacked(bits, *each.sources(layer)).product(x)
            ours = ours if bias is None else ours + bias.float()
            if bool(((ours - expected).abs().amax(1) <= tolerance * expected.abs().amax(1)).all()):
                return each, bits
    except Exception:  # the library's code may raise anything; the layer stays as it is
        return None
    return None


def _output(layer: nn.Module, hooks: Sequence[Callable[..., object]], x: Tensor) -> Tensor:
    try:
        return cast(Tensor, share_weights(layer)(x))
    except Exception:
        copy = share_weights(layer)
        for hook in hooks:
            hook(copy, ())
        return cast(Tensor, copy(x))


def packed_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module, Format, int]]:
    """Yields path, layer, format and bits of each layer in one of the :data:`FORMATS`. model: our copy, which must not have run."""
    hooks = [*hooks_of(model)[1].values()]
    for path, layer in [*model.named_modules()]:
        if (found := format_of(layer, hooks)) is not None:
            yield path, layer, *found
