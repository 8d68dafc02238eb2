"""A grammar of each kind that is too large: the error says which part is, what the limit is, and what to write instead."""

from __future__ import annotations

from typing import Any

import pytest

import decoders
from decoders.constraints import CompiledGrammar, Spec
from decoders.constraints.auto import Auto
from decoders.constraints.compiling import Cache
from decoders.constraints.constructors import choice
from decoders.constraints.llguidance import source
from decoders.constraints.llguidance.backend import LLGuidance
from decoders.constraints.patterns import limits as patterns
from decoders.constraints.schemas import limits as schemas
from decoders.constraints.specs import CHOICES_LIMIT
from decoders.constraints.vocabulary import Vocabulary
from decoders.errors import GrammarError

MANY = {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(schemas.PROPERTIES + 1)}}
WIDE = {"properties": {"kind": {"enum": [f"v{i}" for i in range(schemas.VALUES + 1)]}}}
COPIES = {"properties": {"code": {"type": "string", "pattern": "(ab?){1500}c{1500}", "maxLength": 9}}}
SLOW = {"type": "object", "patternProperties": {f"^.*a{i}.*b.*$": {"type": "integer"} for i in range(40)}}

KINDS: dict[str, tuple[Any, str, str]] = {
    "properties": (lambda: decoders.json_schema(MANY), r"\$: properties: an object of 2,001 properties", "additionalProperties"),
    "values": (lambda: decoders.json_schema(WIDE), r"\$\.properties\.kind: enum: an enumeration of 20,001", "the values share"),
    "pattern": (lambda: decoders.json_schema(COPIES), r"\$\.properties\.code: pattern: the pattern '\(ab", r"repeat with \* or \+"),
    "time": (lambda: decoders.json_schema(SLOW), r"\$.*: patternProperties: .*0\.05 s, the setting constraint_seconds", "strict=False"),
    "regex": (lambda: decoders.regex("a" * 3001, backend="llguidance"), r"regex aaa.*\D3,000 that", "classes of characters"),
    "repetition": (lambda: decoders.regex("(ab){1000000}"), r"'\{1000000\}' at character 4", "the limit is 99,999"),
    "choice": (lambda: choice(["b", "a" * (CHOICES_LIMIT + 1)]), "the longest is number 1, of 5,000,001", "that they share"),
    "choices": (lambda: choice(map(str, range(90_000))), "choice of '0', '1', '2', ….*524,288", "the pattern that they share"),
    "Lark": (
        lambda: decoders.grammar('start: small long\nsmall: "a"\nlong: ' + " | ".join(["/[a-z]+/"] * 60_000)),
        "the longest of its 3 lines, 'long', has",
        "fewer rules",
    ),
    "nested terminals": (
        lambda: decoders.grammar("start: T0\n" + "".join(f"T{i}: T{i + 1}\n" for i in range(600)) + 'T600: "a"'),
        "terminals are nested 602 deep",
        "the limit is 500",
    ),
    "EBNF": (lambda: decoders.grammar('root ::= "a"{1,9}'), "no rule `start", "write `name: …` for `name ::= …`"),
    "tags": (lambda: decoders.tagged({"<a>": (decoders.json_schema(MANY), "</a>")}), "an object of 2,001", "additionalProperties"),
    "after": (lambda: decoders.after("</think>", decoders.json_schema(WIDE)), r"\$\.properties\.kind: enum", "the values share"),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_grammar_that_is_too_large_says_which_part_is_and_what_to_write_instead(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, part, instead = KINDS[kind]
    if kind == "regex":  # long ones take long to read
        monkeypatch.setattr(source, "LONGEST", 3000)
    vocabulary = Vocabulary([bytes([byte]) for byte in range(256)] + [None], [256])

    def compile(spec: Spec) -> CompiledGrammar:
        backend = LLGuidance() if spec.backend == "llguidance" else Auto()
        return Cache().compiled(spec, vocabulary, backend, seconds=0.05 if kind == "time" else 20).grammar

    with pytest.raises(GrammarError, match=part) as caught:
        make().compiled(vocabulary, compile)
    assert caught.match(instead) and len(str(caught.value)) < 600


def test_every_limit_of_a_size_has_something_to_write_instead() -> None:
    named = {
        name for module in (patterns, schemas) for name in vars(module) if name.isupper() and not name.startswith("_")
    }
    said_elsewhere = {"SECONDS", "INDENTED", "REGEX_CHARACTERS", "REGEX_COPIES", "INSTEAD", "BOUNDED", "PATIENCE"}
    assert named - said_elsewhere == patterns.INSTEAD.keys()
