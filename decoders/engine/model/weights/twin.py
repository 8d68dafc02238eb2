"""A model's private twin: modules of its own over the same weights, and what tells that it no longer is one."""

from __future__ import annotations

import copy
import functools
import types
from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from ....common.transformers_compat import SET_BY_GENERATE
from ..torch_compat import buffers_in, hooks_everywhere, hooks_of, local_part, modules_in, parameters_in, with_parts
from .config_state import config_state
from .fingerprints import state_of
from .forward_code import captured, forward_code, global_names, is_of_library

_INTERNAL = frozenset(vars(nn.Module()))
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
#: How deep, and how many entries of one container, are looked at.
_DEPTH, _ENTRIES = 6, 1000
#: Of how many numbers of an array it is seen that they have changed.
_SAMPLES = 65_536
#: How deep the helper objects of a closure may lie in each other.
_HELPERS = 3


#: Attributes that generating sets: no part of the network.
_OF_GENERATION = SET_BY_GENERATE | {"generate", "__getstate__", "generation_config"}
#: Attributes that no state of a model has.
_LEFT_OUT = _INTERNAL | _OF_GENERATION
#: How the names of attributes begin that a tool of ours has set.
_OURS = "decoders_"

Tree = TypeVar("Tree", bound=nn.Module)


def share_weights(model: Tree, packed: Sequence[Tensor] = ()) -> Tree:
    """A copy of the module tree with its own config, in evaluation mode. Everything else is shared.

    Parameters, buffers, `packed` weights, and whatever modules keep in attributes (tensors, dicts, helper objects) are the
    very same objects: what is written into them later counts here as well.
    """
    twin = _Twin(model, packed).of(model)
    # What other tools hung on the instance (an overridden generate, a lock) is not part of the network.
    for name in [name for name in vars(twin) if name in _OF_GENERATION or name.startswith(_OURS)]:
        del vars(twin)[name]
    return twin.eval()


class _Twin:
    """Copies a tree of modules. Containers are copied only where they hold modules, configs or bound methods of the tree."""

    def __init__(self, model: nn.Module, packed: Sequence[Tensor]) -> None:
        self.own = {id(module) for module in model.modules()}
        self.memo: dict[int, Any] = {id(t): t for t in (*model.parameters(), *model.buffers(), *packed)}

    def of(self, value: Any) -> Any:
        """The twin's counterpart of `value`, or `value` itself."""
        if id(value) in self.memo:
            return self.memo[id(value)]
        if isinstance(value, nn.Module) and id(value) in self.own:
            return self._module(value)
        if isinstance(value, PreTrainedConfig):
            return copy.deepcopy(value, self.memo)
        if isinstance(value, types.MethodType):
            return types.MethodType(value.__func__, self.of(value.__self__)) if self._touches(value) else value
        if isinstance(value, types.FunctionType) and self._touches(value):
            return self._function(value)
        if isinstance(value, functools.partial) and self._touches(value):
            partial = functools.partial(self.of(value.func), *map(self.of, value.args), **self._values(value.keywords))
            vars(partial).update(self._values(vars(value)))
            return partial
        if isinstance(value, (list, tuple, set, dict)) and self._touches(value):
            return self._container(value)
        return value

    def _module(self, module: nn.Module) -> nn.Module:
        twin = module.__class__.__new__(module.__class__)
        self.memo[id(module)] = twin
        for name, value in list(vars(module).items()):
            internal = name in _INTERNAL and isinstance(value, (dict, set))
            vars(twin)[name] = self._container(value) if internal else self.of(value)
        return twin

    def _function(self, function: types.FunctionType) -> types.FunctionType:
        """A function made for a module of the tree (tensor parallelism exchanges ``forward``), made for its counterpart."""
        cells = [types.CellType() for _ in function.__closure__ or ()]
        twin = types.FunctionType(
            function.__code__, function.__globals__, function.__name__, function.__defaults__, tuple(cells)
        )
        twin.__kwdefaults__ = function.__kwdefaults__
        vars(twin).update(vars(function))
        self.memo[id(function)] = twin  # a function may hold itself
        for cell, value in zip(cells, map(_held, function.__closure__ or ()), strict=True):
            if value is not _EMPTY:
                cell.cell_contents = self._captured(value)
        return twin

    def _captured(self, value: Any, depth: int = _HELPERS) -> Any:
        """The counterpart of what a closure holds. Its helper objects are its own, unlike those in attributes of modules."""
        if not self._captures(value, depth):
            return self.of(value)
        twin = copy.copy(value)
        vars(twin).update({name: self._captured(held, depth - 1) for name, held in vars(value).items()})
        return twin

    def _captures(self, value: Any, depth: int) -> bool:
        """Whether a helper object holds something of the tree."""
        plain = isinstance(value, (*_PLAIN, Tensor, type, types.FunctionType, types.MethodType, types.ModuleType))
        if depth == 0 or plain or isinstance(value, (nn.Module, PreTrainedConfig, functools.partial)):
            return False
        held = getattr(value, "__dict__", {}).values()
        return any(self._touches(entry) or self._captures(entry, depth - 1) for entry in held)

    def _container(self, value: Any) -> Any:
        if isinstance(value, dict):
            copied = copy.copy(value)
            copied.update((key, self.of(entry)) for key, entry in value.items())
            return copied
        entries = map(self.of, value)
        return type(value)(*entries) if hasattr(value, "_fields") else type(value)(entries)

    def _values(self, value: dict[str, Any]) -> dict[str, Any]:
        return {key: self.of(entry) for key, entry in value.items()}

    def _touches(self, value: Any, depth: int = _DEPTH) -> bool:
        """Whether `value` holds something of the tree that the twin has for itself."""
        if isinstance(value, nn.Module):
            return id(value) in self.own
        if isinstance(value, PreTrainedConfig):
            return True
        if depth == 0 or isinstance(value, _PLAIN):
            return False
        if isinstance(value, types.MethodType):
            return self._touches(value.__self__, depth - 1)
        if isinstance(value, types.FunctionType):
            return any(self._touches(_held(cell), depth - 1) for cell in value.__closure__ or ())
        if isinstance(value, functools.partial):
            return any(self._touches(v, depth - 1) for v in (value.func, *value.args, *value.keywords.values()))
        if isinstance(value, dict):
            return any(self._touches(entry, depth - 1) for entry in value.values())
        return isinstance(value, (list, tuple, set)) and any(self._touches(entry, depth - 1) for entry in value)


