"""Arguments in the notation of a format: what the grammar allows is what is read back, and valid under the schema."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
from jsonschema import Draft202012Validator

pytest.importorskip("fastapi")

from decoders.constraints import Called, CallSpec
from decoders.constraints.patterns.limits import deadline
from decoders.constraints.schemas import raw_text
from decoders.constraints.schemas.kinds import KINDS, Kinds
from decoders.constraints.schemas.raw_text import Parameters, Quoted
from decoders.constraints.tags import Calls
from decoders.errors import GrammarError
from decoders.prompts.templates import format_named

from .test_call_formats import PUBLISHED, grammar_of, tokenizer_of  # noqa: F401 -- a fixture

STRINGS = {"type": "object", "additionalProperties": {"type": "string"}}
LISTS = {
    "properties": {
        "l": {"type": "array", "items": {"type": "string", "maxLength": 2}},
        "o": {"type": "object", "additionalProperties": {"type": "integer"}},
    }
}
EITHER = {
    "properties": {
        "n": {"anyOf": [{"type": "integer", "maximum": 5}, {"type": "string"}]},
        "l": {"anyOf": [{"type": "array", "items": {"type": "integer"}}, {"type": ["null", "string"]}]},
    }
}
BRANCHES = {
    "anyOf": [
        {"properties": {"a": {"type": "integer", "maximum": 3}}, "required": ["a"], "additionalProperties": False},
        {"additionalProperties": {"type": "string"}},
    ]
}
NOT_EMPTY = {"properties": {"a": {"type": "string", "not": {"const": ""}}}}
PLAIN = ("qwen3-coder", "seed-oss", "glm-4.7", "minimax-m2")
CASES = [
    *(
        (name, STRINGS, {f"a{mark}b": "x"}, False)
        for name in ("glm-4.5", "glm-4.7", "gemma4") for mark in PUBLISHED[name][1]
    ),
    *(
        (name, LISTS, {"l": [f"a{mark}"]}, False)
        for name in ("glm-4.5", "glm-4.7", "gemma4") for mark in PUBLISHED[name][1] if "arg" in mark or '"' in mark
    ),
    *((name, LISTS, {"l": ["a\"", "é"], "o": {"k": 1}}, name != "gemma4") for name in ("glm-4.7", "qwen3-coder")),
    *((name, STRINGS, {"é-1": "x", "b": "1"}, True) for name in (*PLAIN, "gemma4")),
    *((name, NOT_EMPTY, {"a": text}, bool(text)) for name in (*PLAIN, "gemma4") for text in ("x", "")),
    *(("gemma4", STRINGS, {f"a{space}b": "x"}, False) for space in "\x1c\x1f\x85\xa0\u2003\ufeff \n"),
    *(("qwen3-coder", STRINGS, {f"a{space}b": "x"}, space != "\n") for space in "\x1c\x85\ufeff \n"),
    *(
        (name, EITHER, arguments, allowed)
        for name in PLAIN
        for arguments, allowed in [
            ({"n": " 7"}, True), ({"n": "7 "}, True), ({"n": "7\n"}, True), ({"n": "\t7"}, True), ({"n": "7"}, False),
            ({"n": 5}, True), ({"n": 7}, False), ({"l": ' ["x"]'}, True), ({"l": '["x"]'}, False), ({"l": [1]}, True),
            ({"l": "null "}, True), ({"l": None}, True),
        ]
    ),
    *(
        (name, BRANCHES, arguments, allowed)
        for name in PLAIN
        for arguments, allowed in [({"a": 2}, True), ({"a": "9"}, False), ({"a": "x"}, True), ({"b": "9", "c": "x"}, True)]
    ),
]  # fmt: skip


@pytest.mark.in_turns
@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize(("name", "schema", "arguments", "allowed"), CASES, ids=lambda value: ascii(value)[:40])
def test_arguments_that_are_allowed_are_read_back(
    name: str, schema: dict[str, Any], arguments: dict[str, Any], allowed: bool, special: bool,
    grammars: Callable[..., Any], tokenizer_of: Callable[..., Any],  # noqa: F811
) -> None:  # fmt: skip
    format = format_named(name)
    grammar, tokenizer = grammars(name, json.dumps(schema), special)
    text = format.written([("f", json.dumps(arguments))])
    tokens = [*tokenizer(text, add_special_tokens=False).input_ids, 1]
    assert (grammar.start().advance(tokens) == len(tokens)) == allowed, text
    if allowed:
        (call,) = format.read(text, {"f": Kinds(json.dumps(schema))}).calls
        assert call.complete and json.loads(call.arguments) == arguments
        assert Draft202012Validator(schema).is_valid(arguments)


@pytest.fixture(scope="module")
def grammars(tokenizer_of: Callable[..., Any]) -> Callable[..., Any]:  # noqa: F811
    """The grammar of one call in a format, and the tokenizer, with special marks or those of text."""
    known: dict[tuple[str, str, bool], Any] = {}

    def of(name: str, schema: str, special: bool) -> Any:
        if (name, schema, special) not in known:
            tokenizer = tokenizer_of(PUBLISHED[name][1], special)
            spec = Calls((Called.of("f", json.loads(schema), True),), format_named(name), True, False)
            known[name, schema, special] = (grammar_of(spec, tokenizer)[0], tokenizer)
        return known[name, schema, special]

    return of


@pytest.mark.parametrize("notation", [Quoted('<|"|>'), Parameters("<p>", "<v>", "</v>")])
def test_names_are_the_same_to_the_grammar_and_to_the_reader(notation: raw_text.Notation) -> None:
    tree, expression = raw_text._tree(f"^{notation.name}$"), re.compile(notation.name)
    for point in (*range(0x3100), *range(0xFE00, 0x10000), 0xFFFFF, 0x100000, 0x10FFFF):
        character = chr(point)
        written = raw_text.automata.matches(tree, character)
        assert written == (expression.fullmatch(character) is not None)
        assert not (written and isinstance(notation, Quoted) and character.isspace())


def test_a_name_with_a_stand_in_is_refused() -> None:
    for name in ("glm-4.7", "gemma4"):
        schema = {"type": "object", "properties": {"a\U00100000": {"type": "string"}}}
        with pytest.raises(GrammarError, match="cannot contain the name"):
            CallSpec((Called.of("f", schema, True),), format_named(name)).language()


@pytest.mark.parametrize("name", ["qwen3-coder", "gemma4"])
def test_a_name_that_a_format_cannot_write_leaves_properties_to_validation(name: str) -> None:
    def language(schema: dict[str, Any], strict: bool | None) -> Any:
        return CallSpec((Called.of("f", schema, strict),), format_named(name)).language()

    schema: dict[str, Any] = {"type": "object", "properties": {"a<b": {"type": "integer"}}}
    assert "f: $: properties is left to the validation of the finished text." in language(schema, None).warnings
    for refused, strict in ((schema, True), (schema | {"required": ["a<b"]}, None)):
        with pytest.raises(GrammarError, match="cannot contain the name 'a<b'"):
            language(refused, strict)


def test_kinds_do_not_grow_with_the_names_that_are_asked_for() -> None:
    kinds = Kinds(json.dumps(BRANCHES | {"properties": {"": {"type": "null"}}}))
    assert (kinds["a"], kinds["b"]) == ({"number", "string"}, {"string"})
    known = len(kinds._known)
    assert all(kinds[f"b{i}"] == {"string"} for i in range(100)) and kinds[""] == {"string"}
    assert len(kinds._known) == known
    assert Kinds("{}")["a"] == KINDS


def test_kinds_follow_plain_pointers_only() -> None:
    for reference, kinds in (("#/$defs/a~1b", {"string"}), ("#named", KINDS), ("other.json", KINDS), (5, KINDS)):
        schema = {"type": "object", "$defs": {"a/b": {"type": "string"}}, "properties": {"a": {"$ref": reference}}}
        assert Kinds(json.dumps(schema))["a"] == kinds, reference
    inner = {"$defs": {"a": {"type": "string"}, "b": {"$id": "b"}}, "properties": {"a": {"$ref": "#/$defs/a"}}}
    assert Kinds(json.dumps(inner))["a"] == KINDS


class Clock:
    """Time on the processor, which passes when it is asked for."""

    def __init__(self, tick: float) -> None:
        self.now, self.tick = 0.0, tick

    def __call__(self) -> float:
        self.now += self.tick
        return self.now


@pytest.mark.parametrize("name", ["qwen3-coder", "gemma4"])
def test_many_listed_values_are_written_in_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    values = [*(f"{i:03}{'x' * 95}" for i in range(200)), "a</parameter>", 'a<|"|>', "7", None, 1]
    schema = {"type": "object", "properties": {"a": {"enum": values}}}
    monkeypatch.setattr(time, "thread_time", Clock(2e-4))  # one look at the clock for each character is too much
    language = CallSpec((Called.of("f", schema, None),), format_named(name)).language()
    assert not [warning for warning in language.warnings if "enum is left" in warning]


def test_an_expression_that_took_too_long_once_is_written_when_there_is_time(monkeypatch: pytest.MonkeyPatch) -> None:
    conditions = ((raw_text._tree("^[a-c]+once$"), True),)
    clock = Clock(1.0)
    monkeypatch.setattr(time, "thread_time", clock)
    with deadline(0.5), pytest.raises(GrammarError, match="takes longer"):
        raw_text._inside(conditions, 0, None)
    clock.tick = 0.0
    with deadline(0.5):
        assert raw_text._inside(conditions, 0, None) is not None
