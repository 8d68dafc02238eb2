"""Finds the tensors in a strategy's state, compares them with another call's tensors, and copies values between the two calls."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ...tree import Topology
from .modules_compat import buffers_in, modules_in, parameters_in
from .torch_compat import with_parts

#: Types of objects that are not searched for tensors.
_OPAQUE = (
    type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType, torch.device, torch.dtype,
    str, bytes, int, float, bool, complex, type(None), Topology,
)  # fmt: skip


class SameObject:
    """Wraps a value that must be the same object in a later call, and is not searched for tensors."""

    __slots__ = ("thing",)

    def __init__(self, thing: Any) -> None:
        self.thing = thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SameObject) and self.thing is other.thing

    def __hash__(self) -> int:
        return id(self.thing)


def find_tensors(root: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors inside `root`, by path, and all other values inside `root`, by path.

    Lists, tuples, dicts and attributes of plain objects are searched; functions, modules and classes are not. For a module, its
    identity and its weights' addresses count. For an object with a method `static_parts`, the method's result is searched.
    """
    tensors: dict[str, Tensor] = {}
    others: dict[str, Any] = {}
    for path, leaf in _leaves(root, "state", set()):
        (tensors if isinstance(leaf, Tensor) else others)[path] = leaf
    return tensors, others


def _leaves(value: Any, path: str, above: set[int]) -> Iterator[tuple[str, Any]]:
    if isinstance(value, nn.Module):  # replays read its weights at the addresses that they had in the recording
        modules = modules_in(value)
        weights = with_parts([*parameters_in(modules), *buffers_in(modules)])
        yield path, (SameObject(value), *[weight.data_ptr() for weight in weights])
        return
    if isinstance(value, (Tensor, *_OPAQUE)) or id(value) in above:
        yield path, None if id(value) in above else value
        return
    above = above | {id(value)}
    if isinstance(value, list | tuple):
        yield path, (type(value), len(value))
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}[{index}]", above)
    elif isinstance(value, Mapping):
        yield path, (type(value), len(value))
        for key, item in value.items():
            yield from _leaves(item, f"{path}[{key!r}]", above)
    elif hasattr(type(value), "static_parts"):
        yield path, type(value)
        yield from _leaves(value.static_parts(), path, above)
    elif hasattr(value, "__dict__"):
        yield path, type(value)
        for name, item in vars(value).items():
            yield from _leaves(item, f"{path}.{name}", above)
    else:
        yield path, value


class StaticInputs:
    """The tensors in `root` that a recording reads and writes.

    The state of another call fits if it has the same parts: tensors of equal shape, dtype and device, and equal other values. A state
    never fits if it contains an object that every call creates anew and that cannot be searched, such as a closure. Then every call
    records its own steps, which is slower.
    """

    def __init__(self, root: Any) -> None:
        self.root = root  # this keeps the objects alive, because they are compared by identity
        self.tensors, self.others = find_tensors(root)
        self._places = {path: tensor.data_ptr() for path, tensor in self.tensors.items()}

    @property
    def settled(self) -> bool:
        """Whether `root` still holds this object's tensors. If a step has replaced a tensor, another call's values cannot be loaded."""
        return self._are_in_place(find_tensors(self.root)[0])

    def _are_in_place(self, tensors: Mapping[str, Tensor]) -> bool:
        """Whether `tensors` have the addresses that :attr:`tensors` had at first. Replays use these addresses."""
        return {path: tensor.data_ptr() for path, tensor in tensors.items()} == self._places

    def load(self, root: Any, copy: Callable[[Tensor, Tensor], object] = Tensor.copy_) -> bool:
        """Copies the values of the tensors in `root` to :attr:`tensors`. Returns False, without copying, if `root` does not fit."""
        tensors, others = find_tensors(root)
        if tensors.keys() != self.tensors.keys() or others.keys() != self.others.keys():
            return False
        if not all(_alike(self.tensors[path], tensor) for path, tensor in tensors.items()):
            return False
        if not self._are_in_place(self.tensors):
            return False
        if not all(_equal(self.others[path], other) for path, other in others.items()):
            return False
        self.take(tensors, copy)
        return True

    def take(self, tensors: Mapping[str, Tensor], copy: Callable[[Tensor, Tensor], object] = Tensor.copy_) -> None:
        """Copies the values of `tensors` to :attr:`tensors`. tensors: found by :func:`find_tensors` in a state that fits."""
        _copy_all(self.tensors, tensors, copy)

    def give_back(self, root: Any, copy: Callable[[Tensor, Tensor], object] = Tensor.copy_) -> None:
        """The reverse of :meth:`load`: copies the values of :attr:`tensors` to the tensors in `root`, a state that fits."""
        tensors, _ = find_tensors(root)
        _copy_all(tensors, self.tensors, copy)


