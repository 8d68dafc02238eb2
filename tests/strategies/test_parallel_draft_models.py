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
from decoders.strategies import DFlash, Eagle3, PromptLookup, Speculative
from decoders.strategies.merged import Merged
from decoders.strategy import Strategy
from decoders.testing import Replay, decode, prompts, tiny_model
from decoders.testing.conditions import Conditions
from decoders.testing.kit import Check, check_alone
from decoders.testing.models import VOCAB
from decoders.testing.spy import Spy
from decoders.testing.toy_grammar import TokenAutomaton

from . import test_block_heads, test_dflash, test_eagle3
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


#: What drafts several tokens in one pass: a parallel draft model, a parallel head, a block head.
IN_ONE_PASS: dict[str, tuple[Any, Strategy]] = {
    "PARD": (cache(lambda: decoders.enable(tiny_model("llama"))), Speculative(draft_model=saved(), length=4)),
    "P-EAGLE": (test_eagle3.target, Eagle3(head=test_eagle3.newer("parallel"), tree="none", length=4)),
    "DSpark": (test_dflash.target, DFlash(draft_model=test_block_heads.written("dspark"), length=4)),
}


@pytest.mark.parametrize(
    "name, compile",
    [("PARD", False), ("P-EAGLE", False), *(pytest.param(n, True, marks=pytest.mark.slow) for n in IN_ONE_PASS)],
)
def test_greedy_and_drawn_under_grammars_the_tokens_are_those_of_plain_decoding(name: str, compile: bool) -> None:
    target, strategy = IN_ONE_PASS[name]
    model, inputs, stops = target(), prompts(3), [5, 9]
    grammars = [TokenAutomaton.random(3, VOCAB, stops), None, TokenAutomaton.random(4, VOCAB, stops)]
    free: dict[str, Any] = dict(max_new_tokens=10, decoders_config={"compile": compile, "prune": False})
    drawn = dict(do_sample=True, temperature=0.7, top_p=0.9, seed=3, grammar=grammars, eos_token_id=stops)
    for own, options in ((strategy, free), (Merged([PromptLookup(), strategy]), free | drawn)):
        out = decode(model, inputs, own, **options)
        assert torch.equal(out.sequences, decode(model, inputs, "autoregressive", **options).sequences)
        assert out.report.drafted > 10 and (out.report.compiled_steps == out.report.steps) is compile
