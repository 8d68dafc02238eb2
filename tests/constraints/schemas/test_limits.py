"""Hostile schemas end in an error that names the limit, or in a language, in bounded time."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from decoders.constraints.patterns import limits as patterns
from decoders.constraints.schemas import limits as schemas
from decoders.constraints.specs import JsonSchema
from decoders.errors import GrammarError

REFS = {f"d{i}": {"properties": {"l": {"$ref": f"#/$defs/d{(i * 7 + 1) % 40}"}, "r": {"$ref": f"#/$defs/d{(i * 3 + 2) % 40}"}}}
        for i in range(40)}  # fmt: skip
LEVEL = {"type": "object", "required": ["a"], "additionalProperties": False}
LEVELS = {str(i): {**LEVEL, "properties": {"a": {"$ref": f"#/$defs/{i + 1}"}}} for i in range(2_000)} | {
    "2000": {"type": "null"}
}
HOSTILE: dict[str, tuple[Any, str]] = {
    "deep nesting": ('{"items":' * 5000 + "{}" + "}" * 5000, "NESTING"),
    "a huge text": ('{"a": "' + "x" * 1_000_001 + '"}', "SCHEMA_CHARACTERS"),
    "a huge enum": ({"enum": [str(i) for i in range(30_000)]}, "VALUES"),
    "an enum of objects": ({"enum": [{"a": i} for i in range(2_000)]}, "ALTERNATIVES"),
    "a long length with a pattern": ({"type": "string", "maxLength": 10**6, "pattern": "a+b"}, "STATES"),
    "an exponential pattern": ({"type": "string", "pattern": "(a|b)*a(a|b){30}", "maxLength": 50}, "STATES"),
    "a pattern of many characters": (
        {"type": "string", "pattern": "".join(chr(0x4E00 + i) for i in range(1900)), "maxLength": 2900}, "MOVES"),
    "repetitions of repetitions": ({"pattern": "((a{1,100}){1,100}){1,100}"}, "COPIES"),
    "groups within groups": ({"pattern": "(" * 5000 + ")" * 5000}, "NESTING"),
    "products of alternatives": (
        {"allOf": [{"oneOf": [{"properties": {f"p{i}": {"const": j}}} for j in range(6)]} for i in range(8)]}, "ALTERNATIVES"),
    "products of references": ({"$defs": REFS, "allOf": [{"$ref": f"#/$defs/{name}"} for name in REFS]}, "STEPS"),
    "many of a kind": ({"contains": {"const": 1}, "minContains": 10**7}, "ALTERNATIVES"),
    "many items": ({"minItems": 2**40}, "COUNT"),
    "many properties": ({"properties": {f"p{i}": {} for i in range(3_000)}}, "PROPERTIES"),
    "a huge bound": ({"minimum": 10**1000}, "digits"),
    "a huge step": ({"multipleOf": 123456789}, "STEP"),
    "a remote reference": ({"$ref": "http://example.com/schema.json"}, "nothing is fetched"),
    "a local file": ({"properties": {"a": {"$ref": "file:///etc/hosts"}}}, "nothing is fetched"),
    "a reference to itself": ({"$ref": "#"}, "leads to itself"),
    "a loop of references": (
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"allOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"}, "leads to itself"),
}  # fmt: skip


def many_properties(count: int) -> dict[str, Any]:
    return {
        "properties": {f"p{i}": {"type": "string"} for i in range(count)},
        "additionalProperties": {"type": "integer"},
    }


#: Those that take seconds to reach: in the quick run the limit itself is lower.
DISTANT = {"a pattern of many characters": (patterns, "MOVES"), "products of references": (schemas, "STEPS")}


def test_alternatives_of_numbers_are_bounded_as_values_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schemas, "VALUES", 5)
    with pytest.raises(GrammarError, match="the limit VALUES = 5 "):
        JsonSchema({"anyOf": [{"const": 2 * i} for i in range(8)]}).language()


def test_choosing_which_properties_must_exist_is_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schemas, "STEPS", 15_000)
    must_exist = [{"not": {"additionalProperties": {"const": i}}} for i in range(3)]
    with pytest.raises(GrammarError, match="STEPS"):
        JsonSchema({"allOf": [*must_exist, {"properties": {f"p{i}": {} for i in range(20)}}]}).language()


def test_places_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schemas, "PLACES", 5)
    with pytest.raises(GrammarError, match="the limit PLACES = 5 "):
        JsonSchema({"properties": {f"p{i}": {"minLength": i} for i in range(8)}}).language()


@pytest.mark.parametrize("name", DISTANT)
def test_a_distant_limit_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place, limit = DISTANT[name]
    monkeypatch.setattr(place, limit, getattr(place, limit) // 10)
    with pytest.raises(GrammarError, match=limit):
        JsonSchema(HOSTILE[name][0]).language()


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in DISTANT)) for n in HOSTILE])
def test_limit_is_named_in_time(name: str) -> None:
    schema, limit = HOSTILE[name]
    begin = time.process_time()
    with pytest.raises(GrammarError, match=limit):
        JsonSchema(schema).language()
    assert time.process_time() - begin < 10


@pytest.mark.parametrize(
    "schema",
    [
        {"enum": [f"value {i}" for i in range(15_000)]},
        {"type": "string", "maxLength": 10**9},
        {"type": "string", "pattern": "^a*$", "maxLength": 2**53 - 1},
        {"type": "array", "maxItems": 2**40, "contains": {"const": 1}, "maxContains": 1e300},
        many_properties(1_000),
        many_properties(2_000) | {"minProperties": 2},
        pytest.param(many_properties(2_000) | {"additionalProperties": False, "maxProperties": 2_000}, marks=pytest.mark.slow),
        pytest.param({"type": "string", "pattern": "^a*$", "maxLength": 2_900}, marks=pytest.mark.slow),
        {"pattern": "^(a+)+$", "enum": ["a" * 5000 + "b", "aa"]},
        {"anyOf": [{"properties": {"k": {"const": i}}, "required": ["k"]} for i in range(150)]},
        {"$ref": "#/$defs/0", "$defs": LEVELS},
        {"uniqueItems": True, "items": {"enum": list(range(9))}},
    ],
    ids=[
        "enum", "length", "pattern and a length that no text has", "a number of items that no text has", "many properties",
        "a least number of as many properties as there may be", "a greatest number that is no condition", "pattern and length",
        "pattern of exponential backtracking", "alternatives", "levels", "different items",
    ],
)  # fmt: skip
def test_large_but_legal(schema: dict[str, Any]) -> None:
    begin = time.process_time()
    assert JsonSchema(schema).language().lark
    assert time.process_time() - begin < 10


@pytest.mark.parametrize(
    "schema",
    [
        7, [1], "nope", "[" * 200, {"items": 7}, {"required": [1]}, {"minLength": "a"}, {"minLength": -1}, {"$id": 5},
        {"if": 3, "then": True}, {"$ref": 5}, {"$ref": "#/a/b"}, {"type": "strin"}, {"type": [[1]]}, {"patternProperties": {"(": {}}},
        {"anyOf": [5]},
        {"allOf": {"a": 1}},
        {"$defs": 5, "$ref": "#/$defs/x"}, {"minimum": float("nan")}, {"minimum": "1"}, {"multipleOf": 0}, {"enum": 5}, {"pattern": 5},
        {"properties": [1]}, {"dependentRequired": 5}, {"$schema": "http://example.com/own"}, {1, 2},
        {"$schema": "http://json-schema.org/draft-03/schema#"}, {"$id": "http://[", "$ref": "#x"},
        {"allOf": [1], "$ref": "#/allOf/0/x"},
    ],
    ids=lambda schema: json.dumps(schema, default=str)[:40],
)  # fmt: skip
def test_what_is_no_schema_is_refused(schema: Any) -> None:
    with pytest.raises(GrammarError):
        JsonSchema(schema).language()


@pytest.mark.parametrize(
    "schema",
    [
        False, {"anyOf": []}, {"type": "string", "enum": [1]}, {"type": "string", "minLength": 2, "maxLength": 1},
        {"type": "object", "required": ["a"], "properties": {"a": False}}, {"type": "string", "pattern": "^\\ud800$"},
    ],
)  # fmt: skip
def test_schema_that_nothing_satisfies_is_refused(schema: Any) -> None:
    with pytest.raises(GrammarError, match="no value"):
        JsonSchema(schema).language()


@pytest.mark.parametrize(
    "keyword", ["minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties", "minContains"]
)
@pytest.mark.parametrize("count", ["1e999", "NaN", "-1", "1.5"])
def test_what_is_no_count_names_its_keyword(keyword: str, count: str) -> None:
    with pytest.raises(GrammarError, match="whole number") as problem:
        JsonSchema(f'{{"items": {{"{keyword}": {count}, "contains": {{}}}}}}').language()
    assert (problem.value.keyword, problem.value.path) == (keyword, "$.items")


@pytest.mark.parametrize("keyword", ["minLength", "minItems", "minProperties"])
def test_a_count_that_no_text_has_names_its_keyword(keyword: str) -> None:
    schema = {"items": {keyword: 2**32}}
    with pytest.raises(GrammarError, match="COUNT") as problem:
        JsonSchema(schema).language()
    assert (problem.value.keyword, problem.value.path) == (keyword, "$.items")
    assert f"$.items: {keyword} is left" in JsonSchema(schema, strict=False).language().warnings[-1]


def test_properties_that_are_too_many_to_count_name_their_keyword() -> None:
    schema = many_properties(400) | {"maxProperties": 200}
    with pytest.raises(GrammarError, match="RULES") as problem:
        JsonSchema(schema).language()
    assert (problem.value.keyword, problem.value.path) == ("maxProperties", "$")
    assert "maxProperties is left" in JsonSchema(schema, strict=False).language().warnings[-1]


def test_work_is_in_proportion_to_the_properties() -> None:
    def calls(count: int) -> int:
        made = 0

        def called(frame: object, event: str, argument: object) -> None:
            nonlocal made
            made += event in ("call", "c_call")

        sys.setprofile(called)
        try:
            JsonSchema(many_properties(count)).language()
        finally:
            sys.setprofile(None)
        return made

    assert calls(800) < 6 * calls(200)  # 16 times if it were quadratic


@pytest.mark.slow
def test_a_format_may_be_longer_than_their_automaton_could_be(accepts: Callable[..., bool]) -> None:
    """Pydantic's HttpUrl has 1 to 2083 characters: the grammar has both conditions side by side."""
    language = JsonSchema({"type": "string", "format": "uri", "minLength": 12, "maxLength": 2083}).language()
    assert language.regex is None
    for length, good in ((11, False), (12, True), (2083, True), (2084, False)):
        assert accepts(language, f'"http://a.b/{"x" * (length - 11)}"') is good, length
    assert not accepts(language, '"http://a b/cd"')


def test_lengths_that_no_pattern_has_are_found_though_their_automaton_is_too_large() -> None:
    schema = {"type": "string", "pattern": "^a(bb)*(cc)*(dd)*(ee)*$", "minLength": 2002, "maxLength": 2002}
    with pytest.raises(GrammarError, match="no value"):
        JsonSchema(schema).language()
    JsonSchema(schema | {"minLength": 2001}).language()
