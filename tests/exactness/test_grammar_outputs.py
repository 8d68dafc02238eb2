"""What the demo target writes at temperature 1 under thirty schemas: every finished text parses and is valid."""

from __future__ import annotations

import functools
import json
import math
from collections import Counter
from typing import Any

import jsonschema
import pytest

import decoders
from decoders import demo
from decoders.strategies import Speculative, Staged

NAME = {"type": "string", "minLength": 1, "maxLength": 12}
SHORT = {"type": "string", "maxLength": 6}
COUNT = {"type": "integer", "minimum": 0, "maximum": 99}


def fields(properties: dict[str, Any], required: list[str] | None = None, **more: Any) -> dict[str, Any]:
    """A closed object."""
    needed = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": needed, "additionalProperties": False, **more}


SCHEMAS: dict[str, dict[str, Any]] = {
    "person": fields({"name": NAME, "age": {"type": "integer", "minimum": 0, "maximum": 120}}),
    "optional": fields({"a": COUNT, "b": SHORT, "c": {"type": "boolean"}}, ["b"]),
    "nested": fields({"point": fields({"x": {"type": "number"}, "y": {"type": "number"}}), "label": SHORT}),
    "array": {"type": "array", "items": COUNT, "minItems": 1, "maxItems": 5},
    "objects": {"type": "array", "items": fields({"id": COUNT, "tag": SHORT}), "maxItems": 3},
    "tuple": {"type": "array", "prefixItems": [SHORT, COUNT, {"type": "boolean"}], "items": False, "minItems": 3},
    "enum": {"enum": ["red", "green", "blue", 7, None, {"a": [1]}]},
    "const": {"const": {"kind": "point", "at": [0, 0.5]}},
    "union": {"anyOf": [COUNT, SHORT, {"type": "null"}]},
    "exclusive": {"oneOf": [{"type": "integer", "maximum": 3}, {"type": "integer", "minimum": 10, "maximum": 20}]},
    "negated": {"type": "string", "maxLength": 4, "not": {"enum": ["", "a", "None"]}},
    "all of": {"allOf": [fields({"a": COUNT}, []), {"required": ["a"]}]},
    "conditional": {
        **fields({"kind": {"enum": ["a", "b"]}, "value": {}}),
        "if": {"properties": {"kind": {"const": "a"}}}, "then": {"properties": {"value": COUNT}},
        "else": {"properties": {"value": SHORT}},
    },
    "referenced": {"$defs": {"id": COUNT}, **fields({"from": {"$ref": "#/$defs/id"}, "to": {"$ref": "#/$defs/id"}})},
    "recursive": {
        "$defs": {"tree": fields({"v": COUNT, "in": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2}}, ["v"])},
        "$ref": "#/$defs/tree",
    },
    "pattern": fields({"code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3,5}$"}}),
    "pattern and length": {"type": "string", "pattern": "^(ab|cd)*$", "minLength": 4, "maxLength": 8},
    "date": fields({"day": {"type": "string", "format": "date"}}),
    "uuid": {"type": "string", "format": "uuid"},
    "address": {"type": "string", "format": "ipv4"},
    "range": {"type": "number", "minimum": -1.5, "exclusiveMaximum": 2.25},
    "multiple": {"type": "integer", "multipleOf": 5, "minimum": -20, "maximum": 500},
    "booleans": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    "contains": {"type": "array", "items": {"enum": [0, 1, "x"]}, "contains": {"const": "x"}, "maxItems": 4},
    "mapping": {
        "type": "object", "propertyNames": {"pattern": "^[a-z]{1,3}$"}, "additionalProperties": COUNT, "maxProperties": 3
    },
    "pattern properties": {
        "type": "object", "patternProperties": {"^n_[a-z]$": COUNT}, "additionalProperties": False, "maxProperties": 2
    },
    "dependent": fields({"a": COUNT, "b": COUNT}, [], dependentRequired={"a": ["b"]}),
    "unique": {"type": "array", "items": {"enum": [1, 2, 3]}, "uniqueItems": True, "maxItems": 3},
    "wide": fields({f"field_{i}": COUNT for i in range(12)}),
    "escapes": fields({"text": {"type": "string", "maxLength": 10}, "é": {"enum": ["ü", "日本", "a\"b"]}}),
}  # fmt: skip
STRATEGIES = ("autoregressive", "grammar", "grammar+prompt_lookup", Speculative(length=4), Staged(stage="grammar"))


def written(strategy: Any, seed: int, compile: bool, every: int = 1) -> Counter[str]:
    """How many texts of one draw per schema (or of every third, say) were finished, after the finished ones have been judged."""
    schemas = dict(list(SCHEMAS.items())[::every])
    model, tokenizer = models()
    options = {"assistant_model": draft()} if getattr(strategy, "needs_assistant", False) else {}
    prompts = tokenizer(["json = "] * len(schemas), return_tensors="pt")
    out = model.generate(
        **prompts, strategy=strategy, grammar=[dict(schema) for schema in schemas.values()], do_sample=True, top_k=0,
        temperature=1.0, seed=seed, max_new_tokens=160, return_dict_in_generate=True,
        decoders_config={"compile": compile}, **options,
    )  # fmt: skip
    finished: Counter[str] = Counter()
    new = out.sequences[:, prompts["input_ids"].shape[1] :]
    for (name, schema), tokens, use in zip(schemas.items(), new, out.report.grammars, strict=True):
        if not use.complete:
            continue
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        value = json.loads(text)
        jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker()).validate(value)
        finished[name] += 1
    return finished


@functools.cache
def models() -> Any:
    model, tokenizer = demo.load()
    tokenizer.padding_side = "left"
    return decoders.enable(model, tokenizer=tokenizer), tokenizer


@functools.cache
def draft() -> Any:
    return demo.load("draft")[0]


@functools.cache
def plain(every: int = 1) -> Counter[str]:
    return written("autoregressive", 1, compile=False, every=every)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES[1:], ids=lambda s: getattr(s, "name", s))
def test_a_text_for_each_schema(strategy):
    """All are valid, and the same ones are finished as in plain decoding with that seed."""
    assert written(strategy, 1, compile=False) == plain() and sum(plain().values()) >= 27


def test_a_text_for_every_third_schema():
    # Merged drafts hold the grammar's own; staged ones meet grammars in tests/hf.
    assert written("grammar+prompt_lookup", 1, compile=False, every=3) == plain(3) and sum(plain(3).values()) >= 9


@pytest.mark.slow
def test_ten_thousand_outputs():
    """All strategies in turn until ten thousand texts are finished; every one of them is valid."""
    finished: Counter[str] = Counter()
    for seed in range(3, 3 + 2 * math.ceil(10_000 / len(SCHEMAS))):
        if sum(finished.values()) >= 10_000:
            break
        finished += written(STRATEGIES[seed % len(STRATEGIES)], seed, compile=True)
    assert sum(finished.values()) >= 10_000
    assert set(finished) == set(SCHEMAS) and min(finished.values()) >= 100
