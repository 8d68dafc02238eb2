"""Weight matrices packed once for oneDNN, shared by uncompiled steps, compiled graphs and every use of a model as a draft."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ..errors import UnsupportedError
from . import torch_compat
from .fingerprints import Fingerprint

#: Matrices with fewer elements are left alone: calling oneDNN costs more than its kernel saves.
SMALLEST = 128 * 128

_library = torch.library.Library("decoders", "FRAGMENT")
_library.define("packed_linear(Tensor x, Tensor packed, Tensor? bias, int out_features) -> Tensor")


def _packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
    return torch_compat.multiply_packed(x, packed, bias)


_library.impl("packed_linear", _packed_linear, "CPU")
_library.impl("packed_linear", _packed_linear, "MkldnnCPU")


@torch.library.register_fake("decoders::packed_linear", lib=_library)
def _(x: Tensor, packed: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], out_features))


def packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
    """``x @ weight.T + bias`` with a packed weight. x: ``[…, in]``, packed: ``[out, in]`` opaque, bias: ``[out]`` or None."""
    # Not is_compiling(): in torch 2.13 that is true in every thread while one of them compiles.
    if torch.compiler.is_dynamo_compiling():
        return torch.ops.decoders.packed_linear(x, packed, bias, out_features)
    return _packed_linear(x, packed, bias, out_features)  # without a second pass through the dispatcher


class PackedLinear(nn.Linear):
    """An ``nn.Linear`` that multiplies by the packed copy of its weight; ``weight`` and ``bias`` stay for those who read them."""

    packed: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != self.packed.dtype:
            _refuse_freed(self.weight)
            return F.linear(x, self.weight, self.bias)  # raises PyTorch's own error, or is autocast's business
        return packed_linear(x, self.packed, self.bias, self.out_features)


class PackedConv1D(Conv1D):
    """GPT-2's linear layer, whose weight is stored as ``[in, out]``."""

    packed: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != self.packed.dtype:
            _refuse_freed(self.weight)
            return super().forward(x)
        return packed_linear(x, self.packed, self.bias, self.nf)


#: How a kind of layer is packed: the class that stands in for it, and the matrix ``[out, in]`` that its weight holds.
_KINDS: dict[type[nn.Module], tuple[type[nn.Module], Callable[[Tensor], Tensor]]] = {
    nn.Linear: (PackedLinear, lambda weight: weight),
    Conv1D: (PackedConv1D, lambda weight: weight.t()),
}


class PackedWeight:
    """One matrix in oneDNN's layout.

    Attributes:
        source: the parameter it was packed from.
        packed: ``[out, in]``, opaque; the same object for life.
    """

    def __init__(self, source: Tensor, matrix: Callable[[Tensor], Tensor]) -> None:
        self.source, self._matrix = source, matrix
        self.packed = torch_compat.reorder_linear_weight(matrix(source.detach()))
        self.settle()

    def settle(self) -> None:
        """Notes that the packed copy has the parameter's present values, or all that there is if the parameter was freed."""
        self._packed_from = state_of(self.source)
        self._sample = Fingerprint(self.source) if self.source.numel() else None

    @property
    def stale(self) -> bool:
        """Whether the parameter has changed since it was packed."""
        if state_of(self.source) != self._packed_from:
            return True
        return self._sample is not None and self._sample.changed

    def repack(self) -> None:
        """Packs the parameter's present values into the same tensor: graphs that hold it see them."""
        self.packed.copy_(torch_compat.reorder_linear_weight(self._matrix(self.source.detach())))
        self.settle()

    def dense(self) -> Tensor:
        """The weight in its original layout, bit for bit."""
        return self._matrix(self.packed.to_dense()).contiguous()


#: Packed copies in use anywhere in the process: two engines that share a parameter share its packed copy.
_in_use: weakref.WeakValueDictionary[tuple, PackedWeight] = weakref.WeakValueDictionary()


