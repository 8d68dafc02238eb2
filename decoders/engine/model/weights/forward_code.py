"""Which functions and constants make the forward passes of a model's modules: to patch a class or a modeling file is to change the
model.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter, itemgetter
from typing import Any

from torch import nn

#: What a place holds now: functions with their code and defaults, classes and other callables, plain values.
Code = tuple[object, ...]

_PLAIN = (bool, int, float, complex, str, bytes, type(None))


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
        read = [get(place) for get, place in self._read]
        functions = [
            f for each in read for f in (each if type(each) is tuple else (each,)) if type(f) is types.FunctionType
        ]
        return tuple(read), tuple([(f.__code__, f.__defaults__) for f in functions])


_watched: dict[type, _Watched] = {}


def forward_code(kinds: Iterable[type[nn.Module]]) -> tuple[Code, ...]:
    """The functions that modules of these classes run: ``forward``, methods that it calls, and functions of their modeling files.

    It differs whenever one of them, or its code, was exchanged, or a plain value that they name in their class or file. Functions of
    torch, and those of transformers outside its modeling files, are taken as they are named there: what they call themselves is
    not looked at.
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
                if isinstance(held, (types.FunctionType, types.MethodType, property, *_PLAIN)):
                    attributes[name] = None
                    waiting.append(held.fget if isinstance(held, property) else held)
            elif callable(held) or isinstance(held, _PLAIN):
                spaces.setdefault(id(space), (space, {}))[1][name] = None
                waiting.append(held)
    return list(attributes), [(space, list(names)) for space, names in spaces.values()]


def _plain(value: Any) -> types.FunctionType | None:
    """The function of Python that is called where `value` is, if there is one."""
    while isinstance(value, (functools.partial, types.MethodType)):
        value = value.func if isinstance(value, functools.partial) else value.__func__
    return value if isinstance(value, types.FunctionType) else None


def _class_names(kind: type) -> set[str]:
    return {name for base in kind.__mro__ for name in vars(base)}


def captured(function: types.FunctionType) -> Iterator[Any]:
    """What a function made within another one, by a decorator say, keeps of that."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not there yet
            continue


def is_of_library(function: types.FunctionType) -> bool:
    """Whether it is one of torch or transformers, or of what hangs hooks on their models."""
    return str(function.__globals__.get("__name__", "")).partition(".")[0] in _LIBRARIES


#: Packages whose hooks keep what is no user's.
_LIBRARIES = {"torch", "transformers", "accelerate", "peft", "decoders"}


def _looked_into(function: types.FunctionType) -> bool:
    module = str(function.__globals__.get("__name__", ""))
    package = module.partition(".")[0]
    return package != "torch" and (package != "transformers" or module.startswith("transformers.models."))


def global_names(code: types.CodeType) -> Iterator[str]:
    """The names of globals and attributes in a function's code, and in that of functions within."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from global_names(constant)
