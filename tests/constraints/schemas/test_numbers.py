"""Expressions of number sets against arithmetic."""

from __future__ import annotations

import json
import re
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoders.constraints.schemas import number_text, numbers
from decoders.constraints.schemas.numbers import Numbers

decimals = st.builds(lambda n, places: Fraction(n, 10**places), st.integers(-3000, 3000), st.integers(0, 3))
bounds = st.none() | decimals
steps = st.none() | st.sampled_from(
    [Fraction(n) for n in ("1", "2", "3", "5", "12", "20", "0.1", "0.02", "0.5", "0.25", "0.3", "1.5")]
)


@st.composite
def sets(draw: st.DrawFn) -> Numbers:
    kind = draw(st.sampled_from(["any", "integer", "fraction"]))
    return Numbers(
        draw(bounds),
        draw(st.booleans()),
        draw(bounds),
        draw(st.booleans()),
        kind,
        None if kind == "fraction" else draw(steps),
    )


def text(value: Fraction) -> str:
    return str(int(value)) if value.denominator == 1 else json.dumps(float(value))


def holds(found: Numbers, value: Fraction) -> bool:
    simplified = found.simplified()
    expression = number_text.expression(simplified) if simplified is not None else r"(?!)"
    if expression is None:
        return found.contains(value)  # llguidance counts remainders itself: tests of keywords
    return re.fullmatch(expression, text(value)) is not None


@given(sets(), decimals, st.integers(-2, 2))
def test_expression_holds_what_the_set_holds(found: Numbers, value: Fraction, nudge: int) -> None:
    near = [b + Fraction(nudge, 1000) for b in (found.low, found.high) if b is not None]
    for candidate in (value, *near):
        assert holds(found, candidate) is found.contains(candidate), (found, candidate)


@given(sets(), sets(), decimals)
def test_intersection_and_complement(a: Numbers, b: Numbers, value: Fraction) -> None:
    shared = numbers.intersection(a, b)
    assert (shared is not None and shared.contains(value)) is (a.contains(value) and b.contains(value))
    simplified = a.simplified()
    if a.multiple is None and simplified is not None:
        assert any(piece.contains(value) for piece in numbers.complement(simplified)) is not a.contains(value)


@given(sets(), st.from_regex(r"-?(0|[1-9][0-9]{0,3})(\.[0-9]{1,20})?", fullmatch=True))
def test_what_matches_is_in_the_set_after_rounding_to_a_float(found: Numbers, digits: str) -> None:
    simplified = found.simplified()
    expression = number_text.expression(simplified) if simplified is not None else None
    if expression is not None and re.fullmatch(expression, digits) and found.multiple is None:
        assert found.contains(numbers.fraction(json.loads(digits)))


@pytest.mark.parametrize("bound", [0.1, 1e-7, 123456.789, 1e20, 9007199254740993])
def test_bounds_are_exact(bound: float) -> None:
    least = Numbers(low=numbers.fraction(bound)).simplified()
    assert least is not None
    expression = number_text.expression(least)
    assert expression is not None
    exact = numbers.fraction(bound)
    for value in (exact, exact + Fraction(1, 10**9), exact - Fraction(1, 10**9)):
        digits = f"{float(value):.30f}" if value.denominator > 1 and exact < 10**15 else str(int(value))
        assert bool(re.fullmatch(expression, digits)) is (Fraction(digits) >= exact), digits


LARGE = st.one_of(
    st.integers(-(10**25), 10**25),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from([2**53 + 1, 10**20 + 1, 1e23, 1e300, 5e-324, 0.30000000000000004, 1e15, 1e14, 1e8, 0.3]),
)
NEAR = st.tuples(
    st.sampled_from(["", "0", "9", "7"]), st.sampled_from(["", ".0", ".5", ".1", ".9999999999999999", ".00001"])
)


@given(st.none() | LARGE, st.none() | LARGE, st.booleans(), st.sampled_from(["any", "fraction"]), LARGE, NEAR)
def test_what_is_written_is_in_the_set_as_json_reads_it(
    low: float | None, high: float | None, is_open: bool, kind: str, other: float, near: tuple[str, str]
) -> None:
    """JSON's readers make a float of what has a point: no rounding may carry it out of the set, however large it is."""
    simplified = Numbers(
        None if low is None else numbers.fraction(low), is_open, None if high is None else numbers.fraction(high), is_open,
        kind,
    ).simplified()  # fmt: skip
    expression = number_text.expression(simplified) if simplified is not None else None
    if simplified is None or not expression:
        return
    assert not re.fullmatch(expression, "") and not re.fullmatch(expression, "-")
    for point in (low or 0, high or 0, other):
        whole = str(int(point))
        for digits in (whole, whole[: -len(near[0]) or None] + near[0], f"{point:.25f}"[:-9].rstrip("0")):
            text = digits.partition(".")[0] + near[1] if near[1] else digits
            if re.fullmatch(expression, text):
                value = json.loads(text)
                assert low is None or value > low or (value == low and not is_open), text
                assert high is None or value < high or (value == high and not is_open), text
                assert kind == "any" or not float(value).is_integer(), text


def test_interval_without_a_number_that_can_be_written_has_no_texts() -> None:
    between = Numbers(numbers.fraction(0.3), True, numbers.fraction(0.30000000000000004), True).simplified()
    assert between is not None
    assert number_text.expression(between) == ""


def test_bound_far_away_takes_no_decimals_from_small_numbers() -> None:
    for found in (Numbers(Fraction(-(2**53)), True), Numbers(high=Fraction(10**14), open_high=True)):
        expression = number_text.expression(found)
        assert expression is not None and re.fullmatch(expression, "-0.466")


def test_digits_are_few_so_that_no_float_rounds_up_to_an_open_bound() -> None:
    below = Numbers(low=Fraction(0), high=Fraction(9, 10), open_high=True).simplified()
    assert below is not None and float("0." + "8" + "9" * 20) == 0.9
    expression = number_text.expression(below)
    assert expression is not None and re.fullmatch(expression, "0.8" + "9" * 13)
    assert not re.fullmatch(expression, "0.8" + "9" * 20)


def test_multiples_whose_expression_is_long_are_counted_by_llguidance() -> None:
    step = Fraction(1, 10**6)
    assert number_text.expression(Numbers(Fraction(0), high=Fraction("987.65432"), multiple=step)) is not None
    bounds = Fraction("-1234567.891234"), Fraction("98765431.234567")
    assert number_text.expression(Numbers(bounds[0], high=bounds[1], multiple=step)) is None
