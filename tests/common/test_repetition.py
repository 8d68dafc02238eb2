"""Which tokens go on with a loop."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from decoders.common.repetition import LONGEST_PERIOD, SHORTEST_LOOP, in_loops


def found(ids):
    return [place for place, loops in enumerate(in_loops(torch.tensor(ids)).tolist()) if loops]


def test_the_first_repetition_is_none_and_from_the_second_on_every_token_is():
    passage = list(range(20))
    assert found(passage * 2) == []
    assert found(passage * 3) == list(range(40, 60))


def test_short_repetitions_are_text_whatever_their_period():
    assert found([7] * (SHORTEST_LOOP + 1)) == []
    assert found([7] * (SHORTEST_LOOP + 3)) == [SHORTEST_LOOP + 1, SHORTEST_LOOP + 2]
    assert found([1, 2] * 5) == []


def test_a_loop_ends_with_the_first_other_token_and_another_may_begin():
    ids = [1, 2, 3] * 5 + [9] + [4, 5, 6, 7] * 4
    assert found(ids) == [*range(11, 15), *range(16 + 12, 32)]


def test_longer_passages_are_not_looked_for():
    assert found(list(range(LONGEST_PERIOD + 1)) * 4) == []


def test_rows_and_texts_of_a_token_or_none():
    rows = torch.tensor([[1] * 12, [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3]])
    assert in_loops(rows).sum(1).tolist() == [3, 0]
    assert in_loops(torch.tensor([4])).tolist() == [False]
    assert in_loops(torch.zeros(2, 0, dtype=torch.int64)).shape == (2, 0)


@given(st.lists(st.integers(0, 2), max_size=60))
def test_equals_the_definition(ids):
    def loops(place):
        for period in range(1, LONGEST_PERIOD + 1):
            length = max(period, SHORTEST_LOOP) + 1
            first = place - length + 1
            if first >= period and ids[first : place + 1] == ids[first - period : place + 1 - period]:
                return True
        return False

    assert found(ids) == [place for place in range(len(ids)) if loops(place)]
