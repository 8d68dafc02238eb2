"""The marker ``in_turns``, which draws the quick cases of a test with several parameters: every value is in one of them."""

from __future__ import annotations

import pytest


def is_slow(request: pytest.FixtureRequest) -> bool:
    return request.node.get_closest_marker("slow") is not None


@pytest.mark.in_turns
@pytest.mark.parametrize("second, third", [("a", "x"), ("b", "x"), ("c", "y")])
@pytest.mark.parametrize("first", [0, 1])
def test_values_of_two_parameters_take_turns(
    request: pytest.FixtureRequest, first: int, second: str, third: str
) -> None:
    assert is_slow(request) == ((first, second) not in [(0, "a"), (1, "b"), (0, "c")])


@pytest.mark.in_turns
@pytest.mark.parametrize("first, second", [(i, j) for i in range(3) for j in range(3) if i != j])
def test_so_do_those_of_cases_that_are_not_a_product(request: pytest.FixtureRequest, first: int, second: int) -> None:
    assert is_slow(request) == ((first, second) not in [(0, 1), (1, 0), (2, 0), (0, 2)])


@pytest.mark.in_turns
@pytest.mark.parametrize("second", [0, pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("first", [0, 1])
def test_a_value_that_is_slow_itself_is_in_no_quick_case(
    request: pytest.FixtureRequest, first: int, second: int
) -> None:
    assert is_slow(request) == ((first, second) not in [(0, 0), (1, 2)])
