"""Cost curves: what lies between measured points, and beyond them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from decoders.costs import CostCurve, CostPoint, Subject

SUBJECT = Subject(
    model="LlamaConfig-2-32",
    dtype="float32",
    quantization="",
    device="a processor",
    threads=2,
    attention="sdpa",
    torch="2.13",
    package="0.1.0",
)


def point(nodes: int, seconds: float, rows: int = 1, context: int = 64, compiled: bool = False) -> CostPoint:
    return CostPoint(rows=rows, context=context, nodes=nodes, compiled=compiled, seconds=seconds)


def curve(*points: CostPoint) -> CostCurve:
    return CostCurve(subject=SUBJECT).with_points(points)


def test_measured_points_are_given_back() -> None:
    measured = curve(point(3, 1.0), point(9, 2.0), point(3, 3.0, context=1024), point(9, 5.0, context=1024))
    for p in measured.points:
        assert measured.seconds(p.nodes, p.rows, p.context, p.compiled) == p.seconds


def test_between_them_it_is_linear_in_nodes_and_context() -> None:
    measured = curve(point(3, 1.0), point(9, 2.0), point(3, 3.0, context=1088), point(9, 5.0, context=1088))
    assert measured.seconds(6, 1, 64, False) == pytest.approx(1.5)
    assert measured.seconds(3, 1, 576, False) == pytest.approx(2.0)
    assert measured.seconds(6, 1, 576, False) == pytest.approx((1.5 + 4.0) / 2)


def test_below_the_first_it_is_flat_and_beyond_the_last_as_steep_as_before() -> None:
    measured = curve(point(3, 1.0), point(9, 2.2))
    assert measured.seconds(1, 1, 10, False) == 1.0
    assert measured.seconds(14, 1, 64, False) == pytest.approx(3.2)
    falling = curve(point(3, 2.0), point(9, 1.0))  # a slip of the clock
    assert falling.seconds(100, 1, 64, False) == 1.0


def test_another_number_of_rows_is_as_many_nodes_of_the_nearest() -> None:
    measured = curve(point(4, 1.0, rows=2), point(8, 2.0, rows=2))
    assert measured.seconds(4, 3, 64, False) == pytest.approx(1.5)  # 12 nodes in all: 6 of each of 2 rows
    assert measured.seconds(8, 1, 64, False) == pytest.approx(1.0)


def test_a_tier_that_was_not_measured_is_taken_for_the_other() -> None:
    measured = curve(point(3, 1.0))
    assert measured.seconds(3, 1, 64, True) == 1.0
    both = measured.with_points([point(3, 0.5, compiled=True)])
    assert both.seconds(3, 1, 64, True) == 0.5


def test_new_points_replace_old_ones_at_their_place() -> None:
    measured = curve(point(3, 1.0), point(9, 2.0)).with_points([point(3, 1.5)])
    assert [p.seconds for p in measured.points] == [1.5, 2.0]


def test_the_nearest_context_is_one_of_the_same_rows_and_tier() -> None:
    measured = curve(point(3, 1.0, context=100), point(3, 1.0, context=1000))
    assert measured.context_near(1, 8000, False) == 1000 and measured.context_near(1, 24, False) == 100
    assert measured.context_near(2, 100, False) is measured.context_near(1, 100, True) is None


def test_without_points_it_says_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"decoders\.calibrate"):
        curve().seconds(3, 1, 64, False)


@pytest.mark.parametrize("bad", [{"seconds": 0.0}, {"nodes": 0}, {"rows": 0}, {"context": -1}, {"colour": "red"}])
def test_points_are_checked(bad: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        CostPoint.model_validate({"rows": 1, "context": 1, "nodes": 3, "compiled": False, "seconds": 1.0} | bad)


@given(
    st.lists(st.tuples(st.integers(1, 65), st.floats(1e-4, 1.0)), min_size=1, max_size=8, unique_by=lambda p: p[0]),
    st.integers(1, 256), st.integers(1, 8), st.integers(1, 5000),
)  # fmt: skip
def test_every_size_has_a_cost_of_the_measured_magnitude(
    points: list[tuple[int, float]], nodes: int, rows: int, context: int
) -> None:
    measured = curve(*(point(n, s) for n, s in points))
    assert measured.seconds(nodes, rows, context, False) >= min(s for _, s in points) - 1e-12
