"""Texts drawn from the masks of compiled schemas: all are valid, and both backends have the same masks."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema.validators import Draft202012Validator

from decoders.constraints.base import CompiledGrammar, mask_words, unpack
from decoders.constraints.llguidance import LLGuidance
from decoders.constraints.specs import JsonSchema
from decoders.constraints.table import Table
from decoders.constraints.vocabulary import Vocabulary
from decoders.errors import GrammarError

from .test_soundness import SCHEMAS

MERGED = [b'":', b'", "', b'{"', b'"}', b'"a"', b"00", b"0.", b"ab", b"\xa9", b"]}", b"null"]
STOP = 256
VOCABULARY = Vocabulary([*(bytes([byte]) for byte in range(256)), None, *MERGED], stops=[STOP])
#: What makes texts that say much: few names, so that keys repeat, digits, and what ends strings and lists.
LIKELY = {
    **dict.fromkeys(b'abx"', 6.0),
    **dict.fromkeys(b",]}[{", 5.0),
    **dict.fromkeys(b"0123456789.-", 4.0),
    STOP: 20.0,
}
ENDING = {**dict.fromkeys(b'"]}', 60.0), STOP: 300.0}


def drawn(grammars: list[CompiledGrammar], chance: random.Random) -> str | None:
    """A text, token by token from the masks of all, which are the same; None if it does not end soon."""
    matchers = [grammar.start() for grammar in grammars]
    text, size = b"", chance.choice([0, 4, 12, 30])
    for step in range(size + 200):
        masks = torch.zeros(len(matchers), mask_words(len(VOCABULARY)), dtype=torch.int32)
        for matcher, out in zip(matchers, masks, strict=True):
            matcher.fill_mask(out)
        legal = unpack(masks, len(VOCABULARY))
        assert (legal == legal[0]).all(), f"after {text!r}: {[row.nonzero().flatten().tolist() for row in legal]}"
        ways = legal[0].nonzero().flatten().tolist()
        assert ways, f"after {text!r}: a dead end"
        weights = ENDING if step > size else LIKELY
        token = chance.choices(ways, [weights.get(way, 2.0 if way > STOP else 0.2) for way in ways])[0]
        assert all(matcher.advance([token]) == 1 for matcher in matchers)
        if token == STOP:
            return text.decode()
        text += VOCABULARY.tokens[token] or b""
    return None


def check(schema: Any, seed: int, tables: bool) -> None:
    """Draws some texts; `tables`: from both backends, where both read the schema."""
    chance, validator = random.Random(seed), Draft202012Validator(schema)
    try:
        language = JsonSchema(schema).language()
        grammars: list[CompiledGrammar] = [LLGuidance().compile(language, VOCABULARY)]
    except GrammarError:
        return
    if tables and language.regex is not None:
        try:
            grammars.append(Table().compile(language, VOCABULARY))
        except GrammarError as refusal:
            assert "limit" in str(refusal)
    for _ in range(4):
        text = drawn(grammars, chance)
        assert text is None or validator.is_valid(json.loads(text)), text


TOO_MUCH = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]


@settings(suppress_health_check=TOO_MUCH)
@given(SCHEMAS, st.integers(0, 10_000))
def test_whatever_is_drawn_is_valid(schema: Any, seed: int) -> None:
    check(schema, seed, tables=seed % 4 == 0)


@pytest.mark.slow
@settings(max_examples=2_000, deadline=None, suppress_health_check=TOO_MUCH)
@given(SCHEMAS, st.integers(0, 10_000))
def test_whatever_is_drawn_at_length_is_valid(schema: Any, seed: int) -> None:
    check(schema, seed, tables=seed % 4 == 0)
