"""Chooses the matrices to quantize (setting ``weights``), and finds the matrices that a library has quantized."""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ....common.devices import narrowed
from ....errors import UnsupportedError
from .. import modules_compat
from ..kernels import cpu
from ..kernels.cpu import four_bits
from .fused import Group, join, plain_weight
from .packed import Format, packed_layers
from .quantized import GROUP, KINDS, QuantizedLinear, has_kernels, product_kind, rounded_to_int4, rounded_to_int8
from .state import values_of

Scheme = Literal["16bit", "int8", "int4"]
#: Dense matrices with fewer elements are not quantized, because calling a kernel would cost more than it saves.
SMALLEST = 128 * 128
#: Dtypes of dense matrices that can be quantized.
TYPES = (torch.float32, torch.bfloat16, torch.float16)

_log = logging.getLogger("decoders")


def scheme_of(weights: str) -> Scheme | None:
    """The scheme for a value of the setting ``weights``; None if the value requires no copies of matrices."""
    return weights if weights in get_args(Scheme) else None  # type: ignore[return-value]


@dataclass(frozen=True)
class Precision:
    """The precision of an engine. None keeps the model's own precision.

    Attributes:
        weights: precision of matrices.
        cache: precision of keys and values.
        exact_products: on CUDA, whether a row of a product has the same bits for any number of rows (:mod:`.few_rows`).
    """

    weights: Scheme | None = None
    cache: Literal["int8"] | None = None
    exact_products: bool = True

    @property
    def rounds(self) -> bool:
        """Whether the precision is lower than the model's."""
        return self.weights in ("int8", "int4") or self.cache is not None

    def check(self, device: torch.device, weights: str = "weights") -> None:
        """Raises UnsupportedError if `device` has no kernels for this precision. weights: the setting's name in the error."""
        for setting, value in ((weights, self.weights), ("kv_cache", self.cache)):
            if value is not None and device.type != "cpu":
                raise UnsupportedError(
                    f"{setting}={value!r} works on the CPU so far, and this model is on {device}. Leave the setting out, or "
                    "quantize the model itself before you load it there."
                )
        if self.weights is not None and not has_kernels():
            raise UnsupportedError(
                f"{weights}={self.weights!r} needs this package's kernels for CPUs, which cannot be used ({cpu.chosen()}). Install a "
                "C++ compiler (g++ or clang), with which the kernels are built once, or leave the setting out."
            )


class LossyError(Exception):
    """Raised if a copy in 16 bits would not hold the same numbers."""


class QuantizedWeight:
    """A copy of a matrix in the form that a kernel reads.

    Attributes:
        sources: the parameter, or the parts of a parameter that a library has quantized.
        made: attributes to set on the layer. The attributes' tensors are only written in place, because graphs hold them.
        of: identifies the values of the sources at the time of the copy (:func:`values_of`).
    """

    def __init__(self, sources: Sequence[Tensor], make: Callable[[], dict[str, Any]]) -> None:
        self.sources, self._make = tuple(sources), make
        self.of, self.made = values_of(sources), make()

    @property
    def tensors(self) -> list[Tensor]:
        return [value for value in self.made.values() if isinstance(value, Tensor)]

    def renew(self) -> None:
        """If the sources have changed, copies them again to the same tensors. Raises LossyError if 16 bits cannot hold the numbers."""
        if (present := values_of(self.sources)) != self.of:
            for own, new in zip(self.tensors, QuantizedWeight(self.sources, self._make).tensors, strict=True):
                if own.data_ptr() != new.data_ptr():  # equal addresses: a library's levels are used without a copy
                    own.copy_(new)
            self.of = present


#: The copies in use anywhere in the process. Two engines that share a parameter share its quantized copy.
_in_use: weakref.WeakValueDictionary[tuple, QuantizedWeight] = weakref.WeakValueDictionary()


@dataclass
class Quantized:
    """The layers of a model that run quantized. layers: by path, each of these layers and its matrix."""

    layers: dict[str, tuple[nn.Module, QuantizedWeight]] = field(default_factory=dict)

    @property
    def weights(self) -> list[QuantizedWeight]:
        """The matrices without duplicates."""
        return list({id(weight): weight for _, weight in self.layers.values()}.values())

    @torch.no_grad()
    def renew(self) -> bool:
        """Copies changed weights again, in place. Returns False if 16 bits can no longer hold a weight's numbers."""
        with torch.inference_mode(False), suppress(LossyError):
            for weight in self.weights:
                weight.renew()
            return True
        return False