@dataclass
class Packing:
    """What :func:`pack` did to a module tree.

    Attributes:
        weights: one per distinct matrix.
        layers: every module that was packed, by its path, with its matrix.
    """

    weights: list[PackedWeight] = field(default_factory=list)
    layers: dict[str, tuple[nn.Module, PackedWeight]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.weights)

    @property
    def nbytes(self) -> int:
        """Memory of the packed copies."""
        return sum(weight.packed.nbytes for weight in self.weights)

    @torch.no_grad()
    def repack(self) -> int:
        """Packs again what has been written since, in place; returns how many matrices that were."""
        stale = [weight for weight in self.weights if weight.stale]
        with torch.inference_mode(False):
            for weight in stale:
                weight.repack()
        return len(stale)


@torch.no_grad()
def pack(model: nn.Module, smallest: int | None = None) -> Packing:
    """Makes the linear layers of `model`, a private tree, multiply by packed copies of their weights.

    Packed are plain linear layers with dense weights on the CPU in a type that oneDNN multiplies on this machine. Left
    alone is all else: subclasses and layers whose ``forward`` was exchanged, quantized and distributed weights,
    parametrized layers, batched experts, other devices.

    Args:
        smallest: matrices with fewer elements are left alone; None is :data:`SMALLEST`.
    """
    smallest = SMALLEST if smallest is None else smallest
    packing = Packing()
    distinct: dict[int, PackedWeight] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        plain = packable(module, smallest)
        if plain is None:
            if isinstance(module, PackedLinear | PackedConv1D) and id(module) in distinct:  # one module under two names
                packing.layers[path] = (module, distinct[id(module)])
            continue
        stand_in, matrix = plain
        weight = _shared(module.weight, matrix)
        if weight not in packing.weights:
            packing.weights.append(weight)
        distinct[id(module)] = weight
        packing.layers[path] = (module, weight)
        module.__class__ = stand_in
        module.packed = weight.packed
    return packing


def packable(module: nn.Module, smallest: int) -> tuple[type[nn.Module], Callable[[Tensor], Tensor]] | None:
    """The class that stands in for a plain layer, and how to get its matrix; None for whatever is no plain layer."""
    kind = _KINDS.get(type(module))
    weight = module._parameters.get("weight")  # a parametrized or pruned weight is no parameter
    if kind is None or weight is None or "forward" in vars(module):
        return None
    plain = type(weight) in (nn.Parameter, Tensor) and weight.layout == torch.strided and weight.device.type == "cpu"
    return (
        kind
        if plain and weight.dim() == 2 and weight.numel() >= smallest and torch_compat.multiplies_packed(weight.dtype)
        else None
    )


def _shared(source: Tensor, matrix: Callable[[Tensor], Tensor]) -> PackedWeight:
    """The packed copy of `source`, from this process's if there is one."""
    key = (source.data_ptr(), source.dtype, source.shape, source.stride(), matrix)
    weight = _in_use.get(key)
    # The copy's own parameter keeps the memory from being used by another, unless its data has been exchanged.
    if weight is None or weight.stale or weight.source.data_ptr() != source.data_ptr():
        with torch.inference_mode(False):
            weight = PackedWeight(source, matrix)
        _in_use[key] = weight
    return weight


def state_of(source: Tensor) -> tuple:
    """Differs after an in-place change that PyTorch counts."""
    return source.data_ptr(), torch_compat.writes_counted(source)


class FreedParameter(nn.Parameter):
    """Stands in a model where a weight was freed: it tells shape, type and device, and every other use is an error.

    Attributes:
        freed: true, for those that may not know this class.
    """

    freed = True

    def __new__(cls, original: nn.Parameter) -> FreedParameter:
        nothing = torch.full((1, 1), torch.nan, dtype=original.dtype).expand(original.shape)
        return super().__new__(cls, nothing, original.requires_grad)

    def __init__(self, original: nn.Parameter) -> None: ...

    @classmethod
    def __torch_function__(cls, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        name = getattr(func, "__name__", "")
        if name == "__get__":
            name = getattr(getattr(func, "__self__", None), "__name__", "")
        if name not in _TOLD:
            raise freed_error()
        with torch_compat.as_plain_tensors():
            return func(*args, **(kwargs or {}))

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]  # torch passes what its own takes
        return f"FreedParameter(shape={tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: dict) -> FreedParameter:
        raise freed_error()

    def __reduce_ex__(self, protocol: object) -> tuple:
        raise freed_error()


