"""Python types: whether their values are written as JSON, and the values of types that list them (``Literal``, ``Enum``)."""

from __future__ import annotations

import dataclasses
import functools
import operator
import sys
import types
import typing
from enum import Enum, EnumMeta
from typing import Any

_CONTAINERS = (dict, list, tuple, set, frozenset)


def is_json(value: Any) -> bool:
    """Whether values of the type `value` are written as JSON, because the type has parts or conditions (``Annotated``)."""
    origin = typing.get_origin(value)
    if origin in (typing.Union, types.UnionType):
        return any(is_json(arm) for arm in typing.get_args(value))
    if origin is not None:
        return origin is not typing.Literal
    return value in _CONTAINERS if isinstance(value, type) and not has_fields(value) else has_fields(value)


def has_fields(value: Any) -> bool:
    """Whether `value` is a Pydantic model, TypedDict or dataclass."""
    from pydantic import BaseModel

    if not isinstance(value, type) or typing.get_origin(value) is not None:
        return False
    return issubclass(value, BaseModel) or dataclasses.is_dataclass(value) or hasattr(value, "__required_keys__")


def listed(value: Any) -> list[str] | None:
    """The values of a Literal or an Enum as texts. None for other types, or if a value is no str, bool, int, float or None."""
    if typing.get_origin(value) is typing.Literal:
        values = list(typing.get_args(value))
    elif isinstance(value, EnumMeta):
        values = list(value)
    else:
        return None
    values = [each.value if isinstance(each, Enum) else each for each in values]
    plain = values and all(each is None or isinstance(each, (str, bool, int, float)) for each in values)
    return [str(each) for each in values] if plain else None


def readable(kind: Any) -> Any:
    """`kind` in a form that Pydantic reads: before Python 3.12, TypedDicts are replaced, except those inside other classes.

    Raises:
        NameError: a TypedDict names an unknown type. RecursionError: a TypedDict refers to itself.
    """
    if sys.version_info >= (3, 12):
        return kind
    if typing.is_typeddict(kind) and type(kind).__module__ == "typing":
        return _modern(kind)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if not arguments or origin is typing.Literal:
        return kind
    if origin is typing.Annotated:
        return typing.Annotated[(readable(arguments[0]), *kind.__metadata__)]
    inner = tuple(map(readable, arguments))
    if inner == arguments:
        return kind
    if origin in (typing.Union, types.UnionType):
        return functools.reduce(operator.or_, inner)
    return kind.copy_with(inner) if hasattr(kind, "copy_with") else origin[inner]


def _modern(kind: Any) -> Any:
    from typing import NotRequired, Required

    from typing_extensions import TypedDict

    fields = {}
    for name, part in typing.get_type_hints(kind, include_extras=True).items():
        marked = typing.get_origin(part) in (Required, NotRequired)  # `typing` misses both in string annotations
        needed = typing.get_origin(part) is Required if marked else name in kind.__required_keys__
        inner = readable(typing.get_args(part)[0] if marked else part)
        fields[name] = Required[inner] if needed else NotRequired[inner]
    typed_dict: Any = TypedDict(kind.__name__, fields)  # type: ignore[misc]  # fields are known at run time only
    typed_dict.__doc__ = kind.__doc__
    return typed_dict
