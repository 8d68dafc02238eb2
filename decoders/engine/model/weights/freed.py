"""Frees dense weights that only packed layers need, raises errors for whoever reads them meanwhile, and gives them back."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..torch_compat import WRITE_COUNTER, as_plain_tensors, own_parameters
from .packing import PackedWeight, Packing, freed_error


class FreedParameter(nn.Parameter):
    """Takes the place of a freed weight in a model. It has its shape, type and device; every other use raises an error.

    Attributes:
        freed: true, for code that must not import this class.
    """

    freed = True

    def __new__(cls, original: nn.Parameter) -> FreedParameter:
        nothing = torch.full((1, 1), torch.nan, dtype=original.dtype).expand(original.shape)
        return super().__new__(cls, nothing, original.requires_grad)

    def __init__(self, original: nn.Parameter) -> None: ...

    @classmethod
    def __torch_function__(cls, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        if _name_of(func) not in _TOLD:
            raise freed_error()
        with as_plain_tensors():
            return func(*args, **(kwargs or {}))

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]  # torch passes what its own takes
        return f"FreedParameter(shape={tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: dict) -> FreedParameter:
        raise freed_error()

    def __reduce_ex__(self, protocol: object) -> tuple:
        raise freed_error()


def _parameters(values: Iterable[Any]) -> Iterator[nn.Parameter]:
    for value in values:
        if isinstance(value, nn.Parameter):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _parameters(value)


def _name_of(func: Callable) -> str:
    """The name of a tensor function, or of the attribute that it reads."""
    name = getattr(func, "__name__", "")
    return getattr(getattr(func, "__self__", None), "__name__", "") if name == "__get__" else name


#: Attributes and methods that a freed weight has.
_TOLD = {
    "shape", "dtype", "device", "layout", "ndim", "requires_grad", "grad", "grad_fn", "is_leaf", "is_meta", "is_sparse",
    "is_quantized", "is_nested", "is_cuda", "is_cpu", "is_mkldnn", "names", "itemsize", "nbytes", WRITE_COUNTER, "size", "dim",
    "ndimension", "numel", "nelement", "stride", "element_size", "data_ptr", "storage_offset", "is_contiguous",
    "is_floating_point", "is_complex", "is_inference", "is_signed", "get_device", "__len__", "__hash__", "untyped_storage",
}  # fmt: skip


@dataclass
class FreedWeights:
    """The dense weights that :func:`free_originals` took from a model, and what is needed to give them back.

    Attributes:
        places: per weight the module, its name there, the parameter, its stand-in, its packed copy, and its number among that copy's
            sources.
    """

    places: list[tuple[nn.Module, str, nn.Parameter, FreedParameter, PackedWeight, int]] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes that the dense weights took."""
        return sum({id(weight): weight.dense_nbytes for *_, weight, _ in self.places}.values())


class ReadParameters(TorchFunctionMode):
    """While entered, collects the ids of parameters whose values are read. Packed layers read none: they multiply by copies."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: set[int] = set()

    def __torch_function__(self, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        if _name_of(func) not in _TOLD:
            self.ids |= {id(parameter) for parameter in _parameters((*args, *(kwargs or {}).values()))}
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def free_originals(model: nn.Module, packing: Packing, read: Container[int] = ()) -> FreedWeights:
    """Frees the dense copy of every weight of `model` that only packed layers use.

    Until :func:`restore_originals`, the model itself cannot run, change or be saved: its weights are :class:`FreedParameter`, which
    raise errors that say so. Weights that are also used as embeddings stay. If this fails, the model is as it was.

    Args:
        packing: of the model's private twin.
        read: ids of parameters that something besides their layers reads (:class:`ReadParameters`); they stay, too.
    """
    users: dict[int, list[tuple[str, nn.Module, str]]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, parameter in own_parameters(module).items():
            if parameter is not None:
                users.setdefault(parameter.data_ptr(), []).append((path, module, name))
    freed = FreedWeights()
    try:
        for weight in packing.weights:
            if weight.stale:
                weight.repack()
            places = [place for source in weight.sources for place in users.get(source.data_ptr(), [])]
            if not places or any(name != "weight" or path not in packing.layers for path, _, name in places):
                continue
            kept = any(id(source) in read for source in weight.sources)
            if not kept and all(packing.layers[path].weight is weight for path, *_ in places):
                _free(weight, places, packing, freed)
    except BaseException:
        restore_originals(freed, packing)
        raise
    return freed


def _free(
    weight: PackedWeight, places: list[tuple[str, nn.Module, str]], packing: Packing, freed: FreedWeights
) -> None:
    """Frees one matrix in all its `places` (path, module, name). Each is added to `freed` before anything is lost."""
    stands: dict[int, FreedParameter] = {}
    for path, module, name in places:
        original = own_parameters(module)[name]
        if original is None or isinstance(original, FreedParameter):  # one module under two names
            continue
        stand_in = stands.setdefault(id(original), FreedParameter(original))
        twin, _, place = packing.layers[path]
        freed.places.append((module, name, original, stand_in, weight, place))
        own_parameters(module)[name] = stand_in
        # The twin's layers read the shape, type and device of their weight, never its values.
        nothing = torch.full((1, 1), torch.nan, dtype=original.dtype).expand(original.shape)
        own_parameters(twin)[name] = nn.Parameter(nothing, requires_grad=False)
    for _, _, original, _, freed_weight, _ in freed.places:
        if freed_weight is weight:
            with torch.inference_mode(original.is_inference()):
                original.data = original.data.new_empty(0)
    weight.settle()


@torch.no_grad()
def restore_originals(freed: FreedWeights, packing: Packing) -> None:
    """Puts the same parameter objects back, with their values bit for bit. Parameters that someone has set since stay."""
    dense: dict[int, list[Tensor]] = {}
    for module, name, original, stand_in, weight, place in freed.places:
        with torch.inference_mode(original.is_inference()):
            if id(weight) not in dense:
                dense[id(weight)] = weight.dense()
            original.data = dense[id(weight)][place]
        if own_parameters(module).get(name) is stand_in:
            own_parameters(module)[name] = original
    for layer, weight, place in packing.layers.values():
        if weight.sources[place].numel():
            own_parameters(layer)["weight"] = cast(nn.Parameter, weight.sources[place])
    for *_, weight, _ in freed.places:
        weight.settle()
    freed.places.clear()
