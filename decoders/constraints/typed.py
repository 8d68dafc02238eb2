"""JSON schemas of Python types. The types themselves validate finished texts, because they may have conditions that JSON Schema cannot
express, such as validators, keys that are no strings, digits of decimals.
"""

from __future__ import annotations

import inspect
import json
import sys
import typing
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from pydantic import PydanticUserError, TypeAdapter, ValidationError
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import SchemaValidator, core_schema

from ..errors import GrammarError, shortened
from .base import Language
from .patterns.rust import in_ecma
from .python_types import readable
from .schemas.formats import FORMATS
from .specs import JsonSchema

_WARNING = "Conditions beyond a type's schema (validators, say) are no part of the grammar: the type validates the finished text."


@dataclass(frozen=True)
class OfType(JsonSchema):
    """JSON texts of the values of a Python type; the type itself validates the finished text.

    Attributes:
        kind: the type, which Pydantic can validate. `schema` is its :func:`schema_of`.
    """

    kind: Any = field(default=None, repr=False)

    @property
    def key(self) -> str:
        return f"{super().key} {_identity(self.kind)}"

    def language(self) -> Language:
        base = super().language()
        validator = SchemaValidator(_uncalled(TypeAdapter(readable(self.kind)).core_schema))
        # The language keeps the type alive: cache keys contain the type's id, which must not be reused.
        whole = partial(_judge, base.whole, self.kind, validator)
        return replace(base, warnings=(*base.warnings, _WARNING), whole=whole)


def _judge(whole: Callable[[str], None] | None, kind: Any, validator: SchemaValidator, text: str) -> None:
    """Raises GrammarError if `text` is invalid under the schema (`whole` raises), or is no value of the type `kind`."""
    if whole is not None:
        whole(text)
    try:
        validator.validate_json(text)
        return
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        path = "$" + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])
        why = f"{path}: {first['msg']}"
    except Exception as error:  # a validator may raise anything
        why, path = f"{type(error).__name__}: {error}", "$"
    name = kind.__name__ if isinstance(kind, type) or inspect.isroutine(kind) else str(kind)
    raise GrammarError(f"the text is no {shortened(name)}: {why}", path=path)


def _uncalled(schema: Any) -> Any:
    """`schema` with a function that does nothing, in place of the function that validation would call."""
    if schema["type"] == "definitions":
        return {**schema, "schema": _uncalled(schema["schema"])}
    if schema["type"] != "call":
        return schema
    return {"type": "call", "arguments_schema": schema["arguments_schema"], "function": lambda *_, **__: None}


def _identity(kind: Any) -> str:
    """A text that is equal for equal types, such as two ``list[int]``, and differs for different types of the same name."""
    if arguments := typing.get_args(kind):
        return f"{typing.get_origin(kind)}[{', '.join(map(_identity, arguments))}]"
    return f"{kind!r}@{id(kind)}" if isinstance(kind, type) else repr(kind)


def schema_of(kind: Any) -> dict[str, Any]:
    """The JSON schema that Pydantic generates for a type, plus conditions that Pydantic leaves out.

    Raises:
        GrammarError: Pydantic has no schema for the type, or a pattern has another meaning in ECMA-262 and cannot be translated.
    """
    try:
        adapter = TypeAdapter(readable(kind))
        schema = adapter.json_schema(schema_generator=_Schemas)
    except (PydanticUserError, TypeError, NameError, RecursionError) as error:
        why = str(error).split("\n")[0]
        raise GrammarError(f"{shortened(repr(kind))} has no JSON schema: {why}", "type") from error
    patterns = _patterns(adapter.core_schema)
    return _replaced(schema, patterns) if patterns else schema


_NO_SCHEMAS = ("metadata", "serialization", "default", "function")


def _patterns(core_schema: Any) -> dict[str, str]:
    """For each pattern in `core_schema`, the pattern that means the same in a JSON schema.

    Pydantic's patterns are for Rust's engine, unless the schema selects Python's, whose syntax is like that of ECMA-262. A term of
    outlines is the whole text, but outlines writes its pattern without anchors.
    """
    dsl = sys.modules.get("outlines.types.dsl")  # without outlines imported, no type contains a term
    rust, terms, is_rust = set[str](), set[str](), True
    waiting = [core_schema]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            is_rust = is_rust and node.get("regex_engine") != "python-re"
            if node.get("type") == "str" and isinstance(pattern := node.get("pattern"), str):
                rust.add(pattern)
            if node.get("type") == "function-plain" and dsl is not None:
                owners = [getattr(each, "__self__", None) for each in node["metadata"].get("pydantic_js_functions", ())]
                terms |= {dsl.to_regex(owner) for owner in owners if isinstance(owner, dsl.Term)}
            waiting += [part for name, part in node.items() if name not in _NO_SCHEMAS]
        elif isinstance(node, (list, tuple)):
            waiting += node
    translated = {pattern: in_ecma(pattern) for pattern in rust} if is_rust else {}
    return translated | {pattern: f"^(?:{pattern})$" for pattern in terms}


