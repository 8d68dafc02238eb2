"""The types that the properties of an object may have, read from a schema: every type that the schema allows, perhaps more."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any
from urllib.parse import unquote

#: The types of JSON; integers and numbers count as one type.
KINDS = frozenset(["null", "boolean", "number", "string", "array", "object"])
#: The key of :class:`Kinds` for all properties that no schema declares.
UNDECLARED = ""
#: Greatest depth of nested schemas that is read.
_DEPTH = 16


def kind_of(value: Any) -> str:
    """The type of a value of JSON."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if isinstance(value, int | float):
        return "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


class Kinds:
    """``kinds[name]``: the types that the property `name` may have in objects that a schema allows.

    Args:
        text: the schema, as JSON.

    Attributes:
        names: the names under every ``properties`` of the schema, inner schemas included.
    """

    def __init__(self, text: str) -> None:
        self._root = json.loads(text)
        self.names = dict.fromkeys(name for name in _names(self._root) if name != UNDECLARED)
        self._known: dict[tuple[int, str | None, int], frozenset[str]] = {}
        own = self._root if isinstance(self._root, dict) else {}
        # References are followed only if no inner schema has an identifier, because a reference would be relative to it.
        self._follows = all(text.count(f'"{key}":') == (key in own) for key in ("$id", "id"))

    def __getitem__(self, name: str) -> frozenset[str]:
        return self._of(self._root, name if name in self.names else UNDECLARED, _DEPTH) or KINDS

    def _of(self, schema: Any, name: str | None, depth: int) -> frozenset[str]:
        """The types of the property `name` in objects that `schema` allows; if `name` is None, of the allowed values."""
        if schema is False:
            return frozenset()
        if not isinstance(schema, dict) or not depth:
            return KINDS
        key = (id(schema), name, depth)
        if key not in self._known:
            self._known[key] = self._property(schema, name, depth) if name is not None else self._value(schema, depth)
        return self._known[key]

    def _property(self, schema: dict[str, Any], name: str, depth: int) -> frozenset[str]:
        if "$ref" in schema:  # old drafts ignore keywords beside $ref
            return self._of(self._follow(schema["$ref"]), name, depth - 1)
        allowed = KINDS
        properties = schema.get("properties")
        if isinstance(properties, dict) and name != UNDECLARED and name in properties:
            allowed &= self._of(properties[name], None, depth - 1)
        elif "additionalProperties" in schema and "patternProperties" not in schema:
            allowed &= self._of(schema["additionalProperties"], None, depth - 1)
        for part in self._parts(schema):
            allowed &= frozenset[str]().union(*(self._of(each, name, depth - 1) for each in part))
        return allowed

    def _value(self, schema: dict[str, Any], depth: int) -> frozenset[str]:
        if "$ref" in schema:
            return self._of(self._follow(schema["$ref"]), None, depth - 1)
        allowed = KINDS
        if "type" in schema:
            names = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
            allowed &= {"number" if name == "integer" else name for name in names if isinstance(name, str)}
        if "const" in schema:
            allowed &= {kind_of(schema["const"])}
        if isinstance(schema.get("enum"), list):
            allowed &= {kind_of(value) for value in schema["enum"]}
        for part in self._parts(schema):
            allowed &= frozenset[str]().union(*(self._of(each, None, depth - 1) for each in part))
        return allowed

    def _parts(self, schema: dict[str, Any]) -> list[list[Any]]:
        """Lists of schemas inside `schema`. A value that `schema` allows is valid under at least one schema of each list."""
        parts = [[each] for each in _listed(schema, "allOf")]
        return parts + [own for keyword in ("anyOf", "oneOf") if (own := _listed(schema, keyword))]

    def _follow(self, reference: Any) -> Any:
        """The schema that `reference` refers to; True, which allows every value, if `reference` is not a plain pointer."""
        if not (self._follows and isinstance(reference, str) and re.match("#(?:/|$)", reference)):
            return True
        target = self._root
        for step in unquote(reference).split("/")[1:]:
            key = step.replace("~1", "/").replace("~0", "~")
            target = target.get(key, True) if isinstance(target, dict) else True
        return target


def _names(root: Any) -> Iterator[str]:
    """The names under every ``properties`` in a schema, at any depth."""
    todo = [root]
    while todo:
        schema = todo.pop()
        if isinstance(schema, dict):
            if isinstance(schema.get("properties"), dict):
                yield from schema["properties"]
            todo += schema.values()
        elif isinstance(schema, list):
            todo += schema


def _listed(schema: dict[str, Any], keyword: str) -> list[Any]:
    given = schema.get(keyword)
    return given if isinstance(given, list) else []


@lru_cache(64)
def kinds_of(schema: str) -> Kinds:
    """The :class:`Kinds` of `schema`, a JSON text; cached."""
    return Kinds(schema)
