"""Which tokens go on with a loop."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from decoders.bench.repetition import LONGEST_PERIOD, SHORTEST_LOOP, in_loops


def found(ids):
    return [place for place, loops in enumerate(in_loops(torch.tensor(ids)).tolist()) if loops]


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
