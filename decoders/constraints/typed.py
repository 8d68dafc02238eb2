"""Python types with conditions that JSON Schema cannot express, such as validators, keys that are not strings, digits of decimals."""

from __future__ import annotations

import inspect
import json
import re
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import SchemaValidator, core_schema

from ..errors import GrammarError, shortened
from .base import Language
from .python_types import readable, translated
from .schemas.formats import FORMATS
from .specs import JsonSchema

_WARNING = "Conditions beyond the type's schema, such as validators, are left to the validation of the finished text."

#: Kinds of Pydantic's core schemas, each with the conditions (keys) that its JSON schema covers. If a core schema has another kind or
#: condition, perhaps from a later version of Pydantic, the type itself validates the finished text.
_TOLD: dict[str, frozenset[str]] = {
    kind: frozenset(conditions.split())
    for kind, conditions in {
        "any": "", "none": "", "bool": "", "int": "gt ge lt le multiple_of", "float": "gt ge lt le",
        "str": "min_length max_length pattern", "bytes": "min_length", "date": "", "time": "", "datetime": "",
        "uuid": "", "literal": "expected", "enum": "members sub_type missing", "list": "items_schema min_length max_length",
        "tuple": "items_schema variadic_item_index min_length max_length", "named-tuple": "fields", "named-tuple-field": "name schema",
        "dict": "keys_schema values_schema min_length max_length", "nullable": "schema", "union": "choices mode auto_collapse",
        "tagged-union": "choices discriminator", "default": "schema default default_factory default_factory_takes_data on_error",
        "json-or-python": "json_schema python_schema", "definitions": "schema definitions", "definition-ref": "schema_ref",
        "custom-error": "schema", "model": "schema root_model config", "model-fields": "fields model_name extras_schema",
        "model-field": "schema validation_alias", "typed-dict": "fields extras_schema total config",
        "typed-dict-field": "schema required validation_alias", "dataclass": "schema fields config",
        "dataclass-args": "dataclass_name fields", "dataclass-field": "name schema validation_alias",
        "call": "arguments_schema function", "arguments": "arguments_schema",
    }.items()
}  # fmt: skip
#: Keys of core schemas that do not restrict values, or whose restriction the JSON schema always covers.
_IDLE = frozenset((
    "type", "ref", "metadata", "serialization", "strict", "cls", "cls_name", "generic_origin", "frozen", "slots",
    "computed_fields", "extra_behavior", "title", "revalidate_instances", "from_attributes", "custom_error_type",
    "custom_error_message", "custom_error_context", "fail_fast", "kw_only", "collect_init_only", "init_only",
    "serialization_alias", "serialization_exclude", "serialization_exclude_if", "function_name", "return_schema",
    "extra_fields_behavior", "typed_dict_total", "loc_by_alias", "str_min_length", "str_max_length", "hide_input_in_errors",
    "cache_strings", "validation_error_cause", "coerce_numbers_to_str", "regex_engine", "validate_by_name",
    "serialize_by_alias", "ser_json_timedelta", "ser_json_temporal", "ser_json_bytes", "ser_json_inf_nan",
    "polymorphic_serialization",
))  # fmt: skip
#: Other keys of core schemas, each with the value at which it restricts nothing. A key with the value None restricts nothing, either.
_DEFAULTS = {
    "init": True, "allow_inf_nan": True, "validate_by_alias": True, "microseconds_precision": "truncate",
    "val_json_bytes": "utf8", "custom_init": False, "post_init": False, "strip_whitespace": False, "to_lower": False, "to_upper": False,
    "ascii_only": False, "validate_default": False, "str_strip_whitespace": False, "str_to_lower": False, "str_to_upper": False,
}  # fmt: skip
#: Keys of core schemas that hold no nested schema for a part of the value.
_NO_PARTS = frozenset((
    "metadata", "serialization", "default", "config", "function", "python_schema", "expected", "members", "discriminator",
    "computed_fields", "return_schema", "custom_error_context",
))  # fmt: skip
#: Matches classes that may be narrower in Rust than in ECMA-262: ``\s``, and negated classes, as Rust's ``\d`` and ``\w`` are wider.
_NARROWER = re.compile(r"\\[DWSsP]|\[\^|--|~~|\[:\^")


@dataclass(frozen=True)
class OfType(JsonSchema):
    """JSON texts of the values of a Python type; the type itself validates the finished text.

    Attributes:
        kind: the type, which Pydantic can validate.
    """

    kind: Any = field(default=None, repr=False)

    @cached_property
    def text(self) -> str:
        """The schema as JSON, plus conditions that Pydantic leaves out of its schemas."""
        return json.dumps(completed(self.schema, self.kind))

    @property
    def key(self) -> str:
        return f"{super().key} {_identity(self.kind)}"

    def language(self) -> Language:
        base = super().language()
        # The language keeps the type alive: cache keys contain the type's id, which must not be reused.
        return replace(base, warnings=(*base.warnings, _WARNING), whole=partial(_judge, base.whole, self.kind))


def _judge(whole: Callable[[str], None] | None, kind: Any, text: str) -> None:
    """Raises GrammarError if `text` is invalid under the schema (`whole` raises), or is not a value of the type `kind`."""
    if whole is not None:
        whole(text)
    try:
        schema = TypeAdapter(readable(kind)).core_schema
        SchemaValidator(_uncalled(schema)).validate_json(text)
        return
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        path = "$" + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])
        why = f"{path}: {first['msg']}"
    except Exception as error:  # a validator may raise anything
        why, path = f"{type(error).__name__}: {error}", "$"
    raise GrammarError(f"the text is not a valid {_called(kind)}: {why}", path=path)


