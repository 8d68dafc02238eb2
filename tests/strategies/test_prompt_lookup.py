"""Prompt lookup against a search in plain Python."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from decoders.errors import SettingsError
from decoders.strategies import PromptLookup
from decoders.strategies.prompt_lookup import continuations


def look_up(text: list[int], longest: int, shortest: int, count: int, branches: int) -> list[list[int]]:
    """Every earlier end of a matching suffix, best first; those whose next token was proposed already are left out."""
    last = len(text) - 1
    ends = []
    for end in range(last):
        matched = 0
        while matched < longest and matched <= end and text[end - matched] == text[last - matched]:
            matched += 1
        if matched >= shortest:
            ends.append((matched, end))
    found: list[list[int]] = []
    for _, end in sorted(ends, reverse=True):
        # What followed, and when the text ends, the same stretch again and again.
        stretch = text[end + 1 :]
        draft_token = [stretch[i % len(stretch)] for i in range(count)]
        if all(draft_token[0] != other[0] for other in found):
            found.append(draft_token)
    return (found + [[-1] * count] * branches)[:branches]


def propose(rows: list[list[int]], *args: int, junk: int = 0) -> list[list[list[int]]]:
    """`continuations` of ragged rows; what lies behind a row's end is `junk`."""
    width = max(map(len, rows)) + 3
    tokens = torch.tensor([row + [junk] * (width - len(row)) for row in rows])
    return continuations(tokens, torch.tensor([len(row) for row in rows]), *args)[0].tolist()


texts = st.lists(st.integers(0, 3), min_size=1, max_size=24)


@given(st.lists(texts, min_size=1, max_size=4), st.integers(1, 4), st.data(), st.integers(1, 7), st.integers(1, 4))
def test_proposals_equal_a_search_in_plain_python(rows, longest, data, count, branches):
    shortest = data.draw(st.integers(1, longest))
    proposed = propose(rows, longest, shortest, count, branches, junk=data.draw(st.integers(0, 3)))
    assert proposed == [look_up(row, longest, shortest, count, branches) for row in rows]


@pytest.mark.parametrize(
    "text, arguments, proposed",
    [
        pytest.param([1, 2, 50, 51, 52, 9, 2, 60, 61, 1, 2], (3, 1, 3, 1), [[50, 51, 52]], id="longest before latest"),
        pytest.param([1, 50, 51, 1, 60, 61, 1, 50, 52, 1], (1, 1, 2, 3), [[50, 52], [60, 61], [-1, -1]], id="branches"),
        pytest.param([9, 1, 2, 3, 1, 2, 3], (3, 1, 8, 1), [[1, 2, 3, 1, 2, 3, 1, 2]], id="a loop goes on"),
    ],
)
def test_proposals_by_example(text, arguments, proposed):
    assert propose([text], *arguments) == [proposed]


def test_minimum_above_the_maximum_is_refused():
    with pytest.raises(SettingsError, match="min_ngram 4 exceeds max_ngram 2"):
        PromptLookup(max_ngram=2, min_ngram=4)
