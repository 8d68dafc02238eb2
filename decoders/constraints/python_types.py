"""Python's types: which of them are JSON with a schema, and which list their values."""

from __future__ import annotations

import dataclasses
import sys
import types
import typing
from collections.abc import Iterator
from contextlib import suppress
from enum import Enum, EnumMeta
from typing import Any

from ..errors import GrammarError, shortened
from .rust_patterns import translated
from .typed_dicts import readable

_CONTAINERS = (dict, list, tuple, set, frozenset)


def is_json(value: Any) -> bool:
    """Whether a type has a structure, or conditions that only a schema can tell."""
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
    """The texts of a Literal or an Enum, where its values have one; None for other types."""
    if typing.get_origin(value) is typing.Literal:
        values = list(typing.get_args(value))
    elif isinstance(value, EnumMeta):
        values = list(value)
    else:
        return None
    values = [each.value if isinstance(each, Enum) else each for each in values]
    plain = values and all(each is None or isinstance(each, (str, bool, int, float)) for each in values)
    return [str(each) for each in values] if plain else None


def schema_of(value: Any) -> dict[str, Any]:
    """The JSON schema that Pydantic makes of a type.

    Raises:
        GrammarError: Pydantic makes none, or a pattern means something else in a schema.
    """
    from pydantic import PydanticUserError, TypeAdapter

    try:
        adapter = TypeAdapter(readable(value))
        schema = translated(adapter.json_schema(), adapter.core_schema)
    except (PydanticUserError, TypeError, NameError, RecursionError) as error:
        why = str(error).split("\n")[0]
        raise GrammarError(f"{shortened(repr(value))} has no JSON schema: {why}", "type") from error
    return _anchored(schema, set(_terms(value, {})))


def _terms(value: Any, seen: dict[int, Any]) -> Iterator[str]:
    """Patterns of the terms of outlines among the fields of a type, and of theirs."""
    dsl = sys.modules.get("outlines.types.dsl")  # whoever has a term has imported it
    if dsl is None or id(value) in seen:
        return
    seen[id(value)] = value  # kept alive: ids of what is gone come back
    if isinstance(value, dsl.Term):
        yield dsl.to_regex(value)
    inner = list(typing.get_args(value))
    if has_fields(value):
        fields = getattr(value, "model_fields", None)
        with suppress(NameError):  # a name of a function's inside
            inner += (
                [field.annotation for field in fields.values()] if fields else typing.get_type_hints(value).values()
            )
    for each in inner:
        yield from _terms(each, seen)


def _anchored(schema: Any, patterns: set[str]) -> Any:
    """`schema` with `patterns` as patterns of the whole text: outlines writes them such that a part may match."""
    if not patterns:
        return schema
    if isinstance(schema, list):
        return [_anchored(each, patterns) for each in schema]
    if not isinstance(schema, dict):
        return schema
    anchored = {key: _anchored(each, patterns) for key, each in schema.items()}
    if anchored.get("type") == "string" and anchored.get("pattern") in patterns:
        anchored["pattern"] = f"^(?:{anchored['pattern']})$"
    return anchored
