"""Types whose values meet conditions that no schema tells: validators, keys that are no texts, digits of decimals, addresses."""

from __future__ import annotations

import inspect
import json
import re
import typing
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from ..errors import GrammarError, shortened
from .base import Language
from .json_spec import JsonSchema
from .typed_dicts import readable

_WARNING = "What the type asks for beyond its schema (validators, say) is left to the validation of the finished text."

#: Of Pydantic's core schemas, those whose JSON schema says all that a value must meet, each with the conditions that it says.
#: A text of any other kind, or under any other condition, is judged by the type: so what a later Pydantic adds is.
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
#: Names in core schemas that no value has to meet, or that JSON schemas always tell.
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
#: Values of others by which they ask for nothing; None is one for all.
_DEFAULTS = {
    "init": True, "allow_inf_nan": True, "validate_by_alias": True, "microseconds_precision": "truncate",
    "val_json_bytes": "utf8", "custom_init": False, "post_init": False, "strip_whitespace": False, "to_lower": False, "to_upper": False,
    "ascii_only": False, "validate_default": False, "str_strip_whitespace": False, "str_to_lower": False, "str_to_upper": False,
}  # fmt: skip
#: What else stands in core schemas and holds no schema of the JSON that is read.
_NO_PARTS = frozenset((
    "metadata", "serialization", "default", "config", "function", "python_schema", "expected", "members", "discriminator",
    "computed_fields", "return_schema", "custom_error_context",
))  # fmt: skip
#: Classes of Rust's patterns are wider than those of ECMA-262, so what is outside of them is narrower.
_NARROWER = re.compile(r"\\[DWSsP]|\[\^|--|~~|\[:\^")


@dataclass(frozen=True)
class OfType(JsonSchema):
    """JSON of a Python type; the finished text is judged by the type itself.

    Attributes:
        kind: the type, as Pydantic knows it.
    """

    kind: Any = field(default=None, repr=False)

    @cached_property
    def text(self) -> str:
        """The schema as JSON, with what Pydantic leaves out of it."""
        from .type_schemas import completed

        return json.dumps(completed(self.schema, self.kind))

    @property
    def key(self) -> str:
        return f"{super().key} {_identity(self.kind)}"

    def language(self) -> Language:
        base = super().language()
        judge = _Checker(base, self.kind)
        return replace(base, warnings=(*base.warnings, _WARNING), whole=judge)


@dataclass(frozen=True)
class _Checker:
    """Refuses texts that the language has and the type has not. Keeps the type, whose identity is in keys, alive."""

    base: Language
    kind: Any

    def __call__(self, text: str) -> None:
        from pydantic import TypeAdapter, ValidationError
        from pydantic_core import SchemaValidator

        if self.base.whole is not None:
            self.base.whole(text)
        try:
            schema = TypeAdapter(readable(self.kind)).core_schema
            SchemaValidator(_uncalled(schema)).validate_json(text)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            path = "$" + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])
            why = f"{path}: {first['msg']}"
        except Exception as error:  # a validator may raise anything
            why, path = f"{type(error).__name__}: {error}", "$"
        else:
            return
        raise GrammarError(f"the text is no {_called(self.kind)}: {why}", path=path)


def asks_more(kind: Any) -> bool:
    """Whether values of a type meet conditions that its JSON schema does not tell, as far as is known."""
    from pydantic import TypeAdapter

    return any(map(_more, _nodes(TypeAdapter(readable(kind)).core_schema)))


def _more(node: dict[str, Any]) -> bool:
    conditions = _TOLD.get(node["type"])
    if conditions is None or _conditions(node) - conditions or _conditions(node.get("config") or {}):
        return True
    if (node.get("metadata") or {}).get("pydantic_js_annotation_functions"):  # the schema is another one's
        return True
    match node["type"]:
        case "str":
            pattern = node.get("pattern") or ""  # a compiled one may have flags
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
    """Names by which `node`, or the config of one, may ask for something."""
    return {name for name, value in node.items() if value is not None and value != _DEFAULTS.get(name)} - _IDLE


def _is_json(value: Any) -> bool:
    """Whether a text in JSON stands for `value` itself."""
    return value is None or type(value) in (str, int, bool, float)


def _nodes(schema: Any) -> Iterator[dict[str, Any]]:
    waiting = [schema]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            is_schema = isinstance(node.get("type"), str)  # else fields by name, one of which may be called "type"
            if is_schema:
                yield node
            waiting += [part for name, part in node.items() if not (is_schema and name in _NO_PARTS)]
        elif isinstance(node, (list, tuple)):
            waiting += node


def _uncalled(schema: Any) -> Any:
    """`schema`; if it is that of a function, the function is not called with the arguments that are read."""
    if schema["type"] == "definitions":
        return {**schema, "schema": _uncalled(schema["schema"])}
    if schema["type"] != "call":
        return schema
    return {"type": "call", "arguments_schema": schema["arguments_schema"], "function": lambda *_, **__: None}


def _called(kind: Any) -> str:
    return shortened(kind.__name__ if isinstance(kind, type) or inspect.isroutine(kind) else str(kind))


def _identity(kind: Any) -> str:
    """Tells types apart that have one name; the same for equal ones such as two of ``list[int]``."""
    if arguments := typing.get_args(kind):
        return f"{typing.get_origin(kind)}[{', '.join(map(_identity, arguments))}]"
    return f"{kind!r}@{id(kind)}" if isinstance(kind, type) else repr(kind)
