"""Chooses the matrices that are quantized: those that a library has quantized, and all others if the setting asks for it."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ....errors import UnsupportedError
from .. import torch_compat
from .fingerprints import Snapshot
from .fused import Group, columns_of, outputs_of, plain_weight, same_kind
from .quantized import (
    GROUP,
    Int8Conv1D,
    Int8Linear,
    WeightInt4Conv1D,
    WeightInt4Linear,
    WeightInt8Conv1D,
    WeightInt8Linear,
    rounded_to_int4,
    rounded_to_int8,
)

Scheme = Literal["int8", "int4"]
#: Dense matrices with fewer elements are left alone: calling a kernel costs more than it saves.
SMALLEST = 128 * 128
#: Types of dense matrices that are quantized.
TYPES = (torch.float32, torch.bfloat16, torch.float16)


def scheme_of(weights: str) -> Scheme | None:
    """The quantization that the setting `weights` asks for; None: none."""
    return weights if weights in get_args(Scheme) else None  # type: ignore[return-value]


@dataclass(frozen=True)
class Precision:
    """The precision of what an engine holds for a model; None: the model's own.

    Attributes:
        weights: of the matrices.
        cache: of keys and values.
        exact_products: on CUDA, whether products of few rows have the same bits for any number of rows (:mod:`.same_bits`).
    """

    weights: Scheme | None = None
    cache: Literal["int8"] | None = None
    exact_products: bool = True

    @property
    def rounds(self) -> bool:
        """Whether it is lower than the model's."""
        return self.weights is not None or self.cache is not None

    def check(self, device: torch.device, weights: str = "weights") -> None:
        """Raises UnsupportedError if `device` has no kernels for it. weights: name of the setting in the message."""
        for setting, value in ((weights, self.weights), ("kv_cache", self.cache)):
            if value is not None and device.type != "cpu":
                raise UnsupportedError(
                    f"{setting}={value!r} works on the CPU so far, and this model is on {device}. Leave the setting out, or "
                    "quantize the model itself before you load it there."
                )


@dataclass(frozen=True)
class Made:
    """A quantized matrix: the class of layer that multiplies by it, and the attributes of that layer."""

    layer: type[nn.Module]
    attributes: dict[str, Any]


class QuantizedWeight:
    """A copy of a matrix, or of several that are multiplied as one, in the form that a kernel takes. It is stale once they change.

    Attributes:
        sources: the parameters.
        made: layer and attributes; its tensors are always the same objects, which graphs hold.
    """

    def __init__(self, sources: Sequence[Tensor], make: Callable[[], Made]) -> None:
        self.sources, self._make = tuple(sources), make
        self._made_of, self.made = Snapshot(self.sources), make()

    @property
    def tensors(self) -> list[Tensor]:
        return [value for value in self.made.attributes.values() if isinstance(value, Tensor)]

    @property
    def stale(self) -> bool:
        """Whether a parameter has changed since it was quantized."""
        return self._made_of.changed

    def renew(self) -> None:
        """Quantizes the parameters' present values into the same tensors."""
        for own, new in zip(self.tensors, QuantizedWeight(self.sources, self._make).tensors, strict=True):
            if own.is_mkldnn or own.data_ptr() != new.data_ptr():
                own.copy_(new)
        self._made_of = Snapshot(self.sources)


#: Copies in use anywhere in the process: two engines that share a parameter share its quantized copy.
_in_use: weakref.WeakValueDictionary[tuple, QuantizedWeight] = weakref.WeakValueDictionary()


@dataclass
class Quantized:
    """What :func:`quantize` did to a module tree. layers: every replaced module, by path, with its matrix."""

    layers: dict[str, tuple[nn.Module, QuantizedWeight]] = field(default_factory=dict)

    @property
    def weights(self) -> list[QuantizedWeight]:
        """One per distinct matrix."""
        return list({id(weight): weight for _, weight in self.layers.values()}.values())

    @torch.no_grad()
    def renew(self) -> None:
        """Quantizes weights that were written to again, in place."""
        with torch.inference_mode(False):
            for weight in self.weights:
                if weight.stale:
                    weight.renew()

    @functools.cached_property
    def dequantizable(self) -> bool:
        """Whether long texts are read faster if some of the matrices are dequantized first."""
        kinds = WeightInt4Linear | WeightInt4Conv1D
        return any(isinstance(module, kinds) and module.dequantizable for module, _ in self.layers.values())


