"""The calibrated threshold, on clocks made by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from decoders.strategies import Threshold
from decoders.strategies.threshold import ENOUGH, CalibratedThreshold
from decoders.strategy import HostStep
from decoders.testing import assert_same_tokens, decode, prompts


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def step(
    clock: Clock, c: CalibratedThreshold, draft: float, verify: float, nodes: int, emitted: int, **known: Any
) -> Any:
    """One step of as many passes as draft tokens; gives the threshold."""
    rows = c.rows
    c.drafting()
    clock.now += draft * (nodes - 1)
    c.drafted(c._passes + nodes - 1)
    clock.now += verify
    accepted = known.get("accepted", emitted - rows)
    expected = torch.tensor(float(known.get("expected", accepted)))
    read = HostStep([accepted, *[0] * (rows - 1)], [[7] * emitted, *([] for _ in range(rows - 1))])
    seen: Any = SimpleNamespace(read=lambda: read, nodes=torch.zeros(rows, nodes))
    return c.threshold(seen, expected)


def test_nothing_is_said_while_too_little_is_known(clock):
    c = CalibratedThreshold(1, clock)
    known = [step(clock, c, 0.001, 0.01, nodes, 2) for nodes in (3, 4, 5, 6, 7)]
    assert known[:ENOUGH] == [None] * ENOUGH and None not in known[ENOUGH:], "the first step does not count"


@pytest.mark.parametrize("rows", [1, 4])
def test_the_threshold_is_the_price_of_a_draft_token_in_tokens(clock, rows):
    """A pass takes 1 ms and a node 0.5 ms of a target step of 10 ms; every step brings 2 tokens per row."""
    c, seconds = CalibratedThreshold(rows, clock), 0.0
    step(clock, c, 5.0, 5.0, 3, 2 * rows)  # compiles
    for nodes in (3, 5, 7, 9):
        value = step(clock, c, 0.001, 0.010 + 0.0005 * nodes, nodes, 2 * rows)
        seconds += 0.001 * (nodes - 1) + 0.010 + 0.0005 * nodes
    rate = 4 * 2 * rows / seconds
    assert value == pytest.approx((0.001 + 0.0005) / rows * rate)


def test_a_draft_that_is_wrong_more_often_than_it_thinks_must_be_surer(clock):
    values = []
    for expected in (2.0, 4.0):
        c = CalibratedThreshold(1, clock)
        for nodes in (3, 3, 5, 7, 9):
            value = step(clock, c, 0.001, 0.010 + 0.0005 * nodes, nodes, 3, accepted=2, expected=expected)
        values.append(value)
    assert values[1] == pytest.approx(2 * values[0])


def test_blocks_of_one_size_and_faster_large_blocks_cost_nothing_per_node(clock):
    for sizes, verify in (((4, 4, 4, 4, 4), (0.01,) * 5), ((3, 3, 5, 7, 9), (0.05, 0.05, 0.04, 0.03, 0.02))):
        c, seconds = CalibratedThreshold(1, clock), 0.0
        for turn, (nodes, took) in enumerate(zip(sizes, verify, strict=True)):
            value = step(clock, c, 0.001, took, nodes, 2)
            seconds += (0.001 * (nodes - 1) + took) if turn else 0.0
        assert value == pytest.approx(0.001 * 8 / seconds)


@pytest.mark.parametrize(
    "known", [dict(accepted=0, expected=0.0), dict(accepted=0, expected=3.0), dict(accepted=3, expected=0.0)], ids=str
)
def test_nothing_accepted_or_nothing_expected(clock, known):
    c = CalibratedThreshold(1, clock)
    values = [step(clock, c, 0.001, 0.01, nodes, 1, **known) for nodes in (3, 4, 5, 6, 7)]
    assert values[-1] is not None and 0 < values[-1] < 100


def test_a_clock_that_stands_still(clock):
    c = CalibratedThreshold(1, clock)
    assert [step(clock, c, 0.0, 0.0, nodes, 2) for nodes in (3, 4, 5, 6, 7)] == [None] * 5


def test_rows_that_have_all_ended_say_nothing(clock):
    c = CalibratedThreshold(1, clock)
    assert [step(clock, c, 0.001, 0.01, nodes, 0) for nodes in (3, 4, 5, 6, 7)] == [None] * 5


@pytest.mark.in_turns
@pytest.mark.parametrize("tree", ["none", "dynamic"])
@pytest.mark.parametrize(
    "draw", [{}, dict(do_sample=True, seed=5, temperature=0.8, top_k=40)], ids=["greedy", "sampled"]
)
def test_calibrated_output_is_exact(target, near, tree, draw):
    options = dict(max_new_tokens=48, decoders_config={"compile": False, "prefill_chunk": 8}, **draw)
    expected = decode(target, prompts(3), "autoregressive", **options).sequences
    out = decode(target, prompts(3), Threshold(rule="calibrated", tree=tree), assistant_model=near, **options)
    assert_same_tokens(target, prompts(3), expected, out.sequences, f"calibrated, tree {tree}")
