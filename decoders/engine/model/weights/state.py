"""Notices changes to a model: to its weights, its modules, the code that they run, and the values of its config."""

from __future__ import annotations

import functools
import types
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from ....common.transformers_compat import NO_PART_OF_NETWORK, OF_TRAINING, is_of_training
from ..rope import has_varying_table
from ..torch_compat import buffers_in, hooks_everywhere, hooks_of, local_part, modules_in, parameters_in, with_parts
from .fingerprints import state_of
from .twin import DEPTH, HELPERS, INTERNAL, OF_GENERATION, OURS, PLAIN, captured

#: Attributes that are not part of a model's state.
_LEFT_OUT = INTERNAL | OF_GENERATION | OF_TRAINING
#: Of larger containers only the size is compared.
_ENTRIES = 1000
#: Numbers of an array that are compared, about.
_SAMPLES = 65_536
#: Packages whose hooks hold nothing of the user's.
_LIBRARIES = {"torch", "transformers", "accelerate", "peft", "decoders"}


@dataclass(frozen=True)
class WeightState:
    """A model's weights and modules at one time.

    Attributes:
        modules: changes when a weight is replaced by another tensor, resized, cast or stored otherwise, when a module is replaced,
            gets a hook or another mode, and when an attribute of a module or a value of a config is set to something else.
        code: changes when a function that they run is replaced, or when a hook for all modules is registered.
        contents: changes when something is written into the objects that attributes hold (dicts, lists, tensors, helper objects), or
            when a plain value that a hook reads changes.
        values: changes when a weight, or a tensor that a hook reads, is written in place or gets other data.
    """

    modules: tuple
    code: tuple
    contents: tuple
    values: tuple

    @classmethod
    def of(cls, model: nn.Module) -> Self:
        parts = modules_in(model)
        # Some rotary modules write a table for the length of each text, which a private tree has for itself.
        fixed = [part for part in parts if not has_varying_table(part)]
        tensors = with_parts((*parameters_in(parts), *buffers_in(fixed)))
        shapes = tuple((id(t), t.dtype, t.device, t.shape, strides_of(t)) for t in tensors)
        modules: list[object] = []
        held: list[object] = []
        loose: list[Tensor] = []
        configs: dict[int, PreTrainedConfig] = {}
        for module in parts:
            after, before = hooks_of(module)
            modules.append(id(module))
            for number, hook in (*after.items(), *before.items()):
                if is_of_training(hook):
                    continue
                modules.append(number)
                read = read_by(hook)
                held += [value for value in read if not isinstance(value, Tensor)]
                loose += [value for value in read if isinstance(value, Tensor)]
            varying = has_varying_table(module)
            for name, value in vars(module).items():
                if name in _LEFT_OUT or name.startswith(OURS) or varying:
                    continue
                kind = type(value)  # a config is slow to say what it is an instance of
                if issubclass(kind, PLAIN):
                    modules.append(value)
                else:
                    modules.append(id(value))
                    if not _opaque(kind):  # type: ignore[arg-type]  # types are hashable
                        held.append(_content(value, DEPTH))
                    elif issubclass(kind, PreTrainedConfig):
                        configs[id(value)] = value
        modules += [config_state(config, _other_content) for config in configs.values()]
        code = hooks_everywhere(), forward_code(dict.fromkeys(map(type, parts)))
        return cls((shapes, tuple(modules)), code, tuple(held), tuple(map(state_of, (*tensors, *loose))))

    def replaces(self, other: WeightState) -> bool:
        """Whether only values and contents differ from `other`: the model then runs with them without further work."""
        return self.modules == other.modules and self.code == other.code


def strides_of(tensor: Tensor) -> tuple[int, ...]:
    """Those of a dense tensor; compiled code is for them."""
    return tensor.stride() if tensor.layout == torch.strided else ()


