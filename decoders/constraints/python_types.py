"""JSON schemas of Python types, patterns of plain types, and the values of types that list them (``Literal``, ``Enum``)."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import operator
import re
import sys
import types
import typing
from collections.abc import Iterator
from contextlib import suppress
from datetime import date, datetime, time
from enum import Enum, EnumMeta
from typing import Any

from ..common import library
from ..errors import GrammarError, shortened
from .patterns.rust import in_ecma


def has_fields(value: Any) -> bool:
    """Whether `value` is a Pydantic model, TypedDict or dataclass."""
    from pydantic import BaseModel

    if not isinstance(value, type) or typing.get_origin(value) is not None:
        return False
    return issubclass(value, BaseModel) or dataclasses.is_dataclass(value) or hasattr(value, "__required_keys__")


def listed(value: Any) -> list[str] | None:
    """The values of a Literal or an Enum as texts. None for other types, or if a value is not a str, bool, int, float or None."""
    if typing.get_origin(value) is typing.Literal:
        values = list(typing.get_args(value))
    elif isinstance(value, EnumMeta):
        values = list(value)
    else:
        return None
    values = [each.value if isinstance(each, Enum) else each for each in values]
    plain = values and all(each is None or isinstance(each, (str, bool, int, float)) for each in values)
    return [str(each) for each in values] if plain else None


_DAY, _CLOCK = library.read("iso_date"), "([0-1][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]"
#: The patterns of plain types' values, as Python writes and reads them.
_PATTERNS = {
    int: "[+-]?(0|[1-9][0-9]*)",
    float: r"[+-]?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?",
    bool: "True|False",
    str: r'"(?:[^"\\\x00-\x1F]|\\(?:["\\bfnrt]|u[0-9A-Fa-f]{4}))*"',  # strings that JSON and Python read alike
    date: _DAY,
    time: _CLOCK,
    datetime: f"{_DAY} {_CLOCK}",
    types.NoneType: "None",
}

#: The kinds of arguments that can be given by name.
_BY_NAME = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY


def pattern_of(value: Any) -> str | None:
    """The pattern of a plain type's values in Python's notation, or of a union of plain types. None for other types."""
    if typing.get_origin(value) in (typing.Union, types.UnionType):
        arms = [pattern_of(arm) for arm in typing.get_args(value)]
        return None if None in arms else "|".join(f"(?:{arm})" for arm in arms)
    if (texts := listed(value)) is not None:
        return "|".join(map(re.escape, texts))
    return _PATTERNS.get(value) if isinstance(value, type) else None


def schema_of(value: Any) -> dict[str, Any]:
    """The JSON schema that Pydantic generates for a type, or for an object with the arguments of a function, by name.

    Raises:
        GrammarError: Pydantic has no schema for the type, a pattern has another meaning in ECMA-262 and cannot be translated, or an
            argument has no annotation or no name in calls.
    """
    from pydantic import PydanticUserError, TypeAdapter

    try:
        if inspect.isroutine(value):
            _check_arguments(value)
        adapter = TypeAdapter(readable(value))
        schema = translated(adapter.json_schema(), adapter.core_schema)
    except (PydanticUserError, TypeError, NameError, RecursionError) as error:
        why = str(error).split("\n")[0]
        if isinstance(error, RecursionError):
            why = "it refers to itself, which before Python 3.12 only a typing_extensions.TypedDict may, or it is nested too deeply"
        raise GrammarError(f"{shortened(repr(value))} has no JSON schema: {why}", "type") from error
    return _anchored(schema, set(_terms(value, {})))


def _check_arguments(function: Any) -> None:
    """Raises TypeError if an object cannot hold the arguments of `function`."""
    try:
        arguments = inspect.signature(function).parameters
    except ValueError:
        raise TypeError("its arguments are not known") from None
    for name, argument in arguments.items():
        if argument.annotation is argument.empty or argument.kind not in _BY_NAME:
            raise TypeError(f"argument {name!r} needs an annotation and a name in calls")


def _terms(value: Any, seen: dict[int, Any]) -> Iterator[str]:
    """Yields the pattern of each outlines term that the type `value` is or contains, for example as the type of a field."""
    dsl = sys.modules.get("outlines.types.dsl")  # without outlines imported, no value is a term
    if dsl is None or id(value) in seen:
        return
    seen[id(value)] = value  # kept alive, because ids of freed objects are reused
    if isinstance(value, dsl.Term):
        yield dsl.to_regex(value)
    inner = list(typing.get_args(value))
    if has_fields(value):
        fields = getattr(value, "model_fields", None)
        with suppress(NameError):  # the annotation names something local to a function
            inner += (
                [field.annotation for field in fields.values()] if fields else typing.get_type_hints(value).values()
            )
    for each in inner:
        yield from _terms(each, seen)


def _anchored(schema: Any, patterns: set[str]) -> Any:
    """`schema` with `patterns` anchored to the whole text, because outlines writes them without anchors."""
    return (
        _replaced(schema, {pattern: f"^(?:{pattern})$" for pattern in patterns}, of_keys=False) if patterns else schema
    )


_NO_SCHEMAS = ("metadata", "serialization", "default", "function")


def translated(schema: Any, core_schema: Any) -> Any:
    """Pydantic's `schema` of a type, with the patterns of its `core_schema` translated to ECMA-262.

    Raises:
        GrammarError: a pattern has another meaning in ECMA-262 and cannot be translated.
    """
    patterns = {pattern: in_ecma(pattern) for pattern in _patterns(core_schema)}
    return _replaced(schema, patterns) if patterns else schema


def _patterns(core_schema: Any) -> set[str]:
    """The patterns in `core_schema` for Rust's engine; none if the schema selects Python's engine, whose syntax is like ECMA-262."""
    patterns: set[str] = set()
    waiting = [core_schema]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            if node.get("regex_engine") == "python-re":
                return set()
            if node.get("type") == "str" and isinstance(pattern := node.get("pattern"), str):
                patterns.add(pattern)
            waiting += [part for name, part in node.items() if name not in _NO_SCHEMAS]
        elif isinstance(node, (list, tuple)):
            waiting += node
    return patterns


def _replaced(schema: Any, patterns: dict[str, str], of_keys: bool = True) -> Any:
    """`schema` with patterns replaced as `patterns` says (old pattern → new pattern); if `of_keys`, also in ``patternProperties``."""
    if isinstance(schema, list):
        return [_replaced(part, patterns, of_keys) for part in schema]
    if not isinstance(schema, dict):
        return schema
    new = {key: _replaced(part, patterns, of_keys) for key, part in schema.items()}
    if new.get("type") == "string" and new.get("pattern") in patterns:
        new["pattern"] = patterns[new["pattern"]]
    if of_keys and isinstance(keys := new.get("patternProperties"), dict) and not patterns.keys().isdisjoint(keys):
        new["patternProperties"] = {patterns.get(key, key): part for key, part in keys.items()}
        new.setdefault("additionalProperties", False)  # Pydantic accepts no other keys, but its schema does not say so
    return new


def readable(kind: Any) -> Any:
    """`kind` in a form that Pydantic reads: before Python 3.12, typing_extensions' TypedDicts replace typing's, except in classes.

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
        marked = typing.get_origin(part) in (Required, NotRequired)  # `typing` overlooks them in strings
        needed = typing.get_origin(part) is Required if marked else name in kind.__required_keys__
        inner = readable(typing.get_args(part)[0] if marked else part)
        fields[name] = Required[inner] if needed else NotRequired[inner]
    typed_dict: Any = TypedDict(kind.__name__, fields)  # type: ignore[misc]  # fields are known at run time only
    typed_dict.__doc__ = kind.__doc__
    return typed_dict
