"""Strategies whose drafts are cut, or not asked for, where they do not pay: they are told so, and go on drafting well."""

from __future__ import annotations

import itertools
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file

import decoders
from decoders.context import Context
from decoders.costs import Trials
from decoders.costs.worth import DraftWorth
from decoders.strategies import DFlash, Ngram, PromptLookup, Speculative, Suffix, TokenRecycling
from decoders.strategies.auto_candidates import Candidate, Experience
from decoders.strategies.feature_drafter import ReadsFeatures
from decoders.strategies.merged import Merged
from decoders.strategy import Draft, Sequences, Step, Strategy
from decoders.testing import Replay, decode, prompts, tiny_model

from . import test_block_heads as block_heads
from .conftest import needs_mtp
from .test_feature_rows import a_dflash, an_eagle, an_mtp

PRUNED = {"compile": False, "prune": True, "memory": False}


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a draft half is verified, then it is not asked for, then one token is, then all, then nothing."""
    steps = [1]

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
    model = decoders.enable(tiny_model("llama"))
    options: dict[str, Any] = {"assistant_model": tiny_model("llama")} if strategy.needs_assistant else {}
    for rows in (1, 3):
        plain = decode(model, prompts(rows), "autoregressive", max_new_tokens=40)
        out = decode(model, prompts(rows), strategy, max_new_tokens=40, decoders_config=PRUNED, **options)
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
    layers: None = None


def test_auto_shows_a_sleeping_candidate_no_steps_that_it_can_miss() -> None:
    for misses, wait, asked, shown in (
        (True, 0, False, 1),
        (True, 64, False, 0),
        (True, 64, True, 1),
        (False, 64, False, 1),
    ):
        strategy = Learner(misses)
        candidate = Candidate(
            1, strategy, None, 8, Experience(runs=2, trials=Trials(wait=wait)), iter(range(99)).__next__
        )
        candidate.requested_depth = int(asked)
        candidate.observe(cast(Step, Shown()), own_nodes=0)
        assert strategy.calls == ["observe"] * shown, (misses, wait, asked)
        assert candidate.experience.learning == (1 if misses and shown else 0)


def test_verifying_what_it_alone_proposed_counts_against_a_candidate() -> None:
    candidate = Candidate(1, Learner(False), None, 8, Experience(runs=2, cost=0.001), iter(range(99)).__next__)
    candidate.requested_depth = 1
    candidate.judge(0.5, verifying=0.002, rate=100.0)
    assert candidate.experience.trials.net == pytest.approx(0.5 - 100 * 0.003)
    candidate.judge(0.0, verifying=0.02, rate=100.0)
    assert candidate.experience.trials.wait == 1


@pytest.mark.parametrize(
    "make, helped",
    [(a_dflash, False), (an_eagle, True), pytest.param(an_mtp, True, marks=needs_mtp)],
    ids=["dflash", "eagle3, merged", "mtp, merged"],
)
def test_a_network_that_was_left_out_of_steps_has_read_every_token(
    make: Any, helped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its drafts are those of a call that begins at that place. Merged with right drafts, steps commit more than a window holds."""
    model, own = make(length=2, tree="none")
    inputs, steps = prompts(3), itertools.count()
    drafts: list[tuple[list[int], list[bool], list[list[int]]]] = []
    propose = ReadsFeatures.propose

    def noted(self: ReadsFeatures, state: Any, sequences: Sequences) -> Draft:
        draft = propose(self, state, sequences)
        drafts.append((sequences.length.tolist(), sequences.finished.tolist(), draft.tokens.tolist()))
        return draft

    monkeypatch.setattr(ReadsFeatures, "propose", noted)
    monkeypatch.setattr(DraftWorth, "due", lambda worth: next(steps) % 9 in (0, 7))
    monkeypatch.setattr(DraftWorth, "nodes", lambda worth, draft, *_: draft.tokens.shape[1])
    plain = decode(model, inputs, "autoregressive", max_new_tokens=32).sequences
    texts = [row[mask.argmax() :] for row, mask in zip(plain, inputs["attention_mask"], strict=True)]
    known = Replay(texts=tuple(tuple(text.tolist()) for text in texts), length=9, wrong_every=11)
    out = decode(model, inputs, Merged([known, own]) if helped else own, max_new_tokens=32, decoders_config=PRUNED)
    assert torch.equal(out.sequences, plain)
    late, compared = drafts[2:], 0
    assert len(late) < out.report.steps / 2
    for lengths, finished, tokens in late:
        for row, text in enumerate(texts):
            if not finished[row]:
                drafts.clear()
                begun = text[None, : lengths[row]]
                decode(
                    model, {"input_ids": begun, "attention_mask": torch.ones_like(begun)}, own, max_new_tokens=1,
                    decoders_config=PRUNED | {"prune": False},
                )  # fmt: skip
                assert drafts[0][2][0] == tokens[row]
                compared += 1
    assert compared > 3


class ByGrade(DFlash):
    """A draft token that its head calls unlikely is never right, another one always: until the text says otherwise."""

    name = "by_grade"
    grade_rates = (0.0, 1.0, 1.0, 1.0, 1.0)


@pytest.mark.parametrize("bias, verified", [(-100.0, False), (100.0, True)], ids=["unsure", "sure"])
def test_what_a_confidence_head_calls_unlikely_is_not_verified(bias: float, verified: bool, tmp_path: Path) -> None:
    folder = shutil.copytree(block_heads.written("dspark gated"), tmp_path / "head")
    weights = load_file(folder / "model.safetensors")
    weights["confidence_head.proj.bias"].fill_(bias)
    save_file(weights, folder / "model.safetensors")
    model, inputs = block_heads.target(), prompts(3)
    strategy = ByGrade(draft_model=str(folder))
    out = decode(model, inputs, strategy, max_new_tokens=6, decoders_config=PRUNED)
    assert torch.equal(out.sequences, decode(model, inputs, "autoregressive", max_new_tokens=6).sequences)
    assert (out.report.drafted > 0) is verified
