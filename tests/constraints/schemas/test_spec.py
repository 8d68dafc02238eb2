"""The specification: types of Python, strict and lenient, keys of caches, warnings, errors."""

from __future__ import annotations

import dataclasses
import datetime
import enum
import json
import socket
import typing
from collections.abc import Callable
from typing import Any, Literal

import pydantic
import pytest
import typing_extensions

from decoders.constraints.schemas.judge import Validation
from decoders.constraints.specs import JsonSchema
from decoders.errors import GrammarError

from .spelling import spell


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclasses.dataclass
class Point:
    x: int
    y: int = 0


class Inner(typing.TypedDict):
    word: str


class Outer(typing.TypedDict):
    count: int
    inner: typing_extensions.NotRequired[list[Inner]]


class Event(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=5)
    day: datetime.date
    colour: Colour | None = None
    at: Point | None = None


class Tree(pydantic.BaseModel):
    value: int
    kids: list[Tree] = []


TYPES: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "model": (
        Event,
        [{"name": "a", "day": "2024-02-29"}, {"name": "a", "day": "2024-01-01", "colour": "red", "at": {"x": 1}}],
        [
            {"name": "abcdef", "day": "2024-01-01"},
            {"name": "a", "day": "2023-02-29"},
            {"name": "a", "day": "2024-01-01", "more": 1},
        ],
    ),
    "recursive model": (Tree, [{"value": 1, "kids": [{"value": 2}]}], [{"value": 1, "kids": [{}]}]),
    "TypedDict": (Outer, [{"count": 1}, {"count": 1, "inner": [{"word": "a"}]}], [{}, {"count": 1, "inner": [{}]}]),
    "dataclass": (Point, [{"x": 1}, {"x": 1, "y": 2}], [{"y": 2}]),
    "literal": (Literal["a", 3], ["a", 3], ["b", 4]),
    "generic": (dict[str, list[int]], [{}, {"a": [1]}], [{"a": 1}]),
    "union": (int | None, [1, None], ["1"]),
}


@pytest.mark.parametrize("name", TYPES)
def test_types_of_python(name: str, accepts: Callable[..., bool]) -> None:
    kind, good, bad = TYPES[name]
    language = JsonSchema.of(kind).language()
    assert all(accepts(language, json.dumps(value)) for value in good)
    assert not any(accepts(language, json.dumps(value)) for value in bad)


def test_schemas_pass_through_of() -> None:
    assert JsonSchema.of({"type": "null"}) == JsonSchema({"type": "null"})
    assert JsonSchema.of('{"type": "null"}', whitespace="compact").language().regex == "null"


def test_closed_objects_take_no_others_unless_the_schema_says_so(accepts: Callable[..., bool]) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"const": 1}, "b": {"type": "object", "additionalProperties": {"const": 2}}},
    }
    language = JsonSchema(schema, closed=True).language()
    assert language.regex is not None
    assert accepts(language, '{"a": 1, "b": {"x": 2}}')
    assert not accepts(language, '{"a": 1, "x": 2}')
    assert any("take no other properties" in warning for warning in language.warnings)


@pytest.mark.parametrize(
    ("schema", "keyword", "path", "advice"),
    [
        (
            {"properties": {"a b": {"items": {"pattern": r"\bx"}}}},
            "pattern",
            '$.properties["a b"].items',
            "strict=False",
        ),
        (
            {"$defs": {"t": {"type": "array", "uniqueItems": True}}, "$ref": "#/$defs/t"},
            "uniqueItems",
            '$["$defs"].t',
            "strict=False",
        ),
        ({"allOf": [{"$ref": "http://example.com/x"}]}, "$ref", "$.allOf[0]", "nothing is fetched"),
        ({"not": {"multipleOf": 3}}, "not", "$", "strict=False"),
        ({"anyOf": [{"maxLength": 10**5, "pattern": "^(ab)*$"}]}, "maxLength", "$.anyOf[0]", "STATES"),
        (
            {"items": {"format": "email", "minLength": 5000}},
            "format",
            "$.items",
            "format: a length of 5,000",
        ),
        ({"propertyNames": {"format": "date", "maxLength": 5000}}, "format", "$.propertyNames", "STATES"),
    ],
)
def test_error_names_keyword_path_and_remedy(schema: Any, keyword: str, path: str, advice: str) -> None:
    with pytest.raises(GrammarError) as caught:
        JsonSchema(schema).language()
    assert (caught.value.keyword, caught.value.path) == (keyword, path)
    assert advice in str(caught.value)
    assert path in str(caught.value)