@torch.no_grad()
def take_packed(model: nn.Module) -> Quantized:
    """Makes layers of `model`, our copy of a model, multiply with the levels that a library has packed (:mod:`.packed`), if there is a
    kernel. Returns these layers. Call it before the first pass, because a library may unpack its weights in that pass.
    """
    quantized = Quantized()
    for path, module, form, bits in packed_layers(model) if has_kernels() else ():
        if (weight := _packed(module, form, bits)) is None:
            continue
        quantized.layers[path] = (module, weight)
        for name in ("forward", "quantization_scheme"):  # with these attributes, compressed-tensors would unpack
            vars(module).pop(name, None)
        vars(module).update(weight.made)
        module.__class__ = QuantizedLinear
    return quantized


def _packed(module: nn.Module, form: Format, bits: int) -> QuantizedWeight | None:
    """The quantized weight of a layer in another library's packed format; None if there is no kernel for its levels."""
    sources = form.sources(module)
    scales, rest = sources[1], sources[2] if len(sources) > 2 else None
    groups = scales.shape[0 if form.inputs_first else 1]
    group, digits = cast(int, module.in_features) // groups, 2 if scales.dtype == torch.float32 else 1
    if bits == 4:
        fits = four_bits.takes(cast(int, module.out_features), group)
    else:
        fits = (groups == 1 or group % 32 == 0) and not bool((form.middles(bits, scales, rest) != 128).any())
    if not fits:
        return None

    def make() -> dict[str, Any]:
        levels, steps, zeros = form.unpacked(bits, *sources)
        if bits == 8:
            return dict(levels=(levels ^ 128).view(torch.int8), scales=steps.contiguous(), after=None, digits=digits)
        scales = four_bits.with_offsets(steps, (8 - zeros) * steps)
        return dict(levels=four_bits.packed(levels), scales=scales, after=None, digits=digits)

    return _shared(sources, ("packed", form, digits), make)


@torch.no_grad()
def quantize(
    model: nn.Module, scheme: Scheme | None, head: nn.Module | None, smallest: int | None = None,
    groups: Sequence[Group] = (), given: Quantized | None = None,
) -> Quantized:  # fmt: skip
    """Makes layers of `model`, our copy of a model, multiply with quantized matrices. Returns these layers and the layers in `given`.

    Layers that a library has quantized keep their values, and use a kernel if there is one. With a `scheme`, dense layers get copies of
    their weights. For ``int4``, the output `head` and layers of a size that the kernel does not support get ``int8`` copies. For
    ``16bit``, only float32 weights get copies, and only if 16 bits can hold all their numbers.

    Args:
        smallest: matrices with fewer elements are not quantized to 8 or 4 bits; None for :data:`SMALLEST`.
        groups: paths of layers with the same input. Layers of a group multiply in one product if they are quantized alike.
        given: the result of :func:`take_packed`.
    """
    smallest = SMALLEST if smallest is None else smallest
    quantized = given or Quantized()
    modules = dict(model.named_modules())
    for path, module in modules.items():
        weight = _given(module)
        if weight is None and scheme is not None:
            weight = _asked_for(module, "int8" if module is head and scheme == "int4" else scheme, smallest)
        if weight is None:
            continue
        quantized.layers[path] = (module, weight)
        module.__dict__.update(weight.made)
        if "levels" in weight.made:
            module.__class__ = KINDS[type(module)]
    in_levels = {path for path, (_, weight) in quantized.layers.items() if "levels" in weight.made}
    join(modules, groups, lambda path: product_kind(modules[path]) if path in in_levels else None)
    if scheme == "16bit" and not quantized.layers:
        _log.warning(
            "weights='16bit' copies no matrix: the model's matrices are not in float32, or 16 bits cannot hold their numbers"
        )
    return quantized


def rounds_activations(model: nn.Module) -> bool:
    """Whether layers that a library has quantized round their inputs, for example to int8."""
    quantized = ("act_quant_kwargs", "activation_quantization")
    for module in model.modules():
        weight = modules_compat.own_parameters(module).get("weight")
        if weight is not None and type(weight) is not nn.Parameter:
            rounds = any(getattr(weight, name, None) is not None for name in quantized)
            if rounds or (weight.dtype == torch.int8 and not hasattr(weight, "qdata")):
                return True
    return False


def _shared(sources: list[Tensor], key: tuple, make: Callable[[], dict[str, Any]]) -> QuantizedWeight:
    """A quantized copy of `sources`: the copy in use, or a new copy if none is in use or it is outdated. key: the kind of copy."""
    places = [(source.data_ptr(), source.dtype, source.shape, source.stride()) for source in sources]
    key = (*key, *places)
    copy = _in_use.get(key)
    if copy is None or copy.of != values_of(sources):
        with torch.inference_mode(False):
            copy = _in_use[key] = QuantizedWeight(sources, make)
    return copy