#: Stands for what a cell of a closure does not hold yet.
_EMPTY = object()


def _held(cell: types.CellType) -> Any:
    """What a cell of a closure holds."""
    try:
        return cell.cell_contents
    except ValueError:
        return _EMPTY


@dataclass(frozen=True)
class WeightState:
    """A model's weights and modules as they were when they were looked at.

    Attributes:
        modules: changes whenever a weight is exchanged for another tensor, resized or cast, whenever a module is exchanged,
            hooked or switched, whenever an attribute of one is set to something else, and whenever a value of a config is.
        code: changes whenever a function that they run is exchanged, or one is hooked to all modules there are.
        contents: changes whenever something is written into what attributes hold (dicts, lists, tensors, helper objects), or a plain
            value that a hook reads is another one.
        values: changes whenever a weight is written in place or gets other data, or a tensor that a hook reads is.
    """

    modules: tuple
    code: tuple
    contents: tuple
    values: tuple

    @classmethod
    def of(cls, model: nn.Module) -> Self:
        parts = modules_in(model)
        tensors = with_parts((*parameters_in(parts), *buffers_in(parts)))
        shapes = tuple((id(t), t.dtype, t.device, t.shape) for t in tensors)
        modules: list[object] = []
        held: list[object] = []
        loose: list[Tensor] = []
        configs: dict[int, PreTrainedConfig] = {}
        for module in parts:
            after, before = hooks_of(module)
            modules += [id(module), *after, *before]
            for hook in (*after.values(), *before.values()):
                read = read_by(hook)
                held += [value for value in read if not isinstance(value, Tensor)]
                loose += [value for value in read if isinstance(value, Tensor)]
            for name, value in vars(module).items():
                if name in _LEFT_OUT or name.startswith(_OURS):
                    continue
                kind = type(value)  # a config is slow to say what it is an instance of
                if issubclass(kind, _PLAIN):
                    modules.append(value)
                else:
                    modules.append(id(value))
                    if not _opaque(kind):  # type: ignore[arg-type]  # types are hashable
                        held.append(_content(value, _DEPTH))
                    elif issubclass(kind, PreTrainedConfig):
                        configs[id(value)] = value
        modules += [config_state(config, _other_content) for config in configs.values()]
        code = hooks_everywhere(), forward_code(dict.fromkeys(map(type, parts)))
        return cls((shapes, tuple(modules)), code, tuple(held), tuple(map(state_of, (*tensors, *loose))))

    def replaces(self, other: WeightState) -> bool:
        """Whether these are `other` with other values and contents: what runs the model sees them by itself."""
        return self.modules == other.modules and self.code == other.code