@pytest.mark.parametrize(
    ("schema", "good", "bad", "left"),
    [
        ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, "[1, 2]", "[1, 1]", "$: uniqueItems"),
        ({"type": "string", "pattern": r"\bx"}, '"a x"', '"ax"', "$: pattern"),
        ({"oneOf": [{"multipleOf": 3}, {"multipleOf": 5}], "type": "integer"}, "9", "15", "$: oneOf"),
        ({"type": "integer", "not": {"multipleOf": 3}}, "4", "9", "$: not"),
        ({"type": "string", "not": {"pattern": "(?<=a)b"}}, '"b"', '"ab"', "$.not: pattern"),
        (
            {"type": "string", "oneOf": [{"pattern": r"\bfoo\b"}, {"minLength": 5}]},
            '"fooooo"',
            '"a foo"',
            "$.oneOf[0]: pattern",
        ),
        (
            {"type": "string", "if": {"pattern": r"\bfoo\b"}, "then": {"minLength": 5}, "else": {"maxLength": 4}},
            '"food"',
            '"foods"',
            "$.if: pattern",
        ),
        (
            {"patternProperties": {r"\bx": {}, "^y": {"type": "string"}}, "additionalProperties": False},
            '{"a x": 0, "y": "a"}',
            '{"a": 0}',
            '$.patternProperties["\\\\bx"]: patternProperties',
        ),
        (
            {"patternProperties": {r"\bx": True}, "unevaluatedProperties": False},
            '{"a x": 0}',
            '{"a": 0}',
            '$.patternProperties["\\\\bx"]: patternProperties',
        ),
        (
            {"not": {"patternProperties": {r"\bx": False}, "required": ["a"]}},
            '{"a": 0, "x": 0}',
            '{"a": 0}',
            '$.not.patternProperties["\\\\bx"]: patternProperties',
        ),
        (
            {"allOf": [{"contains": {"enum": [[i] for i in range(300)]}}], "items": True, "unevaluatedItems": False},
            "[[0]]",
            "[[-1]]",
            "$.allOf[0].contains: enum",
        ),
        ({"type": "object", "not": {"maxProperties": 1}}, '{"a": 0, "b": 0}', '{"a": 0}', "$.not: maxProperties"),
        (
            {"type": "object", "if": {"maxProperties": 2}, "then": {"required": ["a"]}},
            '{"a": 0}',
            '{"b": 0}',
            "$.if: maxProperties",
        ),
        (
            {"type": "object", "oneOf": [{"maxProperties": 2}, {"required": ["a"]}]},
            '{"b": 0}',
            '{"a": 0}',
            "$.oneOf[0]: maxProperties",
        ),
        (
            {"contains": {"type": "integer", "multipleOf": 2}, "maxContains": 1},
            "[1, 2]",
            "[2, 4]",
            "$.contains: multipleOf",
        ),
    ],
)
def test_lenient_language_is_wider_and_the_text_is_validated(
    schema: Any, good: str, bad: str, left: str, accepts: Callable[..., bool]
) -> None:
    language = JsonSchema(schema, strict=False).language()
    assert accepts(language, good)
    assert accepts(language, bad)
    assert any(warning.startswith(left) for warning in language.warnings)
    language.whole(good)
    with pytest.raises(GrammarError, match="not valid") as caught:
        language.whole(bad)
    assert caught.value.path is not None
    with pytest.raises(GrammarError, match="not JSON"):
        language.whole(good + "}")


def test_as_much_is_left_out_as_has_to_be() -> None:
    language = JsonSchema({"allOf": [{"contains": {"const": i}} for i in range(12)]}, strict=False).language()
    assert [warning for warning in language.warnings if "is left" in warning] == [
        f"$.allOf[{i}]: contains is left to the validation of the finished text." for i in range(3)
    ]


def test_a_condition_of_numbers_left_out_under_not_leaves_the_other_types(accepts: Callable[..., bool]) -> None:
    either = {"type": ["number", "string"]}
    language = JsonSchema(either | {"not": either | {"minimum": 10**450}}, strict=False).language()
    assert "$.not: minimum is left" in language.warnings[-1]
    assert accepts(language, "5") and not accepts(language, '"5"')


def test_what_is_left_out_of_one_pattern_leaves_the_others(accepts: Callable[..., bool]) -> None:
    schema = {
        "patternProperties": {r"\bx": {}, "^y": {"type": "string"}},
        "additionalProperties": False,
        "type": "object",
    }
    language = JsonSchema(schema, strict=False).language()
    assert not accepts(language, '{"y": 0}')


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"pattern": "("}, '"a"'),
        ({"$ref": "#"}, '"a"'),
        ({"type": "array", "items": {"$ref": "#"}}, "[" * 900 + "]" * 900),
        ({"multipleOf": 0.1}, "9" * 400 + ".5"),
    ],
)
def test_text_that_cannot_be_judged_is_said_to_be_that(schema: dict[str, Any], text: str) -> None:
    with pytest.raises(GrammarError, match="cannot be judged"):
        Validation(schema)(text)