def _asked_for(module: nn.Module, scheme: Scheme, smallest: int) -> QuantizedWeight | None:
    """The weight of a plain dense layer, quantized by `scheme`; None for layers that `scheme` does not quantize."""
    weight = plain_weight(module)
    if (
        weight is None
        or weight.device.type != "cpu"
        or weight.dtype not in TYPES
        or (scheme != "16bit" and weight.numel() < smallest)
        or not has_kernels()
    ):
        return None
    source, transposed = weight, isinstance(module, Conv1D)

    def matrix() -> Tensor:
        return source.detach().t() if transposed else source.detach()

    def int8() -> dict[str, Any]:
        levels, scales = rounded_to_int8(matrix())
        return dict(levels=levels.contiguous(), scales=scales.contiguous(), after=None, digits=1)

    def int4() -> dict[str, Any]:
        levels, scales = rounded_to_int4(matrix())
        return dict(levels=four_bits.packed(levels), scales=four_bits.in_panels(scales), after=None, digits=1)

    if scheme == "16bit":
        return _narrow_copy(source) if source.dtype == torch.float32 else None
    outputs, inputs = matrix().shape
    four = scheme == "int4" and inputs % GROUP == 0 and four_bits.takes(outputs, GROUP)
    return _shared([weight], (scheme if four else "int8", transposed), int4 if four else int8)


def _narrow_copy(source: Tensor) -> QuantizedWeight | None:
    """A copy of `source` in a 16-bit type that can hold all its numbers; None if no 16-bit type can."""

    def copied(dtype: torch.dtype) -> dict[str, Any]:
        if (narrow := narrowed(source.detach(), dtype)) is None:
            raise LossyError
        return dict(decoders_narrow=narrow)

    for dtype in (torch.bfloat16, torch.float16):
        with suppress(LossyError):
            return _shared([source], ("16bit", dtype), functools.partial(copied, dtype))
    return None


def _given(module: nn.Module) -> QuantizedWeight | None:
    """A layer's weight as torchao or a similar library has quantized it (attributes ``qdata``, ``scale`` and ``block_size``); None if
    no kernel reads its format, or if activations are quantized, too.
    """
    weight: Any = modules_compat.own_parameters(module).get("weight") if isinstance(module, nn.Linear) else None
    levels, scale = getattr(weight, "qdata", None), getattr(weight, "scale", None)
    if type(weight) in (nn.Parameter, Tensor) or not isinstance(levels, Tensor) or not isinstance(scale, Tensor):
        return None
    activations = ("act_quant_kwargs", "act_pre_scale", "activation_quantization")
    if (
        type(module) is not nn.Linear or "forward" in vars(module) or levels.dtype != torch.int8 or levels.dim() != 2
        or levels.device.type != "cpu" or any(getattr(weight, name, None) is not None for name in activations) or not has_kernels()
    ):  # fmt: skip
        return None
    rows, columns = levels.shape
    block, zero = tuple(getattr(weight, "block_size", ())), getattr(weight, "zero_point", None)
    zeros = zero is None or not bool(zero.any())
    sources = [t for t in (levels, scale, zero) if isinstance(t, Tensor)]
    dtype, target = weight.dtype, str(getattr(weight, "target_dtype", torch.int8))
    digits = 2 if dtype == torch.float32 else 1  # one digit is as precise as 16-bit dtypes

    def int8() -> dict[str, Any]:
        after = scale.reshape(-1).expand(rows).to(dtype).contiguous()
        return dict(levels=levels.contiguous(), scales=torch.ones(rows, 1), after=after, digits=digits)

    def int8_in_groups() -> dict[str, Any]:
        return dict(
            levels=levels.contiguous(), scales=scale.float().reshape(rows, -1).contiguous(), after=None, digits=digits
        )

    def int4() -> dict[str, Any]:
        steps = scale.float().reshape(rows, -1)
        middles = torch.zeros_like(steps) if zero is None else -zero.reshape(rows, -1).float() * steps
        scales = four_bits.with_offsets(steps, middles)
        return dict(levels=four_bits.packed((levels + 8).to(torch.uint8)), scales=scales, after=None, digits=digits)

    if target == "torch.int8" and zeros and block in ((1, columns), (rows, columns)):
        return _shared(sources, ("given int8", dtype), int8)
    if len(block) != 2 or block[0] != 1 or columns % block[1]:
        return None
    if target == "torch.int8" and zeros and block[1] % 32 == 0:
        return _shared(sources, ("given int8 in groups", dtype), int8_in_groups)
    if target == "torch.int4" and four_bits.takes(rows, block[1]):
        return _shared(sources, ("given int4", dtype), int4)
    return None
