"""What a strategy could remember from one call to the next: its instance, its settings, its classes, globals of its code."""

from __future__ import annotations

import itertools
import random
import types
from collections import deque
from collections.abc import Iterator, Mapping, Set
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..settings import Settings
from ..strategy import Strategy

#: Most values that are looked at under one name, and most bytes of one tensor: more are told apart by their size.
MOST_VALUES, MOST_BYTES = 20_000, 1 << 20

Contents = dict[str, Any]


def of_instance(strategy: Strategy) -> Contents:
    """The values in a strategy's attributes and settings, by the path that leads to them."""
    return _contents({"": strategy}, {owner.__module__ for owner in map(type, _strategies(strategy, set()))})


def of_code(strategy: Strategy) -> Contents:
    """The values in the attributes of a strategy's classes and in what their functions reach: globals, defaults, closures."""
    reached: dict[str, Any] = {}
    modules: set[str] = set()
    for owner in _strategies(strategy, set()):
        for cls in type(owner).__mro__[: type(owner).__mro__.index(Strategy)]:
            modules.add(cls.__module__)
            reached |= dict(_reached(cls))
    return _contents(reached, modules)


def difference(before: Contents, after: Contents) -> str | None:
    """What differs first, for a message; None if nothing does."""
    for path in sorted(before.keys() | after.keys()):
        old, new = before.get(path, _ABSENT), after.get(path, _ABSENT)
        if old != new:
            if old is _ABSENT or new is _ABSENT:
                return f"{path} is {'new' if old is _ABSENT else 'gone'}"
            both = isinstance(old, _SHOWN) and isinstance(new, _SHOWN)
            return f"{path} was {old!r} and is {new!r}" if both else f"{path} has changed"
    return None


_SHOWN = (int, float, str, bool, type(None))
_ABSENT = object()


def parts_of(strategy: Strategy) -> tuple[Strategy, ...]:
    """The strategies that a merged one is made of; of any other, none."""
    parts = getattr(strategy, "parts", ())
    return tuple(p for p in parts if isinstance(p, Strategy)) if isinstance(parts, tuple | list) else ()


def _strategies(strategy: Strategy, seen: set[int]) -> Iterator[Strategy]:
    if id(strategy) not in seen:
        seen.add(id(strategy))
        yield strategy
        for part in parts_of(strategy):
            yield from _strategies(part, seen)


def _reached(cls: type) -> Iterator[tuple[str, Any]]:
    """Names and values of a class's attributes, and of what the code of its methods names."""
    package = cls.__module__.partition(".")[0]
    done: set[int] = set()
    pending: list[tuple[str, Any]] = [
        (f"{cls.__name__}.{k}", v) for k, v in vars(cls).items() if not k.startswith("__")
    ]
    while pending:
        name, value = pending.pop()
        if isinstance(value, staticmethod | classmethod):
            value = value.__func__
        if isinstance(value, property):
            value = value.fget
        if not isinstance(value, types.FunctionType):
            yield name, value
            continue
        # Of our own package the code of other modules is the engine's: what it keeps has nothing to do with a strategy.
        own = value.__module__ == cls.__module__ or (package != "decoders" and _package(value) == package)
        if id(value) in done or not own:
            continue
        done.add(id(value))
        yield f"{name} (its defaults)", [value.__defaults__, value.__kwdefaults__, value.__dict__]
        for variable, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                pending.append((f"{name} ({variable})", cell.cell_contents))
            except ValueError:  # not filled yet
                continue
        where = value.__globals__.get("__name__", "")
        pending += [(f"{where}.{n}", value.__globals__[n]) for n in _names(value.__code__) if n in value.__globals__]


def _package(function: types.FunctionType) -> str:
    return (function.__module__ or "").partition(".")[0]


def _names(code: types.CodeType) -> set[str]:
    inner = [_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return set(code.co_names).union(*inner)


def _contents(named: Mapping[str, Any], modules: set[str]) -> Contents:
    contents: Contents = {}
    for name, value in named.items():
        contents |= itertools.islice(_values(value, name, modules, set()), MOST_VALUES)
    return contents


def _values(value: Any, path: str, modules: set[str], above: set[int]) -> Iterator[tuple[str, Any]]:
    """What can change in `value`, by path. Objects of classes of other modules are told apart by identity alone."""
    if id(value) in above:
        return
    above = above | {id(value)}
    if isinstance(value, Tensor | np.ndarray):
        yield path, _array(value)
    elif isinstance(value, torch.Generator):
        yield path, ("generator", value.get_state().cpu().numpy().tobytes())
    elif isinstance(value, random.Random):
        yield path, ("random", value.getstate())
    elif isinstance(value, itertools.count):
        yield path, repr(value)
    elif isinstance(value, Mapping) and not isinstance(value, types.MappingProxyType):
        yield path, ("entries", len(value))
        for key, item in list(value.items()):
            yield from _values(item, f"{path}[{key!r}]", modules, above)
    elif isinstance(value, list | tuple | deque):
        yield path, ("entries", len(value))
        for index, item in enumerate(list(value)):
            yield from _values(item, f"{path}[{index}]", modules, above)
    elif isinstance(value, Set | bytearray):
        yield path, frozenset(map(repr, value)) if isinstance(value, Set) else bytes(value)
    elif isinstance(value, int | float | complex | str | bytes | bool | type(None)):
        yield path, value if value == value else repr(value)
    elif isinstance(value, Strategy | Settings | types.SimpleNamespace) or _of(value, modules):
        for name, item in list(vars(value).items()):
            yield from _values(item, f"{path}.{name}".lstrip("."), modules, above)
    else:
        yield path, ("object", id(value))


def _of(value: Any, modules: set[str]) -> bool:
    return hasattr(value, "__dict__") and not isinstance(value, type) and type(value).__module__ in modules


def _array(value: Tensor | np.ndarray) -> tuple:
    tensor = torch.from_numpy(value) if isinstance(value, np.ndarray) and value.dtype.kind in "biuf" else value
    if not isinstance(tensor, Tensor) or tensor.numel() * tensor.element_size() > MOST_BYTES:
        return tuple(value.shape), str(value.dtype), id(value)
    data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return tuple(value.shape), str(value.dtype), data.numpy().tobytes()
