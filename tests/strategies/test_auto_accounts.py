"""How far `auto` is behind plain decoding, and what it may do then."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoders.strategies.auto_candidates import BEHIND_SHARE, FIRST_STEPS, LONGEST_REST, MOST_AHEAD, STRICTNESS, Ledger

PLAIN = 0.01


def test_the_last_row_says_how_far_a_batch_is() -> None:
    ledger = Ledger([0, 0])
    ledger.book(PLAIN, PLAIN, {0: 5, 1: 1})
    assert ledger.behind == pytest.approx(PLAIN * (1 - BEHIND_SHARE)) and ledger.least == 1
    ledger.book(0.0, PLAIN, {0: 1, 1: 4})  # five and six tokens in two steps
    assert ledger.least == 5 and ledger.behind == pytest.approx(PLAIN * (1 - 2 * BEHIND_SHARE - 3))


def test_a_row_that_has_ended_holds_up_nobody() -> None:
    ledger = Ledger([0, 0])
    ledger.book(0.0, PLAIN, {0: 1, 1: 4})
    ledger.book(0.0, PLAIN, {1: 1})
    assert ledger.least == 5


def test_where_rows_come_and_go_their_mean_counts() -> None:
    ledger = Ledger(None)
    ledger.book(PLAIN, PLAIN, {3: 1, 7: 3})
    assert ledger.behind == pytest.approx(-PLAIN * BEHIND_SHARE)


def test_a_call_that_is_behind_rests_and_tries_again() -> None:
    ledger = Ledger([0])
    assert ledger.may_try(PLAIN) and ledger.strictness(PLAIN) == 1
    attempts = 0
    while ledger.may_try(PLAIN):
        before = ledger.strictness(PLAIN)
        ledger.book(0.2 * PLAIN, PLAIN, {0: 1})
        assert ledger.strictness(PLAIN) > before
        attempts += 1
        assert attempts < 10, "it never rests"
    assert ledger.strictness(PLAIN) > 1 + STRICTNESS
    rests = 0
    while not ledger.may_try(PLAIN):
        ledger.book(0.0, PLAIN, {0: 1})
        rests += 1
    assert 1 <= rests <= 0.2 / BEHIND_SHARE


@given(st.lists(st.tuples(st.floats(0, 1), st.integers(1, 8)), max_size=60))
def test_it_rests_no_longer_than_said_and_stakes_no_old_gains(steps: list[tuple[float, int]]) -> None:
    ledger = Ledger([0])
    for extra, tokens in steps:
        ledger.book(extra, PLAIN, {0: tokens})
        assert ledger.behind >= -MOST_AHEAD * PLAIN
        assert ledger.behind <= (FIRST_STEPS + LONGEST_REST) * BEHIND_SHARE * PLAIN
