"""TypedDicts of ``typing`` as those of ``typing_extensions``, which are the ones that Pydantic reads before Python 3.12."""

from __future__ import annotations

import functools
import operator
import sys
import types
import typing
from typing import Any


def readable(kind: Any) -> Any:
    """`kind`, with every TypedDict in it that is not inside of another class as Pydantic reads it.

    Raises:
        NameError: a TypedDict names a type that is not there. RecursionError: it refers to itself.
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
        marked = typing.get_origin(part) in (Required, NotRequired)  # as strings, they have escaped `typing`
        needed = typing.get_origin(part) is Required if marked else name in kind.__required_keys__
        inner = readable(typing.get_args(part)[0] if marked else part)
        fields[name] = Required[inner] if needed else NotRequired[inner]
    typed_dict: Any = TypedDict(kind.__name__, fields)  # type: ignore[misc]  # fields are known at run time only
    typed_dict.__doc__ = kind.__doc__
    return typed_dict