def tensors_of(model: nn.Module) -> list[Tensor]:
    """All tensors that modules of `model` hold, this process's parts of them: parameters, buffers, and plain attributes."""
    loose = [v for module in model.modules() for v in vars(module).values() if isinstance(v, Tensor)]
    return [local_part(tensor) for tensor in with_parts((*model.parameters(), *model.buffers(), *loose))]


def _content(value: Any, depth: int) -> object:
    """Something that differs whenever what `value` holds does."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Tensor):
        return id(value), *state_of(value)
    if isinstance(value, (np.ndarray, array, bytearray)):
        numbers = np.asarray(value).reshape(-1)
        return id(value), hash(numbers[:: len(numbers) // _SAMPLES + 1].tobytes())
    if depth == 0 or _opaque(type(value)):  # type: ignore[arg-type]
        return id(value)
    if isinstance(value, (set, frozenset)):
        return id(value), frozenset(entry if isinstance(entry, _PLAIN) else id(entry) for entry in value)
    if isinstance(value, (list, tuple, deque)):
        entries: Iterable[tuple[Any, Any]] = enumerate(value)
        count = len(value)
    else:
        held = value if isinstance(value, dict) else _attributes(value)
        entries, count = held.items(), len(held)
    if count > _ENTRIES:
        return id(value), count
    return id(value), tuple((key if isinstance(key, _PLAIN) else id(key), _content(v, depth - 1)) for key, v in entries)


def _attributes(value: Any) -> dict[str, Any]:
    """What an object keeps, in slots too."""
    slots = [name for kind in type(value).__mro__ for name in _names_of(vars(kind).get("__slots__", ()))]
    return {name: getattr(value, name, None) for name in slots} | getattr(value, "__dict__", {})


def _names_of(slots: str | Iterable[str]) -> Iterable[str]:
    return (slots,) if isinstance(slots, str) else slots


def _other_content(value: Any) -> object:
    return _content(value, _DEPTH)


def read_by(hook: Any, depth: int = _HELPERS) -> list[object]:
    """What a hook of a user's reads beside its arguments: tensors, plain values, and those in what it keeps."""
    if isinstance(hook, functools.partial):
        kept: list[Any] = [hook.func, *hook.args, *hook.keywords.values()]
    elif isinstance(hook, types.MethodType):
        kept = [hook.__self__, hook.__func__]
    elif isinstance(hook, types.FunctionType):
        if is_of_library(hook):
            return []
        named = [hook.__globals__.get(name) for name in global_names(hook.__code__)]
        kept = [*captured(hook), *(hook.__defaults__ or ()), *(hook.__kwdefaults__ or {}).values(), *named]
    else:
        kept = [hook]
    read: list[object] = []
    for value in kept:
        if isinstance(value, (*_PLAIN, Tensor)):
            read.append(value)
        elif isinstance(value, (functools.partial, types.MethodType, types.FunctionType)):
            read += read_by(value, depth - 1) if depth else []
        elif not _opaque(type(value)):  # type: ignore[arg-type]
            entries = value if isinstance(value, dict) else _attributes(value)
            read += [entry for entry in entries.values() if isinstance(entry, _PLAIN)]
    return read


@functools.cache
def _opaque(kind: type) -> bool:
    """Whether objects of this class are not looked into: modules, configs, functions, and what libraries made."""
    if issubclass(kind, (dict, list, tuple, set, frozenset, bytearray, types.SimpleNamespace, Tensor)):
        return False
    made_by = kind.__module__.partition(".")[0]
    own = {
        "torch",
        "transformers",
        "tokenizers",
        "builtins",
        "functools",
        "types",
        "threading",
        "_thread",
        "enum",
        "decoders",
    }
    return issubclass(kind, (nn.Module, PreTrainedConfig, type)) or made_by in own