@torch.no_grad()
def quantize(
    model: nn.Module,
    scheme: Scheme | None,
    head: nn.Module | None,
    smallest: int | None = None,
    groups: Sequence[Group] = (),
) -> Quantized:
    """Makes layers of `model`, a private tree, multiply by quantized matrices.

    Layers that a library has quantized keep its very values and get a kernel for them, if there is one. With a `scheme`, dense layers
    get quantized copies of their weights. ``int8`` applies to all of them; ``int4`` to all but the output `head` and those whose
    sizes the kernel does not take, which get ``int8``.

    Args:
        smallest: matrices with fewer elements are left alone; None: :data:`SMALLEST`.
        groups: layers that read the same input. They are multiplied as one if the `scheme` quantizes all alike.
    """
    smallest = SMALLEST if smallest is None else smallest
    quantized = Quantized()
    by_module: dict[int, QuantizedWeight] = {}
    modules = dict(model.named_modules(remove_duplicate=False))
    if scheme is not None:
        required = scheme
        for paths in same_kind(groups, lambda path: _kind(modules[path], required, smallest)):
            members = [modules[path] for path in paths]
            of_all = cast(QuantizedWeight, _asked_for(members, scheme, smallest))
            for module, columns in zip(members, columns_of([outputs_of(module) for module in members]), strict=True):
                by_module[id(module)] = of_all
                vars(module)["columns"] = columns
    for path, module in modules.items():
        weight = by_module.get(id(module)) or _given(module)
        if weight is None and scheme is not None:
            weight = _asked_for([module], "int8" if module is head else scheme, smallest)
        if weight is None:
            continue
        by_module[id(module)] = weight
        quantized.layers[path] = (module, weight)
        module.__class__ = weight.made.layer
        vars(module).update(weight.made.attributes)
    return quantized


def rounds_activations(model: nn.Module) -> bool:
    """Whether layers of `model` that a library has quantized round their inputs, to int8 for instance."""
    quantized = ("act_quant_kwargs", "activation_quantization")
    for module in model.modules():
        weight = torch_compat.own_parameters(module).get("weight")
        if weight is not None and type(weight) is not nn.Parameter:
            rounds = any(getattr(weight, name, None) is not None for name in quantized)
            if rounds or (weight.dtype == torch.int8 and not hasattr(weight, "qdata")):
                return True
    return False


def _shared(sources: list[Tensor], key: tuple, make: Callable[[], Made]) -> QuantizedWeight:
    """The copy of `sources` that is in use, else a new one by `make`. key: distinguishes different copies of the same sources."""
    places = [(source.data_ptr(), source.dtype, source.shape, source.stride()) for source in sources]
    key = (*key, *places)
    copy = _in_use.get(key)
    # The copy keeps its parameters, and thereby their memory, unless their data have been exchanged.
    if copy is None or copy.stale or [s.data_ptr() for s in copy.sources] != [s.data_ptr() for s in sources]:
        with torch.inference_mode(False):
            copy = _in_use[key] = QuantizedWeight(sources, make)
    return copy


def _kind(module: nn.Module, scheme: Scheme, smallest: int) -> tuple | None:
    """A value that is equal for layers that can be quantized as one: their class and type, and whether 4 bits are possible.

    None for layers that are not quantized.
    """
    weight = plain_weight(module)
    if weight is None or weight.device.type != "cpu" or weight.dtype not in TYPES or weight.numel() < smallest:
        return None
    rows, columns = weight.t().shape if isinstance(module, Conv1D) else weight.shape
    return type(module), weight.dtype, scheme == "int4" and rows % 16 == 0 and columns % GROUP == 0