#: What may be asked of a freed weight.
_TOLD = {
    "shape", "dtype", "device", "layout", "ndim", "requires_grad", "grad", "grad_fn", "is_leaf", "is_meta", "is_sparse",
    "is_quantized", "is_nested", "is_cuda", "is_cpu", "is_mkldnn", "names", "itemsize", "nbytes", "_version", "size", "dim",
    "ndimension", "numel", "nelement", "stride", "element_size", "data_ptr", "storage_offset", "is_contiguous",
    "is_floating_point", "is_complex", "is_inference", "is_signed", "get_device", "__len__", "__hash__", "untyped_storage",
}  # fmt: skip


def freed_error() -> UnsupportedError:
    return UnsupportedError(
        "this model's weights were freed (setting weights='packed'), since a packed copy of them decodes. Call "
        "decoders.release(model) or decoders.disable(model) to get them back before you run, copy, change, train or save it "
        "without strategy=; the next call with strategy= frees them again unless weights='keep'"
    )


def _refuse_freed(weight: Tensor) -> None:
    if weight.stride() == (0, 0):
        raise freed_error()


@dataclass
class FreedWeights:
    """The dense weights that :func:`free_originals` took from a model, and what is needed to give them back.

    Attributes:
        places: the module and the name that a weight has there, the parameter, what stands in for it, its packed copy.
    """

    places: list[tuple[nn.Module, str, nn.Parameter, FreedParameter, PackedWeight]] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Memory that the dense weights took."""
        return sum({id(weight): weight.packed.nbytes for *_, weight in self.places}.values())


@torch.no_grad()
def free_originals(model: nn.Module, packing: Packing) -> FreedWeights:
    """Frees the dense copy of every weight of `model` that only packed layers use; `packing` is of a twin of its tree.

    Until :func:`restore_originals`, the model itself cannot run, change or be saved: its weights are
    :class:`FreedParameter`, which say so. Weights that are also looked up (tied embeddings) stay.
    """
    users: dict[int, list[tuple[str, nn.Module, str]]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, parameter in module._parameters.items():
            if parameter is not None:
                users.setdefault(parameter.data_ptr(), []).append((path, module, name))
    freed = FreedWeights()
    for weight in packing.weights:
        if weight.stale:
            weight.repack()
        places = users.get(weight.source.data_ptr(), [])
        if not places or any(name != "weight" or path not in packing.layers for path, _, name in places):
            continue
        if any(packing.layers[path][1] is not weight for path, *_ in places):
            continue
        stands: dict[int, FreedParameter] = {}
        for path, module, name in places:
            original = module._parameters[name]
            if original is None or isinstance(original, FreedParameter):  # one module under two names
                continue
            stand_in = stands.setdefault(id(original), FreedParameter(original))
            freed.places.append((module, name, original, stand_in, weight))
            module._parameters[name] = stand_in
            # Layers read the shape, type and device of their weight; the values are never used.
            twin = packing.layers[path][0]
            nothing = torch.full((1, 1), torch.nan, dtype=original.dtype).expand(original.shape)
            twin._parameters[name] = nn.Parameter(nothing, requires_grad=False)
        for _, _, original, _, freed_weight in freed.places:
            if freed_weight is weight:
                with torch.inference_mode(original.is_inference()):
                    original.data = original.data.new_empty(0)
        weight.settle()
    return freed


@torch.no_grad()
def restore_originals(freed: FreedWeights, packing: Packing) -> None:
    """Gives the model back its parameters, the very objects, with their values bit for bit; others' stay in their places."""
    dense: dict[int, Tensor] = {}
    for module, name, original, stand_in, weight in freed.places:
        with torch.inference_mode(original.is_inference()):
            if id(weight) not in dense:
                dense[id(weight)] = weight.dense()
            original.data = dense[id(weight)]
        if module._parameters.get(name) is stand_in:
            module._parameters[name] = original
    for layer, weight in packing.layers.values():
        if weight.source.numel():
            layer._parameters["weight"] = cast(nn.Parameter, weight.source)
    for *_, weight in freed.places:
        weight.settle()
    freed.places.clear()
