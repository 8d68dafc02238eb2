"""Finished texts under schemas that a language has left something out of: the same verdicts as jsonschema's, in bounded time."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema.validators import Draft202012Validator, validator_for

from decoders.constraints.schemas.judge import Validation
from decoders.constraints.specs import JsonSchema
from decoders.errors import GrammarError

from .test_soundness import INSTANCES, REFUSED_SCHEMAS, TOO_MUCH


def valid(schema: Any, value: Any) -> bool:
    try:
        Validation(schema)(json.dumps(value))
    except GrammarError as problem:
        assert "not valid" in str(problem), problem
        return False
    return True


@settings(suppress_health_check=TOO_MUCH)
@given(REFUSED_SCHEMAS, st.lists(INSTANCES, min_size=4, max_size=8))
def test_verdicts_are_those_of_jsonschema(schema: Any, instances: list[Any]) -> None:
    validator = Draft202012Validator(schema)
    for instance in instances:
        assert valid(schema, instance) is validator.is_valid(instance), instance


@pytest.mark.parametrize(
    ("schema", "instances"),
    [
        ({"$schema": "http://json-schema.org/draft-04/schema#", "minimum": 2, "exclusiveMinimum": True}, [2, 3]),
        (
            {"$schema": "http://json-schema.org/draft-07/schema#", "$ref": "#/definitions/a", "type": "string",
             "definitions": {"a": {"type": "integer"}}},
            [1, "a"],
        ),
        ({"$schema": "http://json-schema.org/draft-07/schema#", "items": [True, False], "additionalItems": False}, [[], [1], [1, 2]]),
        ({"$schema": "http://json-schema.org/draft-07/schema#", "dependencies": {"a": ["b"], "c": {"minProperties": 3}}},
         [{"a": 1}, {"a": 1, "b": 1}, {"c": 1, "d": 1}]),
        (
            {"$schema": "https://json-schema.org/draft/2019-09/schema", "$recursiveAnchor": True, "type": "object",
             "properties": {"v": {"type": "integer"}, "p": {"$recursiveRef": "#"}}, "unevaluatedProperties": False},
            [{"v": 1, "p": {"v": 2}}, {"p": {"v": "a"}}, {"p": {"w": 1}}],
        ),
        ({"contains": {"const": 1}, "unevaluatedItems": False}, [[1], [1, 2]]),
        (
            {"$id": "https://example.com/a", "$defs": {"n": {"$id": "n", "$anchor": "x", "type": "integer"}}, "items": {"$ref": "n#x"}},
            [[1], ["a"]],
        ),
        ({"enum": [1, {"a": [True]}]}, [1.0, True, {"a": [True]}, {"a": [1]}]),
        ({"uniqueItems": True}, [[1, 1.0], [1, True], [{"a": 1, "b": 2}, {"b": 2, "a": 1}], [[], {}]]),
    ],
)  # fmt: skip
def test_verdicts_of_every_draft_are_those_of_jsonschema(schema: Any, instances: list[Any]) -> None:
    validator = validator_for(schema, default=Draft202012Validator)(schema)
    verdicts = [valid(schema, instance) for instance in instances]
    assert verdicts == [validator.is_valid(instance) for instance in instances]


LONG = "a" * 40 + "!"


@pytest.mark.parametrize("pattern", ["^(a+)+$", "^(a|a)*$", "^(a*)*b$"])
@pytest.mark.parametrize("declared", [{}, {"$schema": "https://json-schema.org/draft/2020-12/schema"}])
def test_pattern_that_would_backtrack_for_ever_is_matched_in_linear_time(
    pattern: str, declared: dict[str, str]
) -> None:
    assert valid({"const": LONG, "allOf": [{**declared, "not": {"pattern": pattern}}]}, LONG)
    keys = {"patternProperties": {pattern: False}, "additionalProperties": True, "unevaluatedProperties": False}
    assert valid(keys, {LONG: 1})


def test_pattern_that_is_not_regular_is_given_up_when_time_is_up() -> None:
    with pytest.raises(GrammarError, match=r"cannot be judged: matching a pattern takes longer than 0.5 s"):
        Validation({"pattern": r"^(a+)+\b\B$"})(json.dumps(LONG))
    assert valid({"pattern": r"\bx"}, "a x")
    assert not valid({"items": {"pattern": r"\bx"}}, ["x", "ax"])


def test_references_that_fan_out_cost_what_there_is() -> None:
    levels = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 10} for i in range(19)}
    schema = {"$ref": "#/$defs/d0", "$defs": {**levels, "d19": {"type": "string"}}}
    assert valid(schema, "a")
    assert not valid(schema, 1)
    JsonSchema(schema, strict=False).language().whole('"a"')  # type: ignore[misc]  # it has one


def test_many_values_are_compared_with_each_other_once() -> None:
    many = [{"a": [i]} for i in range(5_000)]
    assert valid({"uniqueItems": True, "not": {"contains": {"enum": [{"a": i} for i in range(2_000)]}}}, many)


@pytest.mark.parametrize(
    ("schema", "text", "message"),
    [
        ({"properties": {"a": {"items": {"type": "string"}}}}, '{"a": ["x", 1]}', r'\$\.a\[1\]: 1 breaks type: "string"'),
        ({"anyOf": [{"type": "null"}, {"properties": {"a": {"minimum": 3}}}]}, '{"a": 1}', r"\$\.a: 1 breaks minimum: 3"),
        ({"anyOf": [{"type": "null"}, {"minimum": 3}]}, "1", r"\$: 1 breaks anyOf"),
        ({"properties": {"a": False}}, '{"a": 1}', r"\$\.a: nothing is allowed here, not even 1"),
    ],
)  # fmt: skip
def test_reason_names_the_keyword_and_the_part_that_breaks_it(schema: Any, text: str, message: str) -> None:
    with pytest.raises(GrammarError, match=message):
        Validation(schema)(text)