def _asked_for(modules: list[nn.Module], scheme: Scheme, smallest: int) -> QuantizedWeight | None:
    """The quantized weights of dense layers of one kind, as one matrix."""
    kind = _kind(modules[0], scheme, smallest)
    if kind is None:
        return None
    _, dtype, four_bits = kind
    sources, transposed = [cast(Tensor, module.weight) for module in modules], isinstance(modules[0], Conv1D)

    def whole() -> Tensor:
        matrices = [source.detach().t() if transposed else source.detach() for source in sources]
        return torch.cat(matrices) if len(matrices) > 1 else matrices[0]

    def int8() -> Made:
        return _int8(*rounded_to_int8(whole()), dtype, transposed)

    def int4() -> Made:
        levels, scales = rounded_to_int4(whole())
        attributes = dict(packed=torch_compat.reorder_int4(levels.contiguous()), scale=scales, group=GROUP)
        return Made(WeightInt4Conv1D if transposed else WeightInt4Linear, attributes)

    if four_bits:
        return _shared(sources, ("int4", transposed), int4)
    return _shared(sources, ("int8", transposed), int8)


def _int8(levels: Tensor, scale: Tensor, dtype: torch.dtype, transposed: bool, given: bool = False) -> Made:
    """The fastest layer for int8 weights ``[out, in]`` with one scale per output, float32.

    Args:
        given: whether a library quantized them, whose results must be met; activations of two bytes are too coarse for float32.
    """
    if torch_compat.multiplies_int8():
        packed, zero = torch_compat.reorder_int8(levels.contiguous()), torch.zeros(len(scale), dtype=torch.int32)
        after = scale.to(dtype).contiguous() if given else None
        inside = torch.ones_like(scale) if given else scale
        digits = 3 if given and dtype == torch.float32 else 2
        attributes: dict[str, Any] = dict(
            packed=packed, scale=inside.contiguous(), zero=zero, after=after, digits=digits
        )
        return Made(Int8Conv1D if transposed else Int8Linear, attributes)
    attributes = dict(packed=levels.contiguous(), scale=scale.bfloat16().contiguous())
    return Made(WeightInt8Conv1D if transposed else WeightInt8Linear, attributes)


def _given(module: nn.Module) -> QuantizedWeight | None:
    """The weight of a layer that a library has quantized, if there is a kernel for its format.

    The format is recognized by attributes of the weight: ``qdata``, ``scale`` and ``block_size``, as in torchao, and no quantized
    activations.
    """
    weight: Any = torch_compat.own_parameters(module).get("weight") if isinstance(module, nn.Linear) else None
    levels, scale = getattr(weight, "qdata", None), getattr(weight, "scale", None)
    if type(weight) in (nn.Parameter, Tensor) or not isinstance(levels, Tensor) or not isinstance(scale, Tensor):
        return None
    activations = ("act_quant_kwargs", "act_pre_scale", "activation_quantization")
    if (
        type(module) is not nn.Linear or "forward" in vars(module) or levels.dtype != torch.int8 or levels.dim() != 2
        or levels.device.type != "cpu" or any(getattr(weight, name, None) is not None for name in activations)
    ):  # fmt: skip
        return None
    rows, columns = levels.shape
    block, zero = tuple(getattr(weight, "block_size", ())), getattr(weight, "zero_point", None)
    zeros = zero is None or not bool(zero.any())
    sources = [t for t in (levels, scale, zero) if isinstance(t, Tensor)]
    dtype, target = weight.dtype, getattr(weight, "target_dtype", torch.int8)

    def int8() -> Made:
        return _int8(levels, scale.float().reshape(-1).expand(rows), dtype, False, given=True)

    def int4() -> Made:
        step = scale.float().reshape(rows, -1)
        offset = torch.zeros_like(step) if zero is None else -zero.reshape(rows, -1).float() * step
        scales = torch.stack([step, offset], dim=-1).transpose(0, 1).contiguous().to(dtype)
        packed = torch_compat.reorder_int4(levels.to(torch.int32) + 8)
        return Made(WeightInt4Linear, dict(packed=packed, scale=scales, group=block[1]))

    # If every fast kernel rounds more than the library does, the library's layer stays.
    fast = dtype == torch.bfloat16 or torch_compat.multiplies_int8()
    if target == torch.int8 and zeros and block in ((1, columns), (rows, columns)) and fast:
        return _shared(sources, ("given int8", dtype), int8)
    if (
        str(target) == "torch.int4"
        and len(block) == 2
        and block[0] == 1
        and block[1] in (32, 64, 128, 256)
        and rows % 16 == 0
        and dtype == torch.bfloat16
    ):
        return _shared(sources, ("given int4", dtype), int4)
    return None
