"""What steps cost, fitted to those that were seen."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoders.costs import StepCosts, StepLine


@given(st.floats(0.5, 10), st.floats(0, 0.1), st.lists(st.integers(1, 64), min_size=8, max_size=30))
def test_costs_on_a_line_are_found(fixed: float, node: float, sizes: list[int]) -> None:
    costs = StepLine()
    for size in sizes:
        costs.observe(size, fixed + node * size, False)
    if costs.step(1) is None:
        assert len(set(sizes)) == 1
    else:
        assert costs.step(100) == pytest.approx(fixed + 100 * node, rel=1e-3)


def test_compiled_steps_are_not_judged_by_those_that_were_not() -> None:
    costs = StepLine()
    for size in (8, 16, 8, 32, 8, 16):
        costs.observe(size, 9 + 3 * size, False)
    costs.observe(8, 9.0, True)
    assert costs.step(8) is None
    for size in (8, 16, 8, 32):
        costs.observe(size, 1 + size, True)
    assert costs.step(100) == pytest.approx(101)


def test_a_batch_without_a_curve_goes_by_the_line_through_all_of_its_rows() -> None:
    line = StepLine()
    costs = StepCosts(None, 2, 64, size=lambda nodes: max(nodes, 3), line=line)
    assert not costs.known
    with pytest.raises(ValueError, match="no estimate yet"):
        costs.step(1)
    for nodes in (4, 8, 4, 16, 4):
        costs.observe(nodes, 1 + 0.5 * nodes, 64, False)
    assert costs.known and line.step(8) == pytest.approx(3.0)
    assert costs.step(1) == costs.step(3) == pytest.approx(2.5) and costs.step(4) == pytest.approx(3.0)
    assert costs.to_weigh()(4) == pytest.approx(costs.step(4))