def _replaced(schema: Any, patterns: dict[str, str]) -> Any:
    """`schema` with patterns replaced as `patterns` says (old pattern → new pattern), also in ``patternProperties``."""
    if isinstance(schema, list):
        return [_replaced(part, patterns) for part in schema]
    if not isinstance(schema, dict):
        return schema
    new = {key: _replaced(part, patterns) for key, part in schema.items()}
    if new.get("type") == "string" and new.get("pattern") in patterns:
        new["pattern"] = patterns[new["pattern"]]
    if isinstance(keys := new.get("patternProperties"), dict) and not patterns.keys().isdisjoint(keys):
        new["patternProperties"] = {patterns.get(key, key): part for key, part in keys.items()}
        new.setdefault("additionalProperties", False)  # Pydantic accepts no other keys, but its schema does not say so
    return new


_UUID = "^[0-9A-Fa-f]{8}-[0-9A-Fa-f]{4}-%d[0-9A-Fa-f]{3}-[89ABab][0-9A-Fa-f]{3}-[0-9A-Fa-f]{12}$"
_NAIVE = rf"^(?:{FORMATS['date']})T(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{{1,9}})?$"
#: Greatest number of digits that the schema limits, because floats hold 15 digits; the type itself checks larger limits.
_DIGITS = 15


class _Schemas(GenerateJsonSchema):
    """Pydantic's JSON schemas, plus conditions that Pydantic leaves out."""

    def uuid_schema(self, schema: core_schema.UuidSchema) -> dict[str, Any]:
        """The schema of a UUID, with the pattern of its version if the type has one."""
        version = schema.get("version")
        return super().uuid_schema(schema) if version is None else {"type": "string", "pattern": _UUID % version}

    def datetime_schema(self, schema: core_schema.DatetimeSchema) -> dict[str, Any]:
        """The schema of a date with a time; without a UTC offset if the type forbids offsets."""
        if schema.get("tz_constraint") == "naive":
            return {"type": "string", "pattern": _NAIVE}
        return super().datetime_schema(schema)

    def decimal_schema(self, schema: core_schema.DecimalSchema) -> dict[str, Any]:
        """The schema of a number, or of a number in a string. If the type has bounds, without strings: no keyword bounds them."""
        arms = super().decimal_schema(schema).get("anyOf", [])
        number = next((arm for arm in arms if arm.get("type") == "number"), {"type": "number"})
        most, places = schema.get("max_digits"), schema.get("decimal_places")
        if conditions := _counted(most, places):
            number = number | {"allOf": [conditions]}
        if any(schema.get(name) is not None for name in ("gt", "ge", "lt", "le", "multiple_of")):
            return number
        return {"anyOf": [number, {"type": "string", "pattern": _spelled(most, places)}]}


def _counted(most: int | None, places: int | None) -> dict[str, Any]:
    """Keywords for numbers of limited length. most: greatest number of digits; places: greatest number of digits after the point."""
    conditions: dict[str, Any] = {}
    if places is not None and places <= _DIGITS:
        conditions["multipleOf"] = json.loads(f"1e-{places}") if places else 1
    if most is not None and (whole := max(most - (places or 0), 0)) <= _DIGITS:
        conditions |= {"exclusiveMinimum": -(10**whole), "exclusiveMaximum": 10**whole}
    return conditions


def _spelled(most: int | None, places: int | None) -> str:
    """A pattern for strings that contain a number of limited length. Only the type itself checks the total number of digits."""
    whole = "[0-9]*" if most is None else f"[0-9]{{0,{most - (places or 0) - 1}}}"
    integer = "0" if most is not None and most <= (places or 0) else f"(?:0|[1-9]{whole})"
    behind = places if places is not None else most
    fraction = "" if behind == 0 else rf"(?:\.[0-9]{'+' if behind is None else f'{{1,{behind}}}'})?"
    return f"^-?{integer}{fraction}$"