def tensors_of(model: nn.Module) -> list[Tensor]:
    """This process's parts of all tensors that modules of `model` hold: parameters, buffers, and plain attributes."""
    fixed = [module for module in model.modules() if not has_varying_table(module)]
    loose = [
        value
        for module in fixed
        for name, value in vars(module).items()
        if isinstance(value, Tensor) and name not in OF_GENERATION
    ]
    return [local_part(tensor) for tensor in with_parts((*model.parameters(), *buffers_in(fixed), *loose))]


def _content(value: Any, depth: int) -> object:
    """A key that changes when the content of `value` does."""
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, Tensor):
        return id(value), *state_of(value)
    if isinstance(value, (np.ndarray, array, bytearray)):
        numbers = np.asarray(value).reshape(-1)
        return id(value), hash(numbers[:: len(numbers) // _SAMPLES + 1].tobytes())
    if depth == 0 or _opaque(type(value)):  # type: ignore[arg-type]
        return id(value)
    if isinstance(value, (set, frozenset)):
        return id(value), frozenset(entry if isinstance(entry, PLAIN) else id(entry) for entry in value)
    if isinstance(value, (list, tuple, deque)):
        entries: Iterable[tuple[Any, Any]] = enumerate(value)
        count = len(value)
    else:
        held = value if isinstance(value, dict) else _attributes(value)
        entries, count = held.items(), len(held)
    if count > _ENTRIES:
        return id(value), count
    return id(value), tuple((key if isinstance(key, PLAIN) else id(key), _content(v, depth - 1)) for key, v in entries)


def _attributes(value: Any) -> dict[str, Any]:
    """The attributes of an object, including those in slots."""
    slots = [name for kind in type(value).__mro__ for name in _names_of(vars(kind).get("__slots__", ()))]
    return {name: getattr(value, name, None) for name in slots} | getattr(value, "__dict__", {})


def _names_of(slots: str | Iterable[str]) -> Iterable[str]:
    return (slots,) if isinstance(slots, str) else slots


def _other_content(value: Any) -> object:
    return _content(value, DEPTH)


def read_by(hook: Any, depth: int = HELPERS) -> list[object]:
    """The tensors and plain values that a user's hook reads besides its arguments, including those in objects that it holds."""
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
        if isinstance(value, (*PLAIN, Tensor)):
            read.append(value)
        elif isinstance(value, (functools.partial, types.MethodType, types.FunctionType)):
            read += read_by(value, depth - 1) if depth else []
        elif not _opaque(type(value)):  # type: ignore[arg-type]
            entries = value if isinstance(value, dict) else _attributes(value)
            read += [entry for entry in entries.values() if isinstance(entry, PLAIN)]
    return read


@functools.cache
def _opaque(kind: type) -> bool:
    """Whether the content of such objects is not compared: modules, configs, functions, and objects of libraries."""
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


#: Values of a config that are compared as they are.
_VALUES = frozenset(PLAIN)


def config_state(config: PreTrainedConfig, other: Callable[[Any], object], depth: int = DEPTH) -> tuple[object, ...]:
    """A key that changes when a value of `config`, or of a config in it, does.

    It is computed before every call, so it makes no copy and calls no ``to_dict``, and takes some five microseconds.

    Args:
        other: the key of a value that is neither plain nor a container nor a config.
    """
    return tuple(
        [
            (name, value if type(value) in _VALUES else _state(value, other, depth))
            for name, value in vars(config).items()
            if name not in NO_PART_OF_NETWORK
        ]
    )


def _state(value: Any, other: Callable[[Any], object], depth: int) -> object:
    if type(value) in _VALUES:
        return value
    if depth == 0:
        return id(value)
    if isinstance(value, PreTrainedConfig):
        return id(value), config_state(value, other, depth - 1)
    if isinstance(value, (list, tuple)):
        # Often values per layer, such as kinds of attention or windows.
        return (
            tuple(value) if _VALUES.issuperset(map(type, value)) else tuple(_state(v, other, depth - 1) for v in value)
        )
    if isinstance(value, (set, frozenset)):
        return frozenset(value)
    if isinstance(value, dict):
        return tuple([(key, _state(entry, other, depth - 1)) for key, entry in value.items()])
    return other(value)


#: What the watched places hold: functions with their code and defaults, classes and other callables, plain values.
Code = tuple[object, ...]


class _Watched:
    """The attributes and globals that the forward pass of one class refers to.

    Attributes:
        code: what they held when this was created, those of the class first.
    """

    def __init__(self, kind: type[nn.Module]) -> None:
        attributes, names = _places(kind)
        self._read = [(_several(attrgetter, attributes), kind), *((_several(itemgetter, n), s) for s, n in names)]
        self.code = self.read()

    def read(self) -> Code:
        read = [get(place) for get, place in self._read]
        functions = [
            f for each in read for f in (each if type(each) is tuple else (each,)) if type(f) is types.FunctionType
        ]
        return tuple(read), tuple([(f.__code__, f.__defaults__) for f in functions])


_watched: dict[type, _Watched] = {}


def forward_code(kinds: Iterable[type[nn.Module]]) -> tuple[Code, ...]:
    """The functions that modules of these classes run: ``forward``, methods that it calls, and functions of their modeling files.

    It changes when one of them, or its code, is replaced, and when a plain value does that they refer to in their class or file.
    Functions that torch calls internally, or transformers outside its modeling files, are not compared.
    """
    return tuple([_code_of(kind) for kind in kinds])


def _code_of(kind: type[nn.Module]) -> Code:
    known = _watched.get(kind)
    if known is not None:
        try:
            if known.read() == known.code:
                return known.code
        except (AttributeError, KeyError):  # deleted since
            pass
    known = _watched[kind] = _Watched(kind)  # the code that runs now may refer to others
    return known.code


def _several(getter: Callable[..., Callable[[Any], Any]], names: list[str]) -> Callable[[Any], Any]:
    return getter(*names) if names else lambda _: ()


def _places(kind: type[nn.Module]) -> tuple[list[str], list[tuple[dict[str, Any], list[str]]]]:
    """The attributes of `kind`, and the names in each dict of globals, that its forward pass may refer to."""
    attributes = {"forward": None}
    spaces: dict[int, tuple[dict[str, Any], dict[str, None]]] = {}
    waiting: list[Any] = [kind.forward]
    seen: set[int] = set()
    while waiting:
        function = _plain(waiting.pop())
        if function is None or id(function) in seen:
            continue
        seen.add(id(function))
        waiting.extend(captured(function))
        if not _looked_into(function):
            continue
        space = function.__globals__
        for name in global_names(function.__code__):
            held = space.get(name)
            if held is None:
                if name in vars(nn.Module) or name not in _class_names(kind):
                    continue
                held = getattr(kind, name)
                if isinstance(held, (types.FunctionType, types.MethodType, property, *PLAIN)):
                    attributes[name] = None
                    waiting.append(held.fget if isinstance(held, property) else held)
            elif callable(held) or isinstance(held, PLAIN):
                spaces.setdefault(id(space), (space, {}))[1][name] = None
                waiting.append(held)
    return list(attributes), [(space, list(names)) for space, names in spaces.values()]


def _plain(value: Any) -> types.FunctionType | None:
    """The Python function that calling `value` runs, if there is one."""
    while isinstance(value, (functools.partial, types.MethodType)):
        value = value.func if isinstance(value, functools.partial) else value.__func__
    return value if isinstance(value, types.FunctionType) else None


def _class_names(kind: type) -> set[str]:
    # At once: the first compilation of a process writes to nn.Module, in a thread of its own.
    return set().union(*map(vars, kind.__mro__))


def is_of_library(function: types.FunctionType) -> bool:
    """Whether it belongs to torch, transformers, or a library that puts hooks on their models."""
    return str(function.__globals__.get("__name__", "")).partition(".")[0] in _LIBRARIES


def _looked_into(function: types.FunctionType) -> bool:
    module = str(function.__globals__.get("__name__", ""))
    package = module.partition(".")[0]
    return package != "torch" and (package != "transformers" or module.startswith("transformers.models."))


def global_names(code: types.CodeType) -> Iterator[str]:
    """The names of globals and attributes in a function's code and in the functions inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from global_names(constant)
