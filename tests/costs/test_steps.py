"""The cost of a call's next step: the curve, corrected by the steps that were seen."""

from __future__ import annotations

import pytest

from decoders.costs import StepCosts

from .test_curve import curve, point

LADDER = [point(n, 0.010 + 0.001 * n) for n in (3, 5, 9, 17, 33, 65)]


def test_before_anything_is_seen_it_is_the_curve() -> None:
    costs = StepCosts(curve(*LADDER), 1, 64, size=lambda nodes: max(nodes, 3))
    assert costs.step(1) == costs.step(3) == pytest.approx(0.013)
    assert costs.step(9) == pytest.approx(0.019)


def test_a_slower_machine_is_noticed_at_once_and_for_every_size() -> None:
    costs = StepCosts(curve(*LADDER), 1, 64)
    costs.observe(3, 0.026, 64, False)
    assert costs.step(3) == pytest.approx(0.026)
    assert costs.step(9) == pytest.approx(0.038)


def test_costs_of_other_rows_keep_what_the_machine_takes_longer() -> None:
    first = StepCosts(curve(*LADDER), 1, 64)
    first.observe(3, 0.026, 64, False)
    later = StepCosts(curve(*LADDER, point(3, 0.030, rows=4)), 4, 64, former=first)
    assert later.step(3) == pytest.approx(0.060)
    assert StepCosts(curve(*LADDER), 1, 64, former=StepCosts(None, 1, 64)).step(3) == pytest.approx(0.013)


def test_one_interrupted_step_changes_little() -> None:
    costs = StepCosts(curve(*LADDER), 1, 64)
    for _ in range(20):
        costs.observe(3, 0.013, 64, False)
    costs.observe(3, 13.0, 64, False)
    assert costs.step(3) < 0.013 * 1.5


def test_a_size_that_costs_more_than_measured_is_learnt() -> None:
    costs = StepCosts(curve(*LADDER), 1, 64)
    for _ in range(200):
        costs.observe(3, 0.013, 64, False)
        costs.observe(9, 0.038, 64, False)
    assert costs.step(3) == pytest.approx(0.013, rel=0.1)
    assert costs.step(9) == pytest.approx(0.038, rel=0.1)


def test_a_size_that_was_measured_wrong_is_noticed_within_some_steps() -> None:
    costs = StepCosts(curve(*LADDER), 1, 64)
    for _ in range(10):
        for _ in range(3):
            costs.observe(3, 0.013, 64, False)
        costs.observe(9, 0.038, 64, False)
    assert costs.step(9) / costs.step(3) > 0.75 * 38 / 13


def test_what_a_call_learns_of_sizes_serves_later_calls_and_no_others() -> None:
    ratios: dict = {}
    first = StepCosts(curve(*LADDER), 1, 64, ratios=lambda context: ratios)
    for _ in range(100):
        first.observe(3, 0.013, 64, False)
        first.observe(9, 0.038, 64, False)
    later = StepCosts(curve(*LADDER), 1, 64, ratios=lambda context: ratios)
    later.observe(3, 0.026, 64, False)  # a slower machine
    assert later.step(9) / later.step(3) == pytest.approx(38 / 13, rel=0.1)
    assert StepCosts(curve(*LADDER), 1, 64).step(9) == pytest.approx(0.019)
    later.observe(9, 0.019, 64, True)
    assert set(ratios) == {False, True}


def test_what_is_learnt_of_one_context_is_a_start_for_another_and_stays_as_it_was() -> None:
    """A batch's text grows, and gets shorter when its longest row leaves."""
    ratios: dict[int, dict] = {}
    costs = StepCosts(curve(*LADDER), 1, 64, ratios=lambda context: ratios.setdefault(context // 1000, {}))

    def dearer(context: int, dear: float, steps: int) -> float:
        """How much dearer nine nodes are than three."""
        for _ in range(steps):
            costs.observe(9, 0.013 * dear, context, False)
            costs.observe(3, 0.013, context, False)
        return costs.step(9) / costs.step(3)

    assert dearer(64, 2, steps=100) == pytest.approx(2, rel=0.05)
    costs.observe(3, 0.013, 1000, False)
    assert dearer(1000, 2, steps=0) == pytest.approx(2, rel=0.05)
    assert dearer(1000, 4, steps=100) == pytest.approx(4, rel=0.05)
    costs.observe(3, 0.013, 64, False)
    assert dearer(64, 2, steps=0) == pytest.approx(2, rel=0.05)


def test_the_compiled_tier_is_taken_when_steps_run_compiled() -> None:
    both = [*LADDER, *(point(p.nodes, p.seconds / 2, compiled=True) for p in LADDER)]
    costs = StepCosts(curve(*both), 1, 64)
    costs.observe(3, 0.013, 64, False)
    costs.observe(3, 0.0065, 70, True)
    assert costs.step(9) == pytest.approx(0.0095, rel=0.05)


def test_a_longer_text_is_looked_up_anew() -> None:
    long = [point(p.nodes, 3 * p.seconds, context=1000) for p in LADDER]
    costs = StepCosts(curve(*LADDER, *long), 1, 64)
    costs.observe(3, 0.013, 64, False)
    costs.observe(3, 0.039, 1000, False)
    assert costs.step(9) == pytest.approx(0.057, rel=0.05)


def test_affordable_is_the_largest_block_within_the_share() -> None:
    costs = StepCosts(curve(*LADDER), 1, 64, size=lambda nodes: max(nodes, 3))
    assert costs.affordable(0.5) == 9  # 0.019 against 1.5 times 0.013
    assert costs.affordable(0.0) == 3


def test_affordable_goes_little_beyond_what_was_measured() -> None:
    """Two timings per size in a call: 17 nodes may seem as dear as 5."""
    flat = curve(point(3, 1.0), point(5, 1.1), point(17, 1.09))
    assert StepCosts(flat, 1, 64).affordable(0.5) == 34
    assert StepCosts(flat, 4, 64).affordable(0.5) == 8  # as many nodes of all rows together
    assert StepCosts(curve(point(65, 1.0), point(513, 1.0)), 1, 64).affordable(0.5) == 256
