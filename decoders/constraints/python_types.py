"""Python types: whether their values are written as JSON, and the values of types that list them (``Literal``, ``Enum``)."""

from __future__ import annotations

import dataclasses
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
