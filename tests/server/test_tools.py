"""Schemas of functions: each its own document, in the grammar of one answer, and what becomes of those that no grammar expresses."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import torch
from jsonschema.validators import Draft202012Validator, validator_for

pytest.importorskip("fastapi")

from decoders.constraints import CallSpec, LLGuidance
from decoders.constraints.base import Language, unpack
from decoders.constraints.constructors import regex
from decoders.constraints.vocabulary import Vocabulary
from decoders.errors import GrammarError
from decoders.server.bodies import Tool
from decoders.server.grammars import Calling

from .test_chat import ASKED, ROUTE, post, style_of

STOP = 256
VOCABULARY = Vocabulary([bytes([byte]) for byte in range(256)] + [None], [STOP])


def closed(p: Any, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"p": p}, "required": ["p"], "additionalProperties": False, **more}


def calling(*functions: dict[str, Any], required: bool = True, format: Any = None) -> Calling:
    tools = [Tool.model_validate_json(json.dumps({"type": "function", "function": each})) for each in functions]
    return Calling(tuple(tools), style_of("<call>", "</call>"), required, False, format=format)


def language(*functions: dict[str, Any], **options: Any) -> Language:
    asked = calling(*functions, **options)
    spec = asked.spec
    if not isinstance(spec, CallSpec):  # calls in phases: the language of one
        return CallSpec(spec.functions, asked.style.format).language()
    return spec.language()


def accepts(language: Language, text: str) -> bool:
    matcher = LLGuidance().compile(language, VOCABULARY).start()
    return matcher.advance([*text.encode()]) == len(text.encode()) and matcher.accepting


def drawn(language: Language, seed: int, most: int = 200) -> str | None:
    """A text of `language`; None if it has not come to its end."""
    matcher, choose, text = LLGuidance().compile(language, VOCABULARY).start(), random.Random(seed), bytearray()
    out = torch.zeros(9, dtype=torch.int32)
    while len(text) < most:
        matcher.fill_mask(out)
        (token,) = choose.choices(unpack(out, 257).nonzero()[:, 0].tolist())
        if token == STOP:
            return text.decode()
        assert matcher.advance([token]) == 1
        text.append(token)
    return None


DOCUMENTS = {
    "$id": closed({"$ref": "#/$defs/N"}, **{"$id": "https://example.com/t.json", "$defs": {"N": {"enum": [1, 2]}}}),
    "the same $id again": closed({"$ref": "t.json#/$defs/N"}, **{"$id": "https://example.com/t.json", "$defs": {"N": {"enum": ["a"]}}}),
    "$id of a definition": closed({"$ref": "#/$defs/N"}, **{"$defs": {"N": {
        "$id": "n.json", "$ref": "#/$defs/K", "$defs": {"K": {"enum": [7]}}}}}),
    "$anchor": closed({"$ref": "#num"}, **{"$defs": {"N": {"$anchor": "num", "enum": [1]}}}),
    "enum of references": closed({"enum": [{"$ref": "#/x"}]}),
    "const of references": closed({"const": {"a": [{"$ref": "#"}], "$defs": 1}}),
    "a property called $ref": closed({"type": "object", "properties": {"$ref": {"const": "#"}}, "required": ["$ref"]}),
    "$recursiveRef": {
        "$schema": "https://json-schema.org/draft/2019-09/schema", "$recursiveAnchor": True, "type": "object",
        "properties": {"v": {"enum": [1]}, "p": {"anyOf": [{"$recursiveRef": "#"}, {"type": "null"}]}},
        "required": ["v", "p"], "additionalProperties": False,
    },
    "draft 7": {
        "$schema": "http://json-schema.org/draft-07/schema#", "$ref": "#/definitions/a", "type": "null",
        "definitions": {"a": closed({"enum": [True]})},
    },
    "no type": {"properties": {"p": {"enum": [1]}}, "required": ["p"]},
    "several types": {"type": ["null", "object"], "properties": {"p": {"enum": [1]}}, "additionalProperties": False},
}  # fmt: skip


@pytest.mark.parametrize("name", DOCUMENTS)
@pytest.mark.parametrize("beside", [False, True])
def test_arguments_are_objects_of_the_functions_own_document(name: str, beside: bool) -> None:
    others = [{"name": f"other{i}", "parameters": DOCUMENTS[other]} for i, other in enumerate(("$id", "$recursiveRef"))]
    functions = [*(others if beside else ()), {"name": "f", "parameters": DOCUMENTS[name], "strict": True}]
    both, ended = language(*functions), 0
    for seed in range(6):
        if (text := drawn(both, seed)) is None:
            continue
        ended += 1
        (call,) = calling(*functions).read(f"<call>{text}", True).calls
        arguments = json.loads(call.arguments)
        schema = next(each["parameters"] for each in functions if each["name"] == call.name)
        assert isinstance(arguments, dict)
        assert validator_for(schema, default=Draft202012Validator)(schema).is_valid(arguments), text
    assert ended


UNIQUE = {"name": "once", "parameters": closed({"type": "array", "items": {"type": "string"}, "uniqueItems": True})}
PLAIN = {"name": "plain", "parameters": closed({"enum": [1, 2]})}


def call(name: str, p: Any) -> str:
    return f'{{"name": "{name}", "arguments": {{"p": {json.dumps(p)}}}'


@pytest.mark.parametrize("strict", [None, False])
@pytest.mark.parametrize("required", [False, True])
def test_function_that_no_grammar_expresses_is_validated_and_named(strict: bool | None, required: bool) -> None:
    both = language(PLAIN, UNIQUE | {"strict": strict}, required=required)
    assert [warning for warning in both.warnings if "is left to" in warning] == [
        "once: $.properties.p: uniqueItems is left to the validation of the finished text."
    ]
    assert accepts(both, call("once", ["a", "a"])) and not accepts(both, call("plain", 3))
    assert both.whole is not None
    both.whole(call("once", ["a", "b"]))
    both.whole(call("plain", 1))
    with pytest.raises(GrammarError, match=r"the arguments of once: .*\$\.p: \[\"a\", \"a\"\] breaks uniqueItems"):
        both.whole(call("once", ["a", "a"]))


def test_strict_function_is_refused_with_its_name() -> None:
    with pytest.raises(GrammarError, match=r"^tools: once: \$\.properties\.p: uniqueItems"):
        language(PLAIN, UNIQUE | {"strict": True})
    with pytest.raises(GrammarError, match=r"^tools: f: .*refers to nothing"):
        language(PLAIN, {"name": "f", "parameters": closed({"$ref": "#/$defs/none"})})


def test_functions_that_are_expressed_need_no_validation() -> None:
    assert language(PLAIN).whole is None
    assert "strict=False" not in str(language(PLAIN | {"strict": False}).warnings)


@pytest.mark.parametrize("pattern", ["a/b", r"a\/b", r"a\\/b", r"a\\\/b", "[/]\n"])
def test_slashes_of_a_format_stay_what_they_are_beside_calls(pattern: str) -> None:
    recursive = {"name": "f", "parameters": {"type": "object", "properties": {"k": {"$ref": "#"}}}}
    both = language(recursive, required=False, format=regex(pattern))
    assert both.regex is None
    text = {"a/b": "a/b", r"a\/b": "a/b", "[/]\n": "/\n"}.get(pattern, "a\\/b")
    assert accepts(both, text) and not accepts(both, text[:-1])
    assert accepts(both, '<call>{"name": "f", "arguments": {"k": {}}}</call>')


@pytest.mark.filterwarnings("ignore:row 0. the arguments of same")
def test_answer_names_what_is_left_to_the_validation_and_what_it_finds(client: Any, stream: Any) -> None:
    same = {"name": "same", "parameters": closed({"const": "x", "pattern": r"\by"})}
    body: dict[str, Any] = {
        "tools": [{"type": "function", "function": same}], "tool_choice": "required", "parallel_tool_calls": False,
        "max_tokens": 120, "temperature": 0, "seed": 1,
    }  # fmt: skip
    (choice,) = post(client, **body)["choices"]
    left, broken = choice["warnings"]
    assert left == "same: $.properties.p: pattern is left to the validation of the finished text."
    assert broken.startswith('the arguments of same: the text is JSON, but not valid: $.p: "x" breaks pattern')
    chunks = stream(client, ROUTE, **ASKED, **body)
    assert [c["warnings"] for chunk in chunks for c in chunk["choices"] if "warnings" in c] == [[left, broken]]
    assert "warnings" not in post(client)["choices"][0]
