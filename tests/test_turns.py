"""The marker ``in_turns``, on which the quick run's time depends: every other combination is slow, and no value."""

from __future__ import annotations

import pytest


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("second, third", [("a", "x"), ("b", "x"), ("c", "y")])
@pytest.mark.parametrize("first", [0, 1])
def test_every_other_combination_is_quick(request: pytest.FixtureRequest, first: int, second: str, third: str) -> None:
    slow = request.node.get_closest_marker("slow") is not None
    assert slow == bool((first + "abc".index(second)) % 2)


@pytest.mark.in_turns(9)
@pytest.mark.parametrize("second", range(4))
@pytest.mark.parametrize("first", [0, 1])
def test_no_value_is_left_out(request: pytest.FixtureRequest, first: int, second: int) -> None:
    assert (request.node.get_closest_marker("slow") is not None) == (first == 1 and second > 0)