def test_nothing_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a connection")

    monkeypatch.setattr(socket, "socket", refuse)
    for schema in ({"$ref": "http://example.com/a"}, {"$schema": "http://example.com/dialect"}):
        for strict in (True, False):
            with pytest.raises(GrammarError):
                JsonSchema(schema, strict=strict).language()


def test_keys_tell_specifications_apart() -> None:
    keys = {
        JsonSchema({"type": "integer"}).key,
        JsonSchema({"type": "string"}).key,
        JsonSchema({"type": "integer"}, whitespace="compact").key,
        JsonSchema({"type": "integer"}, strict=False).key,
        JsonSchema({"type": "integer"}, closed=True).key,
        JsonSchema({"type": "integer"}, policy="canonical").key,
    }
    assert len(keys) == 6
    assert JsonSchema('{"type":\n"integer"}').key == JsonSchema({"type": "integer"}).key
    # The order of properties is the order of keys in the text.
    assert (
        JsonSchema({"properties": {"a": True, "b": True}}).key != JsonSchema({"properties": {"b": True, "a": True}}).key
    )


def test_languages_do_not_depend_on_hashes() -> None:
    schema = {
        "type": "string",
        "minLength": 1,
        "allOf": [{"pattern": "a"}, {"pattern": "b"}, {"not": {"enum": ["ab", "ba"]}}],
    }
    assert JsonSchema(schema).language() == JsonSchema(json.dumps(schema)).language()


def test_value_is_spelled_in_the_order_of_the_grammar() -> None:
    spec = JsonSchema({"properties": {"b": {}, "a": {"type": "integer"}}, "type": "object"})
    assert spell(spec, {"x": 1, "a": 2.0, "b": [{"é": 1}]}) == '{"b": [{"é": 1}], "a": 2, "x": 1}'
    assert spell(spec, {"a": 1.5}) is None


def test_unknown_white_space_suggests() -> None:
    with pytest.raises(GrammarError, match="Did you mean 'compact'"):
        JsonSchema(True, whitespace="compct").language()


def test_drafts_own_schemas_are_at_hand() -> None:
    language = JsonSchema({"$ref": "https://json-schema.org/draft/2020-12/meta/core"}).language()
    assert language.lark


def test_dialect_of_patterns_is_remarked_where_there_are_any() -> None:
    assert any("ECMA-262" in warning for warning in JsonSchema({"pattern": r"^\S+$"}).language().warnings)
    assert not any("ECMA-262" in warning for warning in JsonSchema({"type": "string"}).language().warnings)


@pytest.mark.parametrize(
    ("schema", "warning"),
    [
        (
            {"properties": {"a": {"maxLenght": 5}}},
            "$.properties.a: 'maxLenght' is not a keyword and has no effect: did you mean 'maxLength'?",
        ),
        ({"items": {"typ": "string"}}, "$.items: 'typ' is not a keyword and has no effect: did you mean 'type'?"),
        ({"tpye": "string"}, "$: 'tpye' is not a keyword and has no effect: did you mean 'type'?"),
        ({"require": ["a"]}, "$: 'require' is not a keyword and has no effect: did you mean 'required'?"),
        ({"prefixItems": [], "$schema": "http://json-schema.org/draft-07/schema#"},
         "$: 'prefixItems' is a keyword of another draft and has no effect."),
        ({"items": {"dependencies": {}}}, "$.items: 'dependencies' is a keyword of another draft and has no effect."),
        ({"items": {"format": "phone"}}, "$.items: the format 'phone' is unknown and has no effect."),
    ],
)  # fmt: skip
def test_what_says_nothing_is_remarked(schema: Any, warning: str) -> None:
    assert warning in JsonSchema(schema).language().warnings


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"maxLenght": {}, "require": {}}, "required": ["format"]},
        {"const": {"maxLenght": 5, "format": "phone"}},
        {"title": "a", "x-maxLength": 3, "example": 1, "nullable": True, "items": {"type": "integer", "format": "int64"}},
        {"type": "string", "format": "password"},
    ],
)  # fmt: skip
def test_other_names_are_not_remarked(schema: Any) -> None:
    assert not [warning for warning in JsonSchema(schema).language().warnings if "has no effect" in warning]


def test_no_more_than_some_names_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decoders.constraints.schemas.keywords._MOST_COMPARED", 3)
    schema = {f"maxLengt{i}": 1 for i in range(9)}
    assert sum("has no effect" in warning for warning in JsonSchema(schema).language().warnings) == 3
