"""Finished texts under schemas that a language has left something out of: the verdicts of jsonschema."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema.validators import Draft202012Validator, validator_for

from decoders.constraints.schemas.judge import Validation
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


def test_regular_patterns_are_those_of_ecma_and_take_linear_time() -> None:
    long = "a" * 40 + "!"
    assert valid({"not": {"pattern": "^(a+)+$"}}, long)
    assert valid({"pattern": r"^\p{Lu}$"}, "É") and not valid({"pattern": r"^\d$"}, "٣")


def test_other_patterns_are_those_of_python() -> None:
    assert valid({"items": {"pattern": r"\bx"}}, ["x", "a x"])
    assert not valid({"items": {"pattern": r"\bx"}}, ["x", "ax"])


def test_multiples_are_exact() -> None:
    assert valid({"multipleOf": 0.1}, 0.7) and not valid({"multipleOf": 0.1}, 0.75)


def test_lists_under_items_are_read_in_all_drafts() -> None:
    assert valid({"items": [{"const": 1}]}, [1, 2]) and not valid({"items": [{"const": 1}]}, [2])


def test_validation_takes_a_bounded_time_and_fetches_nothing() -> None:
    levels = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 10} for i in range(19)}
    for schema in ({"$ref": "#/$defs/d0", "$defs": {**levels, "d19": True}}, {"$ref": "https://example.com/a"}):
        with pytest.raises(GrammarError, match="cannot be judged: .*(takes longer than 0.5 s|example.com)"):
            Validation(schema)("1")


@pytest.mark.parametrize(
    ("schema", "text", "message"),
    [
        ({"properties": {"a": {"items": {"type": "string"}}}}, '{"a": ["x", 1]}', r'\$\.a\[1\]: 1 breaks type: "string"'),
        ({"anyOf": [{"type": "null"}, {"properties": {"a": {"minimum": 3}}}]}, '{"a": 1}', r"\$\.a: 1 breaks minimum: 3"),
        ({"anyOf": [{"type": "null"}, {"minimum": 3}]}, "1", r"\$: 1 breaks anyOf"),
        ({"properties": {"a": False}}, '{"a": 1}', r"\$: 1 is not allowed"),
    ],
)  # fmt: skip
def test_reason_names_the_keyword_and_the_part_that_breaks_it(schema: Any, text: str, message: str) -> None:
    with pytest.raises(GrammarError, match=message):
        Validation(schema)(text)
