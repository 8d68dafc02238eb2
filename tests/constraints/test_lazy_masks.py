"""Rows that are made once: the right ones, however they are asked for."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from decoders.constraints.lookups import LazyMasks


def table(most: int, made: list[int] | None = None) -> LazyMasks:
    def make(number: int, out: np.ndarray) -> None:
        if made is not None:
            made.append(number)
        out[:] = number

    return LazyMasks(3, np.int32, most, make)


@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=6), max_size=20), st.integers(1, 8))
def test_rows_are_what_was_asked_for(asked, most):
    written = table(most)
    for numbers in asked:
        found = written.places(numbers)
        assert (found is None) == (len({*numbers}) > most)
        if found is not None:
            places, rows = found
            assert rows[places].tolist() == [[number] * 3 for number in numbers]
        assert written.nbytes <= most * 3 * 4


def test_rows_are_made_once_and_given_up_together():
    made: list[int] = []
    written = table(4, made)
    for numbers in [1, 2], [2, 1, 1], [3, 4]:
        written.places(numbers)
    assert sorted(made) == [1, 2, 3, 4]
    written.places([5])
    written.places([1, 5])
    assert made[4:] == [5, 1]


def test_threads_do_not_see_rows_of_others():
    written = table(6)

    def look(seed: int) -> bool:
        draw = np.random.default_rng(seed)
        for _ in range(300):
            numbers = draw.integers(0, 12, 5).tolist()
            places, rows = written.places(numbers)
            if rows[places].tolist() != [[number] * 3 for number in numbers]:
                return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(look, range(8)))
