"""Designs that compute by the number of tokens in their cache: a row alone is exact, several are where the number does not matter."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import decoders
from decoders.engine.model import self_check
from decoders.engine.model.layout import CountedTokens
from decoders.engine.model.self_check import target_of
from decoders.engine.model.slot_cache import SlotCache
from decoders.errors import ContextLengthError, UnsupportedError
from decoders.testing import Replay, decode, prompts, tiny_model

EAGER = {"compile": False, "prefill_chunk": 8}


def sharpening(**options: Any) -> Any:
    """Queries of texts of 16 tokens and more are scaled."""
    return tiny_model("llama4", floor_scale=16, attn_scale=0.5, **options)


def test_where_the_number_begins_to_matter_is_found() -> None:
    counted = target_of(sharpening()).lengths.counted
    assert counted == CountedTokens(harmless=15, by_node=True)
    later = target_of(tiny_model("llama4", floor_scale=300, attn_scale=0.5)).lengths.counted
    assert later == CountedTokens(harmless=299, by_node=True)
    assert target_of(tiny_model("llama4")).lengths.counted is None  # it begins behind the last position
    assert target_of(tiny_model("opt")).lengths.counted is None  # it asks and does not mind


@pytest.mark.parametrize("branches", [1, 3])
def test_a_row_alone_is_exact_on_both_sides(branches: int) -> None:
    model, inputs = decoders.enable(sharpening()), prompts(1, length=12)
    expected = decode(model, inputs, max_new_tokens=30).sequences
    drafts = Replay(texts=(tuple(expected[0].tolist()),), branches=branches)
    out = decode(model, inputs, drafts, max_new_tokens=30, decoders_config=EAGER)
    assert torch.equal(out.sequences, expected) and out.report.accepted > 10


def test_several_rows_are_exact_before_that_and_refused_behind_it() -> None:
    model, inputs = decoders.enable(tiny_model("llama4", floor_scale=40, attn_scale=0.5)), prompts(2, length=20)
    expected = decode(model, inputs, max_new_tokens=8).sequences
    ours = decode(model, inputs, "prompt_lookup", max_new_tokens=8, decoders_config=EAGER).sequences
    assert torch.equal(ours, expected)
    with pytest.raises(ContextLengthError, match="decode one prompt at a time with generate"):
        decode(model, inputs, "prompt_lookup", max_new_tokens=40, decoders_config=EAGER)


def test_a_scheduler_refuses_texts_that_would_not_be_exact() -> None:
    model = decoders.enable(sharpening())
    with decoders.Scheduler(model, rows=2, slots=128) as scheduler:
        with pytest.raises(ContextLengthError, match="must be equal in all rows"):
            scheduler.submit(torch.arange(5, 25), max_new_tokens=20)
        assert scheduler.submit([5, 6, 7], max_new_tokens=2).result(60).shape[-1] == 5


def test_a_length_scale_that_is_ignored_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SlotCache, "get_seq_length", lambda cache, layer=0: 0)
    with pytest.raises(UnsupportedError, match="differ"):
        target_of(sharpening())


def test_a_window_that_a_design_does_not_keep_bounds_its_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_check, "check_tree_logits", lambda *_: 24)
    model, inputs = decoders.enable(tiny_model("mistral")), prompts(1, length=20)
    decode(model, inputs, "prompt_lookup", max_new_tokens=4, decoders_config=EAGER)
    with pytest.raises(ContextLengthError, match="at most that window, 24 tokens"):
        decode(model, inputs, "prompt_lookup", max_new_tokens=5, decoders_config=EAGER)


@pytest.mark.parametrize("longest, rows, fits", [(9, 4, True), (10, 1, True), (10, 2, False)])
def test_what_fits(longest: int, rows: int, fits: bool) -> None:
    counted = CountedTokens(9, by_node=True)
    if fits:
        counted.check("any", longest, rows)
    else:
        with pytest.raises(ContextLengthError):
            counted.check("any", longest, rows)
