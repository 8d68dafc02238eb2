"""Every keyword: texts that are valid and texts that are not, in both notations."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from jsonschema.validators import Draft202012Validator, validator_for

from decoders.constraints.specs import JsonSchema
from decoders.errors import GrammarError

CASES: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "true": (True, [1, "a", None, [{}], {"a": [1.5e-7]}], []),
    "type": ({"type": "integer"}, [0, -12, 10**20], [1.5, "1", None, True]),
    "types": ({"type": ["null", "boolean"]}, [None, True, False], [0, "null"]),
    "number": ({"type": "number"}, [0, -1.25, 1e300, 5e-07, 12345678901234567890], ["1", None]),
    "enum": ({"enum": ["a", 'q"\\\n', 1, None, [1, {"k": 2.5}]]}, ["a", 'q"\\\n', 1, None, [1, {"k": 2.5}]], ["b", 2, [1]]),
    "const": ({"const": {"b": 1, "a": [True]}}, [{"b": 1, "a": [True]}], [{"b": 1}, {"b": 1, "a": [False]}]),
    "minimum": ({"type": "number", "minimum": -1.5}, [-1.5, -1.25, 0, 7], [-1.75, -2]),
    "exclusive": ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}, [0.5, 0.001], [0, 1, -0.5, 1.25]),
    "draft 4 exclusive": (
        {"$schema": "http://json-schema.org/draft-04/schema#", "type": "integer", "minimum": 3, "exclusiveMinimum": True},
        [4, 30],
        [3, -4],
    ),
    "integer interval": ({"type": "integer", "minimum": -12, "maximum": 105}, [-12, -1, 0, 9, 99, 105], [-13, 106, 1000]),
    "multipleOf": ({"type": "integer", "multipleOf": 6}, [0, 6, -12, 600], [1, 2, 3, 8]),
    "multipleOf cents": ({"type": "number", "multipleOf": 0.01, "minimum": 0}, [0, 1.5, 19.99], [0.001, -1]),
    "multipleOf large": ({"type": "integer", "multipleOf": 37, "minimum": 100}, [111, 370], [37, 112]),
    "lengths": ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "é\n\\", "😀😀"], ["a", "abcd", "😀"]),
    "pattern": ({"type": "string", "pattern": "^a[^b]*$"}, ["a", 'a"é'], ["", "ab", "ba"]),
    "pattern inside": ({"type": "string", "pattern": "b\\d"}, ["b1", "ab2c"], ["b", "1b"]),
    "pattern and length": ({"type": "string", "pattern": "^(ab)+$", "maxLength": 5}, ["ab", "abab"], ["", "ababab", "aba"]),
    "look-ahead": ({"type": "string", "pattern": "^(?!no)[a-z]+$"}, ["yes", "on"], ["no", "nobody", ""]),
    "format": ({"type": "string", "format": "date"}, ["2024-02-29"], ["2023-02-29", "today"]),
    "items": ({"type": "array", "items": {"type": "integer"}}, [[], [1], [1, 2, 3]], [["a"], [1, None], {}]),
    "prefixItems": (
        {"type": "array", "prefixItems": [{"const": 1}, {"const": 2}], "items": {"const": 3}},
        [[], [1], [1, 2], [1, 2, 3, 3]],
        [[2], [1, 2, 2]],
    ),
    "minItems": ({"type": "array", "items": {"const": 0}, "minItems": 1, "maxItems": 2}, [[0], [0, 0]], [[], [0, 0, 0]]),
    "prefix and bounds": (
        {"type": "array", "prefixItems": [{"const": 1}, {"const": 2}], "items": {"const": 3}, "minItems": 2, "maxItems": 3},
        [[1, 2], [1, 2, 3]],
        [[], [1], [1, 2, 3, 3]],
    ),
    "contains": (
        {"type": "array", "items": {"type": "integer"}, "contains": {"const": 7}, "maxContains": 2},
        [[7], [1, 7, 2, 7]],
        [[], [1], [7, 7, 7]],
    ),
    "uniqueItems": (
        {"type": "array", "items": {"enum": ["a", "b", 3]}, "uniqueItems": True},
        [[], ["b"], ["b", 3, "a"]],
        [["a", "a"], [3, "a", 3]],
    ),
    "properties": (
        {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "null"}}, "additionalProperties": False},
        [{}, {"a": 1}, {"b": None}, {"a": 1, "b": None}],
        [{"a": "x"}, {"c": 1}, {"a": 1, "c": None}],
    ),
    "required": (
        {"type": "object", "properties": {"a": {"const": 1}, "b": {"const": 2}, "c": {"const": 3}}, "required": ["b", "z"]},
        [{"b": 2, "z": 0}, {"a": 1, "b": 2, "c": 3, "z": [], "more": 1}],
        [{}, {"b": 2}, {"z": 0}, {"b": 3, "z": 0}],
    ),
    "additionalProperties": (
        {"type": "object", "properties": {"a": {"const": 1}}, "additionalProperties": {"type": "string"}},
        [{}, {"a": 1}, {"x": "y"}, {"a": 1, "aa": "y", "": "z"}],
        [{"a": "s"}, {"x": 1}],
    ),
    "patternProperties": (
        {"type": "object", "patternProperties": {"^x_": {"type": "integer"}, "_id$": {"minimum": 5}}, "additionalProperties": False},
        [{}, {"x_a": 1}, {"x_id": 5}, {"y_id": "s"}],
        [{"x_a": "s"}, {"x_id": 4}, {"y": 1}],
    ),
    "propertyNames": (
        {"type": "object", "propertyNames": {"maxLength": 2}, "additionalProperties": {"type": "integer"}},
        [{}, {"ab": 1}],
        [{"abc": 1}],
    ),
    "propertyNames enum": (
        {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"type": "integer"}},
        [{}, {"a": 1}, {"a": 1, "b": 2}],
        [{"c": 1}],
    ),
    "minProperties": (
        {"type": "object", "properties": {"a": {"const": 1}, "b": {"const": 2}}, "minProperties": 2, "maxProperties": 3},
        [{"a": 1, "b": 2}, {"a": 1, "x": 0}, {"b": 2, "x": 0}, {"a": 1, "b": 2, "x": 0}],
        [{}, {"a": 1}, {"x": 1}, {"a": 1, "b": 2, "x": 0, "y": 0}],
    ),
    "dependentRequired": (
        {"type": "object", "properties": {"a": {"const": 1}, "b": {"const": 2}}, "dependentRequired": {"a": ["b"]}},
        [{}, {"b": 2}, {"a": 1, "b": 2}],
        [{"a": 1}],
    ),
    "dependentSchemas": (
        {"dependentSchemas": {"a": {"properties": {"b": {"const": 2}}}}, "type": "object"},
        [{}, {"b": 3}, {"a": 0, "b": 2}],
        [{"a": 0, "b": 3}],
    ),
    "allOf": (
        {"type": "object", "properties": {"a": {"minimum": 3}}, "required": ["b"],
         "allOf": [{"properties": {"a": {"type": "integer"}}, "required": ["a"]}, {"properties": {"b": {"const": 1}}}]},
        [{"a": 3, "b": 1}],
        [{}, {"a": 3}, {"a": 2, "b": 1}, {"a": 3.5, "b": 1}, {"a": 3, "b": 2}],
    ),
    "anyOf": ({"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 1}]}, [1, "", "a"], ["ab", 1.5, None]),
    "oneOf disjoint": (
        {"oneOf": [{"type": "object", "properties": {"k": {"const": k}, "v": {"type": t}}, "required": ["k", "v"]}
                   for k, t in (("i", "integer"), ("s", "string"))]},
        [{"k": "i", "v": 1}, {"k": "s", "v": "x"}],
        [{"k": "i", "v": "x"}, {"k": "s", "v": 1}, {}],
    ),
    "oneOf overlapping": ({"oneOf": [{"type": "integer"}, {"minimum": 2}]}, [1, 2.5, "s"], [3, 1.5]),
    "not": ({"type": "object", "properties": {"a": {"type": "integer"}}, "not": {"required": ["a", "b"]}},
            [{}, {"a": 1}, {"b": 1}], [{"a": 1, "b": 2}]),
    "not enum": ({"type": "string", "not": {"enum": ["a", "bc"]}}, ["", "b", "abc"], ["a", "bc"]),
    "if": (
        {"type": "object", "properties": {"k": {"enum": ["x", "y"]}, "v": {}}, "required": ["k"],
         "if": {"properties": {"k": {"const": "x"}}}, "then": {"required": ["v"]}, "else": {"properties": {"v": False}}},
        [{"k": "x", "v": 1}, {"k": "y"}],
        [{"k": "x"}, {"k": "y", "v": 1}],
    ),
    "recursion": (
        {"$defs": {"tree": {"type": "object", "required": ["v"], "additionalProperties": False,
                            "properties": {"v": {"type": "integer"}, "kids": {"type": "array", "items": {"$ref": "#/$defs/tree"}}}}},
         "$ref": "#/$defs/tree"},
        [{"v": 1}, {"v": 1, "kids": [{"v": 2, "kids": []}, {"v": 3}]}],
        [{}, {"v": 1, "kids": [{}]}],
    ),
    "anchor and id": (
        {"$id": "http://example.com/root", "$defs": {"a": {"$id": "part", "$defs": {"b": {"$anchor": "x", "type": "null"}}}},
         "properties": {"p": {"$ref": "part#x"}}, "type": "object"},
        [{"p": None}],
        [{"p": 1}],
    ),
    "unevaluatedProperties": (
        {"type": "object", "allOf": [{"properties": {"a": {"const": 1}}}], "unevaluatedProperties": False,
         "anyOf": [{"properties": {"b": {"const": 2}}, "required": ["b"]}, True]},
        [{}, {"a": 1}, {"a": 1, "b": 2}],
        [{"c": 1}, {"b": 3}],
    ),
    "unevaluatedItems": (
        {"type": "array", "prefixItems": [{"const": 1}], "contains": {"const": 5}, "unevaluatedItems": False},
        [[1, 5], [1, 5, 5]],
        [[1], [5], [1, 5, 6]],
    ),
    "draft 7": (
        {"$schema": "http://json-schema.org/draft-07/schema#", "type": "array", "items": [{"const": 1}],
         "additionalItems": {"const": 2}, "dependencies": {"a": ["b"]}},
        [[], [1], [1, 2]],
        [[2], [1, 1]],
    ),
    "uniqueItems of equal numbers": (
        {"type": "array", "uniqueItems": True, "items": {"anyOf": [
            {"type": "number", "minimum": 1, "maximum": 1}, {"const": 1}, {"const": 1.0},
            {"type": "number", "minimum": 2**53 + 1, "maximum": 2**53 + 1}, {"const": 2**53 + 1},
            {"const": 0}, {"const": -0.0}, {"const": 1e2}, {"enum": [100, 1.5]},
            {"type": "number", "multipleOf": 0.5, "minimum": 1.5, "maximum": 1.5}]}},
        [[], [1, 1.5, 100, 2**53 + 1, 0]],
        [[1, 1], [2**53 + 1] * 2, [0, 0], [100, 100], [1.5, 1.5]],
    ),
    "prefixItems in draft 2019-09": (
        {"$schema": "https://json-schema.org/draft/2019-09/schema", "type": "array", "prefixItems": [{"type": "string"}],
         "items": {"type": "integer"}},
        [[], [1]],
        [["a"], ["a", 1]],
    ),
    "dependentRequired in draft 7": (
        {"$schema": "http://json-schema.org/draft-07/schema#", "type": "object", "dependentRequired": {"a": ["b"]},
         "dependentSchemas": {"a": {"required": ["b"]}}, "not": {"required": ["c"], "dependentRequired": {"a": ["b"]}}},
        [{}, {"a": 1}],
        [{"c": 1}, {"a": 1, "c": 1}],
    ),
    "dependencies in draft 2020-12": (
        {"type": "object", "dependencies": {"a": ["b"]}, "not": {"required": ["c"], "dependencies": {"a": ["b"]}}},
        [{}, {"a": 1}],
        [{"c": 1}, {"a": 1, "c": 1}],
    ),
    "a keyword spelled with an escape": (
        r'{"type": "object", "properties": {"a": {}}, "\u0075nevaluatedProperties": false}', [{}, {"a": 1}], [{"b": 1}],
    ),
    "dynamicRef": (
        {"$id": "http://example.com/list", "$defs": {"x": {"$dynamicAnchor": "item", "type": "integer"}}, "type": "array",
         "items": {"$dynamicRef": "#item"}},
        [[1]],
        [["a"]],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_language_has_what_is_valid_and_nothing_else(name: str, judged: Callable[..., bool]) -> None:
    schema, good, bad = CASES[name]
    contents = json.loads(schema) if isinstance(schema, str) else schema
    validator = validator_for(contents, default=Draft202012Validator)(contents)
    for value, valid in [(value, True) for value in good] + [(value, False) for value in bad]:
        text = json.dumps(value, ensure_ascii=False)
        assert judged(schema, text) is valid, text
        if name not in ("format", "multipleOf cents"):  # an annotation; 19.99 / 0.01 is no integer in floats
            assert validator.is_valid(value) is valid, f"the case itself: {text}"


@pytest.mark.parametrize(
    ("text", "good"),
    [
        ('"a\\u00e9\\ud83d\\ude00\\/"', True), ('"\\ud83d"', False), ('"\\ude00\\ud83d"', False), ('"\t"', False), ('"\\x"', False),
        ('"', False), ("", False), ("1e5", True), ("1e999", False), ("01", False), ("+1", False), (".5", False), ("nul", False),
        ('{"a":1, "b": [2,3]}', True), ('{"a" :1}', False), ('{"a":  1}', False), ("[1 ]", False), ("[,]", False), (" 1", False),
    ],
)  # fmt: skip
def test_texts_are_json(text: str, good: bool, judged: Callable[..., bool]) -> None:
    assert judged(True, text) is good


@pytest.mark.parametrize("point", range(0x20))
def test_control_characters_can_be_written_in_every_string(point: int, judged: Callable[..., bool]) -> None:
    text, number = chr(point), rf"\x{point:02x}"
    conditions: list[dict[str, Any]] = [
        {}, {"maxLength": 1}, {"minLength": 1}, {"pattern": f"^{number}$"}, {"pattern": f"^[^{number}]$"}, {"pattern": r"^\D$"},
        {"pattern": rf"^[\x00-{number}]$", "maxLength": 2}, {"not": {"pattern": "a"}}, {"not": {"pattern": number}},
    ]  # fmt: skip
    for condition in conditions:
        valid = Draft202012Validator(condition).is_valid(text)
        assert judged({"type": "string", **condition}, json.dumps(text)) is valid, condition
        assert judged({"type": "object", "propertyNames": condition}, json.dumps({text: 1})) is valid, condition


@pytest.mark.parametrize("indent", [0, 2, 3])
@pytest.mark.parametrize("value", [{"a": [], "b": {}}, {"a": [1, 2], "b": {"c": [[3]]}}, {"a": [7], "b": {"c": []}}])
def test_an_indent_is_that_of_python(indent: int, value: Any, judged: Callable[..., bool]) -> None:
    ones = {"type": "array", "items": {"type": "integer"}}
    inner = {"type": "object", "properties": {"c": {"type": "array", "items": ones}}, "additionalProperties": False}
    schema = {
        "type": "object",
        "properties": {"a": ones, "b": inner},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    text = json.dumps(value, indent=indent)
    assert judged(schema, text, indent=indent)
    others = [
        json.dumps(value),
        json.dumps(value, indent=indent + 1),
        text.replace("\n", " ", 1),
        text.replace(": ", ":", 1),
    ]
    assert not any(judged(schema, other, indent=indent) for other in others)


def test_an_indent_is_for_values_of_bounded_depth() -> None:
    with pytest.raises(GrammarError, match=r"nest more than 32 deep"):
        JsonSchema({"type": "array", "items": {"$ref": "#"}}, indent=2).language()
    with pytest.raises(GrammarError, match="from 0 to 16"):
        JsonSchema(True, indent=-1).language()


@pytest.mark.parametrize(
    ("whitespace", "good", "bad"),
    [
        ("compact", ['{"a":[1,2]}'], ['{"a": [1,2]}', '{"a":[1, 2]}']),
        ("space", ['{"a":[1,2]}', '{"a": [1, 2]}'], ['{ "a": [1,2]}', '{"a":\n[1]}']),
        (
            "flexible",
            ['{"a":[1,2]}', '{\n  "a": [\n    1,\n    2\n  ]\n}'],
            ['{"a":   [1]}', "\n{}", '{"a": [1,\n\n2]}'],
        ),
    ],
)
def test_white_space_is_bounded(whitespace: str, good: list[str], bad: list[str], judged: Callable[..., bool]) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "array", "items": {"type": "integer"}}},
        "additionalProperties": False,
    }
    assert all(judged(schema, text, whitespace=whitespace) for text in good)
    assert not any(judged(schema, text, whitespace=whitespace) for text in bad)


def test_declared_keys_stand_in_order_and_occur_once(judged: Callable[..., bool]) -> None:
    schema = {"type": "object", "properties": {"b": {"const": 1}, "a": {"const": 2}}}
    assert judged(schema, '{"b": 1, "a": 2, "x": 0}')
    for text in (
        '{"a": 2, "b": 1}',
        '{"x": 0, "a": 2}',
        '{"b": 1, "b": 1}',
        '{"a": 2, "a": 3}',
        '{"x": 0, "\\u0061": 3}',
    ):
        assert not judged(schema, text)


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"properties": {"a": True}, "minProperties": 2}, '{"a": 0, "x": 0}', '{"x": 0, "x": 0}'),
        ({"not": {"additionalProperties": {"type": "string"}}}, '{"x": "", "y": 0}', '{"x": 0, "x": ""}'),
        ({"allOf": [{"not": {"additionalProperties": {"type": kind}}} for kind in ("string", "integer")]}, '{"x": null}',
         '{"x": 0, "x": ""}'),
    ],
)  # fmt: skip
def test_key_that_repeats_breaks_nothing(
    schema: dict[str, Any], good: str, bad: str, judged: Callable[..., bool]
) -> None:
    """Whoever reads the text takes the last one."""
    schema = {"type": "object", **schema}
    assert Draft202012Validator(schema).is_valid(json.loads(good))
    assert not Draft202012Validator(schema).is_valid(json.loads(bad))
    assert judged(schema, good)
    assert not judged(schema, bad)


def test_more_properties_than_are_declared_are_refused() -> None:
    many = {"type": "object", "properties": {"a": True}, "minProperties": 3}
    with pytest.raises(GrammarError, match="undeclared keys may repeat") as problem:
        JsonSchema({"items": many}).language()
    assert (problem.value.keyword, problem.value.path) == ("minProperties", "$.items")
    assert "minProperties is left" in JsonSchema({"items": many}, strict=False).language().warnings[-1]


def test_what_is_left_out_for_keys_that_may_repeat_is_remarked() -> None:
    some = {"type": "object", "properties": {"a": True}, "minProperties": 2}
    assert any("minProperties" in warning for warning in JsonSchema(some).language().warnings)
    assert not any("minProperties" in warning for warning in JsonSchema({"minProperties": 1}).language().warnings)


def test_multiples_that_llguidance_cannot_count_name_their_keyword() -> None:
    with pytest.raises(GrammarError, match="2\\*\\*62") as problem:
        JsonSchema({"items": {"minimum": -1e22, "multipleOf": 7}}).language()
    assert (problem.value.keyword, problem.value.path) == ("multipleOf", "$.items")


def test_multiples_that_a_validator_of_floats_refuses_are_remarked(judged: Callable[..., bool]) -> None:
    cents = {"multipleOf": 0.1}
    assert judged(cents, "0.7") and not Draft202012Validator(cents).is_valid(0.7)
    assert any("divides floats" in warning for warning in JsonSchema(cents).language().warnings)
    assert not any("divides floats" in warning for warning in JsonSchema({"multipleOf": 3}).language().warnings)


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("hostname", ["ec2-1.eu-west-1.compute.amazonaws.com", "a.b.c.d.e.f.g.h", f"{'a' * 63}.{'b' * 63}.{'c' * 63}"],
         ["", "-a", "a.", "a" * 64, ".".join("a" * 128)]),
        ("ipv6", ["::", "::1", "1::", "::ffff:192.0.2.1", "1:2:3:4:5:6:192.0.2.1", "1:2::3:192.0.2.1", "1:2:3:4:5:6:7::"],
         ["", ":", ":::", "1::2::3", "1:2:3:4:5:6:7:8:9", "::1.2.3", "1:2:3:4:5:6:7:192.0.2.1", "::%eth0"]),
        ("uri", ["http://[::1]:80/", "http://u:p@h:80/a?b#c", "mailto:a@b.c", "file:///etc/hosts", "urn:a:b", "http://[v1.a:b]"],
         ["//a", "http://a b", "http://[::1", "http://a:b", "http://[1.2.3.4]/", "http://a/%zz"]),
    ],
)  # fmt: skip
def test_formats_have_what_their_standards_do(
    name: str, good: list[str], bad: list[str], judged: Callable[..., bool]
) -> None:
    schema = {"type": "string", "format": name}
    assert [text for text in good if not judged(schema, json.dumps(text))] == []
    assert [text for text in bad if judged(schema, json.dumps(text))] == []


def test_given_values_are_allowed_as_they_are(judged: Callable[..., bool]) -> None:
    assert not judged({"type": "string", "format": "date"}, '""')
    for schema in ({"format": "date", "enum": ["", "2023-02-28"]}, {"allOf": [{"const": ""}, {"format": "date"}]}):
        assert judged(schema, '""')
        assert not judged(schema, '"2023-02-29"')
