"""Draft models that were trained to draft several tokens in one pass (PARD)."""

from __future__ import annotations

import tempfile
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import decoders
from decoders.strategies import Speculative
from decoders.strategies.merged import Merged
from decoders.strategy import Strategy
from decoders.testing import Replay, decode, prompts, tiny_model
from decoders.testing.conditions import Conditions
from decoders.testing.kit import Check, check_alone
from decoders.testing.models import VOCAB
from decoders.testing.spy import Spy
from decoders.testing.toy_grammar import TokenAutomaton

from .conftest import of_shapes

MASK = 7


@cache
def parallel() -> PreTrainedModel:
    """A small model that calls itself one."""
    model = tiny_model("llama", seed=5)
    model.config.pard_token = MASK
    return model


@torch.no_grad()
def places(text: Tensor, length: int) -> list[int]:
    """What the model says at the last token and behind it, over masks."""
    read = torch.cat([text, torch.full((length - 1,), MASK)])
    return parallel()(read[None]).logits[0, -length:].argmax(-1).tolist()


@pytest.mark.parametrize("merged", [False, True], ids=["alone", "merged"])
@pytest.mark.parametrize("length", [1, 4])
def test_drafts_are_what_one_pass_over_masks_says(length: int, merged: bool) -> None:
    model, inputs = decoders.enable(tiny_model("llama")), prompts(3)
    plain = decode(model, inputs, "autoregressive", max_new_tokens=12)
    texts = [row[mask.argmax() :] for row, mask in zip(plain.sequences, inputs["attention_mask"], strict=True)]
    spy = Spy(Speculative(draft_model=parallel(), length=length))
    known = Replay(texts=tuple(tuple(text.tolist()) for text in texts), length=6, wrong_every=4)
    out = decode(model, inputs, Merged([known, spy]) if merged else spy, max_new_tokens=12)
    assert torch.equal(out.sequences, plain.sequences)
    for step in spy.seen:
        for row, text in enumerate(texts):
            if not step.finished[row]:
                assert step.draft.tokens[row].tolist() == places(text[: step.lengths[row]], length)


def test_a_chain_takes_two_passes_and_a_grammar_goes_token_by_token() -> None:
    model, inputs = decoders.enable(tiny_model("llama")), prompts(1)

    def passes(**options: Any) -> float:
        strategy = Speculative(draft_model=parallel(), length=5)
        report = decode(model, inputs, strategy, max_new_tokens=12, **options).report
        return report.stages[0].passes / report.steps

    assert passes() == 2
    assert passes(grammar=TokenAutomaton.anything(VOCAB)) == 5


_folder = tempfile.TemporaryDirectory(prefix="parallel-draft-")


@cache
def saved() -> str:
    parallel().save_pretrained(_folder.name)
    return _folder.name


SHAPES: dict[Strategy, tuple[str, ...]] = {Speculative(draft_model=saved(), length=4): ("check_on_device",)}


@pytest.mark.parametrize("strategy, check", of_shapes(SHAPES))
def test_strategy_conforms(strategy: Speculative, check: Check) -> None:
    check_alone(check, Conditions(models=("llama",)), strategy)