def copied(value: Any) -> Any:
    """Returns `value` with copies of its tensors. If tensors together fill a buffer, their copies share a copy of this buffer."""
    tensors, _ = find_tensors(value)
    buffers = {buffer.data_ptr(): buffer.clone().untyped_storage() for buffer in _whole_buffers(tensors)[0].values()}
    return _copied(value, buffers)


def _copied(value: Any, buffers: Mapping[int, torch.UntypedStorage]) -> Any:
    """Returns `value` with copies of its tensors. buffers: copies of shared buffers, by the address of the original buffer."""
    if isinstance(value, Tensor):
        buffer = buffers.get(value.untyped_storage().data_ptr()) if buffers else None
        if buffer is None:
            return value.clone()
        return value.new_empty(0).set_(buffer, value.storage_offset(), value.shape, value.stride())
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return type(value)(_copied(item, buffers) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: _copied(getattr(value, f.name), buffers) for f in fields(value) if f.init})
    return value


def _whole_buffers(tensors: Mapping[str, Tensor]) -> tuple[dict[tuple, Tensor], list[str]]:
    """Finds tensors that together fill a buffer, so that one copy of the buffer copies them all.

    Returns:
        the buffers, as bytes, by the layout of the tensors in them; and the paths of all other tensors.
    """
    sharing: dict[int, list[str]] = {}
    for path, tensor in tensors.items():
        sharing.setdefault(tensor.untyped_storage().data_ptr(), []).append(path)
    buffers: dict[tuple, Tensor] = {}
    others: list[str] = []
    for paths in sharing.values():
        own = [tensors[path] for path in paths]
        if len(own) == 1 or not _fill(own):
            others += paths
            continue
        layout = tuple([(path, t.storage_offset(), t.dtype, t.shape) for path, t in zip(paths, own, strict=True)])
        whole = torch.empty(0, dtype=torch.uint8, device=own[0].device)
        buffers[layout] = whole.set_(own[0].untyped_storage())
    return buffers, others


def _fill(tensors: list[Tensor]) -> bool:
    """Whether `tensors`, which share a buffer, are contiguous and cover the whole buffer."""
    end = 0
    for begin, size in sorted((int(t.storage_offset()) * t.itemsize, t.nbytes) for t in tensors if t.is_contiguous()):
        if begin > end:
            return False
        end = max(end, begin + size)
    return end == tensors[0].untyped_storage().nbytes() and all(t.is_contiguous() for t in tensors)


def _copy_all(
    places: Mapping[str, Tensor], values: Mapping[str, Tensor], copy: Callable[[Tensor, Tensor], object]
) -> None:
    own_buffers, _ = _whole_buffers({path: places[path] for path in values})
    buffers, others = _whole_buffers(values)
    for layout, given in buffers.items():
        if layout not in own_buffers:
            others += [path for path, *_ in layout]
        elif own_buffers[layout].data_ptr() != given.data_ptr():
            copy(own_buffers[layout], given)
    for path in others:
        own = _without_repeats(places[path])
        part = _without_repeats(values[path], expanded=places[path])
        if own.data_ptr() != part.data_ptr():
            copy(own, part)


def _alike(own: Tensor, other: Tensor) -> bool:
    return own.shape == other.shape and own.dtype == other.dtype and own.device == other.device


def _equal(own: Any, other: Any) -> bool:
    if own is other:
        return True
    if type(own) is not type(other) or isinstance(own, types.FunctionType):
        return False
    try:
        return bool(own == other)
    except Exception:  # values that cannot be compared count as different
        return False


def _without_repeats(tensor: Tensor, expanded: Tensor | None = None) -> Tensor:
    """Narrows `tensor` to size 1 in the dimensions that `expanded` (default: `tensor`) has expanded, because they cannot be written."""
    expanded = tensor if expanded is None else expanded
    for dim, (size, stride) in enumerate(zip(expanded.shape, expanded.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor
