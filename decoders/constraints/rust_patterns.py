"""Patterns of Pydantic's types, which are those of Rust's ``regex``, in schemas, whose patterns are those of ECMA-262."""

from __future__ import annotations

from typing import Any

from .patterns.rust import in_ecma

_NO_SCHEMAS = ("metadata", "serialization", "default", "function")


def translated(schema: Any, core_schema: Any) -> Any:
    """`schema`, which Pydantic has made of a type, with the patterns of its `core_schema` as ECMA-262 has them.

    Raises:
        GrammarError: a pattern that ECMA-262 reads as something else, and cannot say.
    """
    patterns = {pattern: in_ecma(pattern) for pattern in _patterns(core_schema)}
    return _replaced(schema, patterns) if patterns else schema


def _patterns(core_schema: Any) -> set[str]:
    """The patterns that Rust matches; none where some node asks for Python's engine, which reads them as ECMA-262 does, about."""
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


def _replaced(schema: Any, patterns: dict[str, str]) -> Any:
    """`schema` with other `patterns`: of strings, and of the keys of objects."""
    if isinstance(schema, list):
        return [_replaced(part, patterns) for part in schema]
    if not isinstance(schema, dict):
        return schema
    new = {key: _replaced(part, patterns) for key, part in schema.items()}
    if new.get("type") == "string" and new.get("pattern") in patterns:
        new["pattern"] = patterns[new["pattern"]]
    if isinstance(keys := new.get("patternProperties"), dict) and not patterns.keys().isdisjoint(keys):
        new["patternProperties"] = {patterns.get(key, key): part for key, part in keys.items()}
        new.setdefault("additionalProperties", False)  # Pydantic takes no other keys, and leaves that out
    return new
