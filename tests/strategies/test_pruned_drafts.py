"""Strategies whose drafts are cut, or not asked for, where rows share a step: they are told so, and go on drafting well."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import decoders
from decoders.draft import Draft
from decoders.engine.worth import DraftWorth
from decoders.strategies import Ngram, PromptLookup, Speculative, Suffix, TokenRecycling
from decoders.strategy import Step, Strategy
from decoders.testing import decode, prompts, tiny_model

PRUNED = {"compile": False, "prune": True, "memory": False}


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a draft half is verified, then it is not asked for, then one token is, then all, then nothing."""
    steps = [0]

    def nodes(worth: DraftWorth, draft: Draft, *_: Any) -> int:
        return (0, draft.tokens.shape[1] // 2, 1, draft.tokens.shape[1])[steps[0] % 4]

    def due(worth: DraftWorth) -> bool:
        steps[0] += 1
        return steps[0] % 4 != 2

    monkeypatch.setattr(DraftWorth, "nodes", nodes)
    monkeypatch.setattr(DraftWorth, "due", due)


@pytest.mark.usefixtures("scripted")
@pytest.mark.parametrize(
    "strategy",
    [
        Speculative(),
        Speculative(tree="static"),
        Speculative(tree="dynamic"),
        Suffix(),
        TokenRecycling(),
        PromptLookup(branches=2),
        Ngram(),
    ],
    ids=str,
)
def test_the_tokens_are_the_same(strategy: Strategy) -> None:
    model, inputs = decoders.enable(tiny_model("llama")), prompts(3)
    plain = decode(model, inputs, "autoregressive", max_new_tokens=40)
    options: dict[str, Any] = {"assistant_model": tiny_model("llama")} if strategy.needs_assistant else {}
    out = decode(model, inputs, strategy, max_new_tokens=40, decoders_config=PRUNED, **options)
    assert torch.equal(out.sequences, plain.sequences)


@pytest.mark.usefixtures("scripted")
@pytest.mark.parametrize("tree", ["none", "static", "dynamic"])
def test_a_draft_model_that_is_the_target_stays_right(tree: str) -> None:
    """Its cache holds what was committed, however much of its drafts was verified."""
    model, inputs = decoders.enable(tiny_model("llama")), prompts(3)
    out = decode(
        model,
        inputs,
        Speculative(tree=tree),
        max_new_tokens=40,
        decoders_config=PRUNED,
        assistant_model=tiny_model("llama"),
    )
    if tree == "none":
        assert out.report.accepted > 0 and out.report.drafted - out.report.accepted <= 3 * 5  # cut where rows end
    assert out.report.steps < 40


@pytest.mark.usefixtures("scripted")
def test_a_strategy_is_told_how_much_of_its_draft_was_verified() -> None:
    seen: list[tuple[int | None, int]] = []

    class Told(Suffix):
        def propose(self, state: Any, sequences: Any) -> Draft:
            rows = len(sequences.length)
            return Draft.chain(torch.full((rows, 4), 5))

        def observe(self, state: Any, step: Step) -> None:
            seen.append((step.own_nodes, step.nodes.shape[1]))

    model, inputs = decoders.enable(tiny_model("llama")), prompts(3)
    decode(model, inputs, Told(), max_new_tokens=8, decoders_config=PRUNED)
    assert seen[:4] == [(3, 3), (0, 1), (None, 5), (1, 1)]
