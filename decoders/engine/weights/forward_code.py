"""Which functions run in the forward passes of a model's modules: to patch a class or a modeling file is to change the model."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter, itemgetter
from typing import Any

from torch import nn

#: What a place holds now: functions, classes and other callables.
Code = tuple[object, ...]


class _Watched:
    """Where the functions lie that the forward pass of one class names, and what lay there last.

    Attributes:
        code: what lies there, functions of the class first.
    """

    def __init__(self, kind: type[nn.Module]) -> None:
        attributes, names = _places(kind)
        self._read = [(_several(attrgetter, attributes), kind), *((_several(itemgetter, n), s) for s, n in names)]
        self.code = self.read()

    def read(self) -> Code:
        return tuple([get(place) for get, place in self._read])


_watched: dict[type, _Watched] = {}


def forward_code(kinds: Iterable[type[nn.Module]]) -> tuple[Code, ...]:
    """The functions that modules of these classes run: ``forward``, methods that it calls, and functions of their modeling files.

    It differs whenever one of them was exchanged. Functions of torch, and those of transformers outside its modeling files, are
    taken as they are named there: what they call themselves is not looked at.
    """
    return tuple([_code_of(kind) for kind in kinds])


def _code_of(kind: type[nn.Module]) -> Code:
    known = _watched.get(kind)
    if known is not None:
        try:
            if known.read() == known.code:
                return known.code
        except (AttributeError, KeyError):  # taken away since
            pass
    known = _watched[kind] = _Watched(kind)  # what runs now may name others
    return known.code


def _several(getter: Callable[..., Callable[[Any], Any]], names: list[str]) -> Callable[[Any], Any]:
    return getter(*names) if names else lambda _: ()


def _places(kind: type[nn.Module]) -> tuple[list[str], list[tuple[dict[str, Any], list[str]]]]:
    """The attributes of `kind`, and names by the globals they are in, that hold what its forward pass may call."""
    attributes = {"forward": None}
    spaces: dict[int, tuple[dict[str, Any], dict[str, None]]] = {}
    waiting: list[Any] = [kind.forward]
    seen: set[int] = set()
    while waiting:
        function = _plain(waiting.pop())
        if function is None or id(function) in seen:
            continue
        seen.add(id(function))
        waiting.extend(_captured(function))
        if not _looked_into(function):
            continue
        space = function.__globals__
        for name in _names(function.__code__):
            held = space.get(name)
            if held is None:
                held = getattr(kind, name, None)
                if isinstance(held, types.FunctionType) and held is not getattr(nn.Module, name, None):
                    attributes[name] = None
                    waiting.append(held)
            elif callable(held):
                spaces.setdefault(id(space), (space, {}))[1][name] = None
                waiting.append(held)
    return list(attributes), [(space, list(names)) for space, names in spaces.values()]


def _plain(value: Any) -> types.FunctionType | None:
    """The function of Python that is called where `value` is, if there is one."""
    while isinstance(value, (functools.partial, types.MethodType)):
        value = value.func if isinstance(value, functools.partial) else value.__func__
    return value if isinstance(value, types.FunctionType) else None


def _captured(function: types.FunctionType) -> Iterator[Any]:
    """What a decorator keeps."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not there yet
            continue


def _looked_into(function: types.FunctionType) -> bool:
    module = str(function.__globals__.get("__name__", ""))
    package = module.partition(".")[0]
    return package != "torch" and (package != "transformers" or module.startswith("transformers.models."))


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
