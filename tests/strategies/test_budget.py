"""Drafts are as large as a step's measured costs allow, where nothing else is set."""

from __future__ import annotations

from typing import Any

import pytest

import decoders
from decoders.costs import StepCosts, node_budget
from decoders.engine.decode.calibration import Calibrator
from decoders.strategies import (
    Autoregressive,
    DFlash,
    Eagle3,
    Lookahead,
    Medusa,
    PromptLookup,
    Speculative,
    Staged,
    Threshold,
)
from decoders.strategies.eagle3 import Eagle3Drafter
from decoders.strategies.lookahead import BlockShape, block_shape
from decoders.strategies.merged import Merged, MergedSettings
from decoders.strategy import Strategy
from decoders.testing import decode, prompts, tiny_model

from . import test_dflash, test_eagle3
from .conftest import curve, random_heads

EAGER = {"compile": False}

FLAT = {1: 10.0, 65: 10.5}
"""Milliseconds by nodes: a step in which nodes are all but free."""
STEEP = {1: 10.0, 65: 202.0}
"""Each node costs nearly a third of a step."""


class Costs:
    """The part of a context that budgets read."""

    def __init__(self, milliseconds: dict[int, float] | None) -> None:
        self.known = None if milliseconds is None else StepCosts(curve(milliseconds), rows=1, context=64)

    def costs(self) -> StepCosts | None:
        return self.known


def budget(milliseconds: dict[int, float] | None, *arguments: Any, **more: Any) -> int:
    return node_budget(Costs(milliseconds).costs, *arguments, **more)


def test_what_is_set_by_hand_comes_before_costs_and_costs_before_constants():
    assert budget(STEEP, 50, 20) == 50
    assert budget(STEEP, None, 20) == 4  # the least
    assert budget({1: 10.0, 65: 42.0}, None, 20) == 8  # eleven nodes take half as long again
    assert budget(FLAT, None, 20) == 128  # twice what was measured, and no more
    assert budget(FLAT, None, 20, most=33) == 32
    assert budget(None, None, 20) == 20


@pytest.mark.parametrize(
    "milliseconds, settings, shape",
    [
        (None, {}, (2, 8, 2)),
        (STEEP, {}, (2, 2, 2)),  # narrow n-grams keep the window that finds them
        (FLAT, {}, (9, 8, 9)),
        ({1: 10.0, 65: 15.0}, {}, (5, 8, 4)),
        ({1: 10.0, 65: 15.0}, {"ngram": 3}, (15, 3, 15)),
        ({1: 10.0, 65: 15.0}, {"window": 2}, (2, 8, 7)),
        ({1: 10.0, 65: 15.0}, {"candidates": 3}, (6, 8, 3)),
        (FLAT, {"window": 3, "ngram": 4, "candidates": 5}, (3, 4, 5)),
        (None, {"window": 3}, (3, 8, 2)),
    ],
)
def test_the_lookahead_block_fills_what_a_step_affords(milliseconds, settings, shape):
    assert block_shape(Costs(milliseconds), Lookahead(**settings).settings) == BlockShape(*shape)  # type: ignore[arg-type]


def nodes(
    monkeypatch: pytest.MonkeyPatch, strategy: Strategy, milliseconds: dict[int, float] | None, model: Any = None
) -> int:
    """Nodes of the largest block of a call whose model has such a cost curve."""
    known = None if milliseconds is None else curve(milliseconds)
    monkeypatch.setattr(Calibrator, "known", lambda *_: known)
    model = model or decoders.enable(tiny_model("llama"))
    draft = {"assistant_model": tiny_model("llama")} if strategy.needs_assistant else {}
    expected = decode(model, prompts(1), max_new_tokens=20).sequences
    out = decode(model, prompts(1), strategy, max_new_tokens=20, decoders_config=EAGER, **draft)
    assert out.sequences.equal(expected)
    return out.report.nodes


@pytest.mark.parametrize(
    "strategy, plain, steep",
    [
        (Speculative(tree="dynamic", length=4), 25, 4),
        (Speculative(tree="static", length=4), 25, 4),
        (Threshold(threshold=1e-30, lowest=1e-30), 17, 4),
        pytest.param(Threshold(tree="dynamic", max_length=4), 25, 4, marks=pytest.mark.slow),
        (Staged(), 37, 4),
        (Merged([PromptLookup(length=40, branches=2), Speculative(length=3)]), 64, 4),
    ],
    ids=lambda value: value.name if isinstance(value, Strategy) else str(value),
)
def test_blocks_are_as_large_as_a_step_affords(monkeypatch, strategy, plain, steep):
    assert nodes(monkeypatch, strategy, None) == plain
    assert nodes(monkeypatch, strategy, STEEP) == steep


@pytest.mark.parametrize(
    "settings, plain, steep",
    [({}, (25, 5), (4, 3)), ({"tree": "none", "length": 5}, (6, 5), (6, 5))],
    ids=["tree", "set by hand"],
)
def test_a_head_makes_as_many_passes_as_a_step_affords(monkeypatch, settings, plain, steep):
    """In every round one for each level of its draft."""
    passes: list[int] = []
    root, further = Eagle3Drafter.root, Eagle3Drafter.further

    def first(self):
        passes.append(1)
        return root(self)

    def next_(self, *arguments):
        passes[-1] += 1
        return further(self, *arguments)

    monkeypatch.setattr(Eagle3Drafter, "root", first)
    monkeypatch.setattr(Eagle3Drafter, "further", next_)
    strategy = Eagle3(head=test_eagle3.written("authors"), layers=(0, 2, 4), **settings)
    for costs, (most, levels) in ((None, plain), (STEEP, steep)):
        assert nodes(monkeypatch, strategy, costs, test_eagle3.target()) == most
        assert set(passes) == {levels}
        passes.clear()


def test_a_block_is_as_long_as_a_step_affords(monkeypatch):
    model, strategy = test_dflash.target(), DFlash(draft_model=test_dflash.written("authors"))
    assert nodes(monkeypatch, strategy, None, model) == 6
    assert nodes(monkeypatch, strategy, STEEP, model) == 4


def test_a_window_is_not_cut_by_what_a_step_affords(monkeypatch):
    parts = [PromptLookup(length=8), Lookahead(window=4, ngram=3, candidates=3)]
    assert nodes(monkeypatch, Merged(parts), STEEP) == 4 + 7  # three draft tokens, then the window less its root
    assert nodes(monkeypatch, Merged(parts, MergedSettings(nodes=16)), STEEP) == 16


def test_a_medusa_tree_is_cut_to_what_a_step_affords(monkeypatch):
    strategy = Medusa(heads=random_heads())
    assert nodes(monkeypatch, strategy, STEEP) == 4 < nodes(monkeypatch, strategy, None)


@pytest.mark.parametrize("rows", [1, 2])
def test_equal_calls_have_equal_budgets(monkeypatch, rows):
    """What a call has left behind, such as how its last block was padded, is not what the next one reckons with."""
    monkeypatch.setattr(Calibrator, "known", lambda *_: curve({1: 10.0, 3: 16.0, 65: 42.0}))
    model, budgets = decoders.enable(tiny_model("llama")), []

    class Reckons(Autoregressive):
        def start(self, context: Any) -> None:
            budgets.append(node_budget(context.costs, None, 20))

    for _ in range(2):
        decode(model, prompts(rows), Reckons(), max_new_tokens=4, decoders_config=EAGER)
    assert budgets == [4, 4]  # a step without a draft has one node in each row
