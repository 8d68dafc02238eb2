"""Finds changes that a strategy must not make: to its instance, settings, classes and globals, and to the state of the process."""

from __future__ import annotations

import itertools
import random
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..engine.model.torch_compat import float32_precision
from ..settings import Settings
from ..strategy import Strategy

#: At most MOST_VALUES values are compared under one name. For tensors above MOST_BYTES, only shape, dtype and identity are compared.
MOST_VALUES, MOST_BYTES = 20_000, 1 << 20

Contents = dict[str, Any]


def of_instance(strategy: Strategy) -> Contents:
    """The values in a strategy's attributes and settings, by path."""
    return _contents({"": strategy}, {owner.__module__ for owner in map(type, _strategies(strategy, set()))})


def of_code(strategy: Strategy) -> Contents:
    """The values in the attributes of a strategy's classes, and in the globals, defaults and closures of their functions."""
    reached: dict[str, Any] = {}
    modules: set[str] = set()
    for owner in _strategies(strategy, set()):
        for cls in type(owner).__mro__[: type(owner).__mro__.index(Strategy)]:
            modules.add(cls.__module__)
            reached |= dict(_reached(cls))
    return _contents(reached, modules)


def difference(before: Contents, after: Contents) -> str | None:
    """Describes the first difference, for a message. None if there is none."""
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
    """The parts of a merged strategy. Empty for other strategies."""
    parts = getattr(strategy, "parts", ())
    return tuple(p for p in parts if isinstance(p, Strategy)) if isinstance(parts, tuple | list) else ()


def _strategies(strategy: Strategy, seen: set[int]) -> Iterator[Strategy]:
    if id(strategy) not in seen:
        seen.add(id(strategy))
        yield strategy
        for part in parts_of(strategy):
            yield from _strategies(part, seen)


def _reached(cls: type) -> Iterator[tuple[str, Any]]:
    """Yields names and values of a class's attributes, and of the globals, defaults and closures that its methods use."""
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
        # Functions in other modules of `decoders` itself are left out: their state belongs to the engine.
        own = value.__module__ == cls.__module__ or (package != "decoders" and _package(value) == package)
        if id(value) in done or not own:
            continue
        done.add(id(value))
        yield f"{name} (its defaults)", [value.__defaults__, value.__kwdefaults__, value.__dict__]
        for variable, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                pending.append((f"{name} ({variable})", cell.cell_contents))
            except ValueError:  # the closure's cell is not filled yet
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
    """Yields the contents of `value` with their paths. Objects of classes outside `modules` are compared by identity only."""
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


def _cuda_states() -> list[Tensor]:
    return torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []


def _float32() -> tuple[str | None, str, str]:
    """The precision of float32 matrix products in torch's settings for all devices (None if they differ), for CUDA and for the CPU."""
    older = None
    with suppress(RuntimeError):  # raised if only the setting for CUDA was changed
        older = torch.get_float32_matmul_precision()
    return older, float32_precision(torch.device("cuda")), float32_precision(torch.device("cpu"))


def _set_float32(precision: tuple[str | None, str, str]) -> None:
    older, cuda, cpu = precision
    if older is not None:
        torch.set_float32_matmul_precision(older)  # set first, because it also sets CUDA and the CPU
    torch.backends.cuda.matmul.fp32_precision = cuda
    torch.backends.mkldnn.matmul.fp32_precision = cpu  # type: ignore[attr-defined]


#: The states of the process: name in messages → functions that read the state and restore it.
STATES: Mapping[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "torch's global random state": (torch.get_rng_state, torch.set_rng_state),
    "CUDA's global random state": (_cuda_states, torch.cuda.set_rng_state_all),
    "Python's global random state": (random.getstate, random.setstate),
    "NumPy's global random state": (np.random.get_state, np.random.set_state),
    "torch's default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "torch's default device": (torch.get_default_device, lambda d: torch.set_default_device(None if d.type == "cpu" else d)),
    "grad mode": (torch.is_grad_enabled, torch.set_grad_enabled),
    "autocast": (lambda: torch.is_autocast_enabled("cpu"), lambda on: torch.set_autocast_enabled("cpu", on)),
    "anomaly detection": (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    "torch's number of threads": (torch.get_num_threads, torch.set_num_threads),
    "the precision of float32 products": (_float32, _set_float32),
    "torch.use_deterministic_algorithms": (
        torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
}  # fmt: skip
RANDOM = "draw with decoders.sampling.gumbel_noise, or with a generator of the state's own"


def surroundings() -> dict[str, Any]:
    """The current states of the process, by the names in :data:`STATES`."""
    return {name: look() for name, (look, _) in STATES.items()}


def restore(before: Mapping[str, Any]) -> list[str]:
    """Restores all states that differ from `before`, and returns their names."""
    changed = [name for name, (look, _) in STATES.items() if not _same(look(), before[name])]
    for name in changed:
        STATES[name][1](before[name])
    return changed


def _same(state: Any, other: Any) -> bool:
    """Whether two states are equal, including arrays and tensors inside them."""
    if isinstance(state, list | tuple):
        return len(state) == len(other) and all(map(_same, state, other))
    return bool(np.array_equal(state, other)) if isinstance(state, Tensor | np.ndarray) else bool(state == other)


@contextmanager
def undisturbed(hook: str) -> Iterator[None]:
    """Restores the states of the process after the block. If the block changed a state, raises an AssertionError that names `hook`."""
    before = surroundings()
    try:
        yield
    finally:
        changed = restore(before)
    if changed:
        name = changed[0]
        how = f"; {RANDOM}" if "random" in name else f": it was {before[name]}" if "CUDA" not in name else ""
        raise AssertionError(f"{hook} leaves {name} changed{how}")


@contextmanager
def kept() -> Iterator[None]:
    """Restores the states of the process after the block."""
    before = surroundings()
    try:
        yield
    finally:
        restore(before)
