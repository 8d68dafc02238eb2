"""Grammars to measure, as people use them, each with a text that conforms to it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from decoders.constraints import JsonSchema, Language, Spec, spec_of_library


@dataclass(frozen=True)
class Subject:
    """A grammar.

    Attributes:
        name: the grammar's name in tables.
        text: a text that conforms to the grammar.
        spec: creates the grammar's specification.
    """

    name: str
    text: str
    spec: Callable[[], Spec]

    def language(self) -> Language:
        """The language of the grammar. It is computed in every call, because this time is part of the measurement."""
        return self.spec().language()


def subjects() -> tuple[Subject, ...]:
    """All grammars, in the order of tables."""
    return (
        _schema("flat object", _object(name=_STRING, age=_INTEGER, email=_STRING, active={"type": "boolean"}, score=_NUMBER),
                {"name": "Ada Lovelace", "age": 36, "email": "ada@example.org", "active": True, "score": 9.75}),
        _schema("50 keys", _object(**{f"field_{i}": (_STRING, _INTEGER)[i % 2] for i in range(50)}),
                {f"field_{i}": (f"value {i}", i)[i % 2] for i in range(50)}),
        _schema("nested arrays", _object(orders=_list(_object(id=_INTEGER, lines=_list(_object(sku=_STRING, count=_INTEGER))))),
                {"orders": [{"id": i, "lines": [{"sku": f"A-{i}{j}", "count": j} for j in range(3)]} for i in range(3)]}),
        _schema("enum of 1000", _object(city={"enum": [f"place {i * 7919 % 100_003}" for i in range(1000)]}, visits=_INTEGER),
                {"city": f"place {500 * 7919 % 100_003}", "visits": 12}),
        _schema("maxLength 120, 400", _object(title={"type": "string", "maxLength": 120},
                                              summary={"type": "string", "maxLength": 400}),
                {"title": "On the order of things", "summary": "What comes first is read first, and so on to the end. " * 4}),
        _schema("patterns", _object(phone=_pattern("^[0-9]{3}-[0-9]{3}-[0-9]{4}$"), day=_pattern("^[0-9]{4}-[0-9]{2}-[0-9]{2}$"),
                                    code=_pattern("^[A-Z]{2,5}(-[A-Z0-9]{1,8}){0,3}$")),
                {"phone": "555-010-1234", "day": "2024-02-29", "code": "EN-GB-OXENDICT"}),
        _schema("number ranges", _object(percent={"type": "integer", "minimum": 0, "maximum": 100},
                                         year={"type": "integer", "minimum": 1900, "maximum": 2099},
                                         change={"type": "integer", "minimum": -5000, "maximum": 12345}),
                {"percent": 42, "year": 1984, "change": -377}),
        _schema("recursive tree", {"$ref": "#/$defs/node", "$defs": {"node": _object(
                    value=_INTEGER, children=_list({"$ref": "#/$defs/node"}))}},
                {"value": 1, "children": [{"value": 2, "children": []}, {"value": 3, "children": [
                    {"value": 4, "children": []}]}]}),
        Subject("iso_date", "2024-02-29", lambda: spec_of_library("iso_date")),
        Subject("json", '{"a": [1, 2.5e3, null, true], "b": {"c": "text \\u00e9", "d": []}}',
                lambda: spec_of_library("json")),
    )  # fmt: skip


_STRING, _INTEGER, _NUMBER = {"type": "string"}, {"type": "integer"}, {"type": "number"}


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


def _list(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


def _pattern(pattern: str) -> dict[str, Any]:
    return {"type": "string", "pattern": pattern}


def _schema(name: str, schema: dict[str, Any], value: Any) -> Subject:
    return Subject(name, json.dumps(value), lambda: JsonSchema(schema))
