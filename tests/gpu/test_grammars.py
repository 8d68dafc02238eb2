"""Grammars of every backend on the device: tables that are walked there, matchers that mask on the host."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

import decoders
from decoders.registry import registry

from .subjects import FUNCTIONS, SAMPLED, subject_of

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "size": {"type": "integer", "minimum": 0, "maximum": 999}},
    "required": ["name", "size"],
    "additionalProperties": False,
}  # fmt: skip


def backends() -> list[str]:
    """Those that compile by themselves: ``table`` and ``llguidance``, and xgrammar where its plugin is installed."""
    return sorted(set(registry().grammar_backends()) - {"auto"})


@pytest.mark.parametrize("rows", [1, 3], ids=["one row", "ragged rows"])
@pytest.mark.parametrize("strategy", ["grammar", "grammar+prompt_lookup", "lookahead", "suffix"])
@pytest.mark.parametrize("backend", backends())
def test_every_strategy_writes_the_constrained_text_of_plain_decoding(
    backend: str, strategy: str, rows: int, device: torch.device
) -> None:
    subject, given = subject_of(strategy, torch.float32, device)
    grammar = decoders.regex(FUNCTIONS, backend=backend)
    for sampling in ({}, SAMPLED):
        call: dict[str, Any] = {**sampling, "grammar": grammar, "max_new_tokens": 24}
        out = subject.decode(rows, given, **call)
        assert torch.equal(out.sequences, subject.decode(rows, "autoregressive", **call).sequences)
        assert {use.backend for use in out.report.grammars} == {backend}
        for text in texts_of(subject, rows, out):
            assert text.startswith("    return a ")


@pytest.mark.parametrize("backend", backends())
def test_json_is_valid_in_every_row(backend: str, device: torch.device) -> None:
    subject, _ = subject_of("grammar", torch.float32, device)
    schema = decoders.json_schema(SCHEMA, backend=backend)
    out = subject.decode(3, "grammar+prompt_lookup", grammar=schema, max_new_tokens=60, **SAMPLED)
    for text, use in zip(texts_of(subject, 3, out), out.report.grammars, strict=True):
        assert use.complete and set(json.loads(text)) == {"name", "size"}


def test_rows_of_different_grammars_share_a_batch(device: torch.device) -> None:
    subject, _ = subject_of("grammar", torch.float32, device)
    grammars = [decoders.json_schema(SCHEMA), None, decoders.regex(FUNCTIONS)]
    call: dict[str, Any] = {"grammar": grammars, "max_new_tokens": 24}
    out = subject.decode(3, "grammar+prompt_lookup", **call)
    assert torch.equal(out.sequences, subject.decode(3, "autoregressive", **call).sequences)


def texts_of(subject: Any, rows: int, out: Any) -> list[str]:
    """The new text of every row."""
    tokenizer, prompt = vars(subject.model)["generate"].tokenizer, subject.inputs[rows]["input_ids"].shape[1]
    return tokenizer.batch_decode(out.sequences[:, prompt:], skip_special_tokens=True)