def asks_more(kind: Any) -> bool:
    """Whether a type may have conditions that its JSON schema does not cover."""
    return any(map(_more, _nodes(TypeAdapter(readable(kind)).core_schema)))


def _more(node: dict[str, Any]) -> bool:
    conditions = _TOLD.get(node["type"])
    if conditions is None or _conditions(node) - conditions or _conditions(node.get("config") or {}):
        return True
    if (node.get("metadata") or {}).get("pydantic_js_annotation_functions"):  # a custom JSON schema
        return True
    match node["type"]:
        case "str":
            pattern = node.get("pattern") or ""  # a compiled pattern may have flags
            return not isinstance(pattern, str) or _NARROWER.search(pattern) is not None
        case "literal":
            return not all(map(_is_json, node["expected"]))
        case "enum":
            return not all(_is_json(member.value) for member in node["members"])
        case "tuple":
            return node.get("variadic_item_index") not in (None, len(node["items_schema"]) - 1)
        case "dict":
            return node.get("keys_schema", {}).get("type", "str") not in ("str", "any")
        case "tagged-union":
            return callable(node["discriminator"])
        case _:
            return not isinstance(node.get("validation_alias", ""), str)


def _conditions(node: dict[str, Any]) -> set[str]:
    """The keys of `node`, a core schema or its config, that may restrict values."""
    return {name for name, value in node.items() if value is not None and value != _DEFAULTS.get(name)} - _IDLE


def _is_json(value: Any) -> bool:
    """Whether `value` is None, or exactly a str, int, bool or float."""
    return value is None or type(value) in (str, int, bool, float)


def _nodes(schema: Any) -> Iterator[dict[str, Any]]:
    waiting = [schema]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            # Dicts that are no schemas map names to fields, and a field may be named "type".
            is_schema = isinstance(node.get("type"), str)
            if is_schema:
                yield node
            waiting += [part for name, part in node.items() if not (is_schema and name in _NO_PARTS)]
        elif isinstance(node, (list, tuple)):
            waiting += node


def _uncalled(schema: Any) -> Any:
    """`schema` for validating the arguments of a function without calling the function."""
    if schema["type"] == "definitions":
        return {**schema, "schema": _uncalled(schema["schema"])}
    if schema["type"] != "call":
        return schema
    return {"type": "call", "arguments_schema": schema["arguments_schema"], "function": lambda *_, **__: None}


def _called(kind: Any) -> str:
    return shortened(kind.__name__ if isinstance(kind, type) or inspect.isroutine(kind) else str(kind))


def _identity(kind: Any) -> str:
    """A text that is equal for equal types, such as two ``list[int]``, and differs for different types of the same name."""
    if arguments := typing.get_args(kind):
        return f"{typing.get_origin(kind)}[{', '.join(map(_identity, arguments))}]"
    return f"{kind!r}@{id(kind)}" if isinstance(kind, type) else repr(kind)


_UUID = "^[0-9A-Fa-f]{8}-[0-9A-Fa-f]{4}-%d[0-9A-Fa-f]{3}-[89ABab][0-9A-Fa-f]{3}-[0-9A-Fa-f]{12}$"
_UUIDS = {f"uuid{version}": _UUID % version for version in range(1, 9)}
_NAIVE = rf"^(?:{FORMATS['date']})T(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{{1,9}})?$"
#: Greatest number of digits that the schema limits, because floats hold 15 digits; the type itself checks larger limits.
_DIGITS = 15


def completed(schema: Any, kind: Any) -> Any:
    """`schema` plus conditions of the type `kind` that Pydantic drops. schema: the result of :func:`.python_types.schema_of`."""
    adapter = TypeAdapter(readable(kind))
    new = translated(adapter.json_schema(schema_generator=_Schemas), adapter.core_schema)
    return _completed(new, schema)


def _completed(new: Any, old: Any) -> Any:
    """The schema `new` with patterns anchored as in the schema `old`, and with a pattern for each UUID format (``uuid4``)."""
    if isinstance(new, list):
        same = isinstance(old, list) and len(old) == len(new)
        return [_completed(*pair) for pair in zip(new, old if same else [None] * len(new), strict=True)]
    if not isinstance(new, dict):
        return old if old == f"^(?:{new})$" else new
    whole = {key: _completed(part, old.get(key) if isinstance(old, dict) else None) for key, part in new.items()}
    if whole.get("type") == "string" and (pattern := _UUIDS.get(str(whole.get("format")))):
        del whole["format"]
        whole["pattern"] = pattern
    return whole


class _Schemas(GenerateJsonSchema):
    """Pydantic's JSON schemas, plus conditions that Pydantic leaves out."""

    def datetime_schema(self, schema: core_schema.DatetimeSchema) -> dict[str, Any]:
        """The schema of a date with a time; without a UTC offset if the type forbids offsets."""
        if schema.get("tz_constraint") == "naive":
            return {"type": "string", "pattern": _NAIVE}
        return super().datetime_schema(schema)

    def decimal_schema(self, schema: core_schema.DecimalSchema) -> dict[str, Any]:
        """The schema of a number, or of a number in a string; only of a number if the type has bounds, as no keyword bounds strings."""
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
    digits = places if places is not None else most
    fraction = "" if digits == 0 else rf"(?:\.[0-9]{'+' if digits is None else f'{{1,{digits}}}'})?"
    return f"^-?{integer}{fraction}$"
