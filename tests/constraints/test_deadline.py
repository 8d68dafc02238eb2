"""Compiling ends in time, with an error that says what was too much; lenient schemas leave that out instead."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest
import torch

from decoders.constraints.auto import Auto
from decoders.constraints.base import CompiledGrammar
from decoders.constraints.compiling import Cache
from decoders.constraints.constructors import regex
from decoders.constraints.patterns import automata, ecma
from decoders.constraints.patterns.limits import check, deadline, left, spend
from decoders.constraints.specs import JsonSchema, Lark, Spec
from decoders.constraints.table import determinise
from decoders.constraints.vocabulary import Vocabulary
from decoders.errors import GrammarError
from decoders.settings import RuntimeSettings


class Clock:
    """Time on the processor, which passes when it is asked for: `tick` seconds each time."""

    def __init__(self) -> None:
        self.now, self.tick = 0.0, 0.01

    def __call__(self) -> float:
        self.now += self.tick
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "thread_time", clock)
    return clock


KEYS = {"type": "object", "patternProperties": {f"^.*{letter}.*$": {"type": "integer"} for letter in "abcdefghijkl"}}
PATTERNS = {"type": "string", "allOf": [{"not": {"pattern": f"{letter}.{{9}}$"}} for letter in "abcdefghijkl"]}
FAN_OUT = {"type": "object", "oneOf": [{"properties": {f"p{i}": {"const": 1}, "q": {"const": i}}} for i in range(40)]}


def compiled(spec: Spec, seconds: float | None = None) -> CompiledGrammar:
    vocabulary = Vocabulary([bytes([byte]) for byte in range(256)] + [None], [256])
    return Cache().compiled(spec, vocabulary, Auto(), seconds=seconds).grammar


@pytest.mark.parametrize(
    ("schema", "keywords"), [(KEYS, "patternProperties"), (PATTERNS, "allOf not"), (FAN_OUT, "oneOf properties")]
)
def test_schema_that_takes_too_long_is_refused_with_what_it_was(schema: object, keywords: str, clock: Clock) -> None:
    with pytest.raises(
        GrammarError, match=r"takes longer than 1 s, the setting constraint_seconds.*strict=False"
    ) as caught:
        compiled(JsonSchema(schema), 1)
    assert caught.value.keyword in keywords.split()
    assert caught.value.path is not None


def test_language_of_a_schema_is_bounded_without_a_setting(clock: Clock) -> None:
    with pytest.raises(GrammarError, match="takes longer than 2 s"):
        JsonSchema(KEYS).language()
    assert left() == float("inf")


def test_lenient_schema_leaves_out_what_takes_too_long(clock: Clock) -> None:
    language = JsonSchema({**KEYS, "required": ["x"]}, strict=False).language()
    assert any("patternProperties is left to the validation" in warning for warning in language.warnings)
    assert language.whole is not None
    clock.tick = 0
    language.whole('{"x": 1}')
    with pytest.raises(GrammarError, match="required"):
        language.whole("{}")


def test_table_that_takes_too_long_is_left_to_llguidance() -> None:
    assert compiled(regex("(?:.*a.{3}|b{9})c"), 60).backend == "table"
    assert compiled(regex("(?:.*a.{3}|b{9})c"), 1e-6).backend == "llguidance"


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Child processes get a processor only after a while, as on a busy machine."""
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\nsleep 0.7\nexec "{sys.executable}" "$@"\n')
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))


@pytest.mark.usefixtures("late")
@pytest.mark.skipif(os.name == "nt", reason="no limit of processor time, and no such programs")
def test_children_are_bounded_by_their_time_on_a_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(determinise, "SECONDS", 0.5)
    with deadline(5):
        determinise.determinise("(?:ab|c){9}")
        assert left() > 4.6, "its wait is not counted"
        with ecma.Search() as search:
            assert search.found(r"\bword\b", "a word") and not search.found(r"\bword\b", "swords")
        assert left() > 4.3, "its wait is not counted"
    begin = time.monotonic()
    with pytest.raises(GrammarError, match=r"too large; the limit of backend=\"table\" is 0\.5 s"):
        determinise.determinise("(?:a|b)*a(?:a|b){18}")
    with deadline(0.3), pytest.raises(GrammarError, match="matching a pattern takes longer"), ecma.Search() as search:
        search.found(r"^(\w+\s?)*\b$", "a" * 40 + "!")
    assert time.monotonic() - begin < 30


def test_masks_of_an_ambiguous_grammar_take_a_bounded_time(clock: Clock) -> None:
    matcher = compiled(Lark('start: start start start | start start | "a"')).start()
    out = torch.zeros(9, dtype=torch.int32)
    clock.tick = 0.035
    for _ in range(3):
        matcher.fill_mask(out)
        for _ in range(3):
            assert matcher.advance([ord("a")]) == 1
    with pytest.raises(
        GrammarError, match=r"after 'a+': llguidance gave up: this text has taken 0\.4 s more than 0.005 s"
    ):
        matcher.fill_mask(out)
    assert compiled(Lark('start: start start | "a"')).start().advance([ord("a")] * 40) == 40


def test_setting_has_a_default_and_bounds() -> None:
    assert RuntimeSettings().constraint_seconds == 2
    with pytest.raises(ValueError, match="constraint_seconds"):
        RuntimeSettings(constraint_seconds=0)


def test_time_within_time_is_the_lesser_of_both(clock: Clock) -> None:
    with deadline(10):
        with deadline(100):
            assert left() < 10
        with deadline(2):
            assert left() < 2
            clock.now += 3
            with pytest.raises(GrammarError, match="takes longer than 10 s"):
                check("this")
        assert 6 < left() < 8
        check("this")
        with deadline():
            spend(8)
            assert left() < 0
        with pytest.raises(GrammarError):
            check("this")
    check("this")


def test_matching_is_bounded_by_what_is_left(clock: Clock) -> None:
    ((tree, _),) = ecma.strings("^(a+)+$")
    assert automata.matches(tree, "a" * 1000)
    with pytest.raises(GrammarError, match="matching a pattern takes longer"), deadline(5):
        automata.matches(tree, "a" * 1000)
