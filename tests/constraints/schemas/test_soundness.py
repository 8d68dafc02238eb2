"""Random schemas and instances: what a language accepts is valid, and both notations agree."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema.validators import Draft202012Validator

from decoders.constraints.specs import JsonSchema
from decoders.errors import GrammarError

from .spelling import spell

NAMES = st.sampled_from(["a", "b", "ab", "x"])
SCALARS = st.sampled_from([None, True, False, 0, 1, 2, 5, -3, 1.5, "", "a", "ab", "b1", 'q"', "\x1b", "a\x00"])
INSTANCES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3), max_leaves=6
)


@st.composite
def schemas(draw: st.DrawFn, depth: int = 3, more: dict[str, st.SearchStrategy[Any]] | None = None) -> Any:
    """A schema of at most four keywords, `more` among them, with schemas within it to a depth."""
    if depth == 0 or draw(st.integers(0, 5)) == 0:
        return draw(
            st.sampled_from([True, False, {"type": "string"}, {"type": "integer"}, {"const": "a"}, {"minimum": 2}])
        )
    inner = schemas(depth - 1, more)
    few = st.lists(inner, min_size=1, max_size=3)
    small = st.integers(0, 3)
    known: dict[str, st.SearchStrategy[Any]] = {
        "type": st.sampled_from(["object", "array", "string", "number", "integer", "boolean", ["string", "object", "null"]]),
        "enum": st.lists(SCALARS, min_size=1, max_size=4), "minimum": st.sampled_from([0, 1, 1.5]), "exclusiveMaximum": st.just(5),
        "minLength": small, "maxLength": small, "pattern": st.sampled_from(["^a", "b", "^(ab)*$", "[0-9]$", r"^[^b]$", r"[\x00-\x1f]"]),
        "items": inner, "prefixItems": few, "minItems": small, "maxItems": small, "contains": inner,
        "properties": st.dictionaries(NAMES, inner, max_size=3), "required": st.lists(NAMES, max_size=2, unique=True),
        "additionalProperties": inner, "patternProperties": st.dictionaries(st.sampled_from(["^a", "b$"]), inner, max_size=2),
        "propertyNames": inner, "minProperties": small, "maxProperties": small,
        "dependentRequired": st.dictionaries(NAMES, st.lists(NAMES, max_size=2, unique=True), max_size=1),
        "allOf": few, "anyOf": few, "oneOf": few, "not": inner, "if": inner, "then": inner, "else": inner,
        "unevaluatedProperties": inner, "unevaluatedItems": inner, **(more or {}),
    }  # fmt: skip
    return {name: draw(known[name]) for name in draw(st.lists(st.sampled_from(list(known)), max_size=4, unique=True))}


SCHEMAS = schemas()
#: Keywords that are often left out of a lenient language.
REFUSED: dict[str, st.SearchStrategy[Any]] = {
    "uniqueItems": st.just(True), "multipleOf": st.just(2), "pattern": st.sampled_from([r"\bb", "(?<=a)b", "^a"]),
    "patternProperties": st.dictionaries(st.sampled_from([r"\ba", "(?<=a)b", "^a"]), schemas(1), min_size=1, max_size=2),
    "minProperties": st.just(2), "maxProperties": st.just(1), "maxContains": st.just(1),
}  # fmt: skip
REFUSED_SCHEMAS = schemas(more=REFUSED)
TOO_MUCH = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]


@settings(suppress_health_check=TOO_MUCH)
@given(SCHEMAS, st.lists(INSTANCES, min_size=4, max_size=8))
def test_accepted_is_valid_and_valid_is_spelled(
    accepts: Callable[..., bool], schema: Any, instances: list[Any]
) -> None:
    spec = JsonSchema(schema)
    validator = Draft202012Validator(schema)
    try:
        language = spec.language()
    except GrammarError as problem:
        if "no value" in str(problem):
            assert not any(validator.is_valid(instance) for instance in instances)
        return
    for instance in instances:
        valid = validator.is_valid(instance)
        spelled = spell(spec, instance)
        if spelled is None and valid:
            assert any("not declared" in warning for warning in language.warnings), instance
            continue
        assert (spelled is not None) is valid, instance
        if spelled is not None:
            assert json.loads(spelled) == instance
            assert accepts(language, spelled), spelled
        if accepts(language, json.dumps(instance, ensure_ascii=False)):
            assert valid, instance


@settings(suppress_health_check=TOO_MUCH)
@given(REFUSED_SCHEMAS, st.lists(INSTANCES, min_size=4, max_size=8))
def test_lenient_language_has_all_that_is_valid(
    accepts: Callable[..., bool], schema: Any, instances: list[Any]
) -> None:
    spec = JsonSchema(schema, strict=False)
    valid = [instance for instance in instances if Draft202012Validator(schema).is_valid(instance)]
    try:
        language = spec.language()
    except GrammarError as problem:
        assert not valid or "no value" not in str(problem), problem
        assert "no value" in str(problem) or "strict=False" not in str(problem), problem
        return
    for instance in valid:
        spelled = spell(spec, instance)
        if spelled is None:
            assert any("not declared" in warning for warning in language.warnings), instance
        else:
            assert accepts(language, spelled), spelled


@pytest.mark.slow
@settings(max_examples=5_000, deadline=None, suppress_health_check=TOO_MUCH)
@given(REFUSED_SCHEMAS, st.lists(INSTANCES, min_size=4, max_size=8))
def test_lenient_language_has_all_that_is_valid_at_length(
    accepts: Callable[..., bool], schema: Any, instances: list[Any]
) -> None:
    test_lenient_language_has_all_that_is_valid.hypothesis.inner_test(accepts, schema, instances)


@pytest.mark.slow
@settings(max_examples=5_000, deadline=None, suppress_health_check=TOO_MUCH)
@given(SCHEMAS, st.lists(INSTANCES, min_size=4, max_size=8))
def test_accepted_is_valid_at_length(accepts: Callable[..., bool], schema: Any, instances: list[Any]) -> None:
    test_accepted_is_valid_and_valid_is_spelled.hypothesis.inner_test(accepts, schema, instances)


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"enum": [5e-324, 3]}, ""),
        ({"minimum": -1e-238}, "-"),
        ({"const": 1e23}, "1" + 23 * "0"),  # as a float 8388608 less
        ({"not": {"type": "integer"}}, "2561703002835620.1"),  # as a float an integer
        ({"minimum": 2**53 + 1}, "9007199254740993.0"),  # as a float 1 less
        ({"exclusiveMaximum": 1e17}, "99999999999999999.9"),  # as a float the bound
    ],
)
def test_invalid_text_is_refused(judged: Callable[..., bool], schema: Any, text: str) -> None:
    try:
        valid = Draft202012Validator(schema).is_valid(json.loads(text))
    except ValueError:
        valid = False
    assert not valid
    assert not judged(schema, text)


def test_items_that_count_are_spelled_in_the_order_of_their_kind(judged: Callable[..., bool]) -> None:
    schema = {"type": "array", "contains": {"properties": {"a": True}, "type": "object"}}
    spelled = spell(JsonSchema(schema), [1, {"b": 0, "a": 0}])
    assert spelled == '[1, {"a": 0, "b": 0}]' and judged(schema, spelled)
