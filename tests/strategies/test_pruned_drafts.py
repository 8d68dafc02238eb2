"""Strategies whose drafts are cut, or not asked for, where rows share a step: they are told so, and go on drafting well."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch

import decoders
from decoders.context import Context
from decoders.costs import Looks
from decoders.costs.worth import DraftWorth
from decoders.strategies import Ngram, PromptLookup, Speculative, Suffix, TokenRecycling
from decoders.strategies.auto_candidates import Candidate, Experience
from decoders.strategy import Draft, Sequences, Step, Strategy
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
        pytest.param(Speculative(), marks=pytest.mark.slow),
        pytest.param(Speculative(tree="static"), marks=pytest.mark.slow),
        Speculative(tree="dynamic"),
        Suffix(),
        pytest.param(TokenRecycling(), marks=pytest.mark.slow),
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


class Learner(Strategy):
    """Says in which steps it was asked and in which it was shown what became of them."""

    name = "learner"
    rests = True

    def __init__(self, misses: bool) -> None:
        super().__init__()
        self.misses_steps, self.calls = misses, []

    def start(self, context: Context) -> None: ...

    def propose(self, state: None, sequences: Sequences) -> Draft:
        self.calls.append("propose")
        return Draft.chain(sequences.last)

    def observe(self, state: None, step: Step) -> None:
        self.calls.append("observe")


@pytest.mark.usefixtures("scripted")
@pytest.mark.parametrize("misses", [False, True])
def test_what_misses_steps_is_not_shown_those_that_it_is_left_out_of(misses: bool) -> None:
    strategy = Learner(misses)
    out = decode(decoders.enable(tiny_model("llama")), prompts(3), strategy, max_new_tokens=16, decoders_config=PRUNED)
    asked = strategy.calls.count("propose")
    assert asked < out.report.steps
    assert strategy.calls.count("observe") == (asked if misses else out.report.steps)


@dataclass
class Shown:
    """As much of a step as `auto` writes into."""

    own_nodes: int = 0


def test_auto_shows_a_sleeping_candidate_no_steps_that_it_can_miss() -> None:
    for misses, wait, asked, shown in (
        (True, 0, False, 1),
        (True, 64, False, 0),
        (True, 64, True, 1),
        (False, 64, False, 1),
    ):
        strategy = Learner(misses)
        candidate = Candidate(
            1, strategy, None, 8, Experience(runs=2, looks=Looks(wait=wait)), iter(range(99)).__next__
        )
        candidate.requested_depth = int(asked)
        candidate.observe(cast(Step, Shown()), own_nodes=0)
        assert strategy.calls == ["observe"] * shown, (misses, wait, asked)
        assert candidate.experience.learning == (1 if misses and shown else 0)


def test_verifying_what_it_alone_proposed_counts_against_a_candidate() -> None:
    candidate = Candidate(1, Learner(False), None, 8, Experience(runs=2, cost=0.001), iter(range(99)).__next__)
    candidate.requested_depth = 1
    candidate.judge(0.5, verifying=0.002, rate=100.0)
    assert candidate.experience.looks.net == pytest.approx(0.5 - 100 * 0.003)
    candidate.judge(0.0, verifying=0.02, rate=100.0)
    assert candidate.experience.looks.wait == 1
