"""The n-gram pool against a list in plain Python."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from decoders.strategies.lookahead import make_pool, recall, remember

Ngram = tuple[int, ...]


def add(pool: list[Ngram], new: list[Ngram], per_key: int, capacity: int) -> list[Ngram]:
    """`new` (most recent first) in front, doubles out, `per_key` of each first token, at most `capacity` in all."""
    kept: list[Ngram] = []
    for ngram in new + pool:
        if ngram not in kept and sum(other[0] == ngram[0] for other in kept) < per_key:
            kept.append(ngram)
    return kept[:capacity]


def tensor(ngrams: list[Ngram], n: int = 3) -> torch.Tensor:
    """``[1, n, M]``."""
    return torch.tensor(ngrams, dtype=torch.int64).reshape(len(ngrams), n).T[None]


def all_valid(new: torch.Tensor) -> torch.Tensor:
    return torch.ones(new.shape[0], new.shape[2], dtype=torch.bool)


def entries(pool: torch.Tensor, row: int = 0) -> list[Ngram]:
    return [tuple(entry[:-1]) for entry in pool[row].T.tolist() if entry[0] >= 0]


def made(ngrams: list[Ngram], per_key: int = 2, capacity: int = 4) -> torch.Tensor:
    return make_pool(tensor(ngrams), all_valid(tensor(ngrams)), per_key, capacity)


def after(pool: torch.Tensor, *ngrams: Ngram, per_key: int = 2) -> torch.Tensor:
    return remember(pool, tensor(list(ngrams)), all_valid(tensor(list(ngrams))), per_key)


A, B, C, D = (1, 10, 11), (1, 20, 21), (1, 30, 31), (2, 40, 41)


def test_invalid_ngrams_are_ignored():
    new = tensor([A, B, A])
    assert entries(remember(made([D]), new, torch.tensor([[False, True, True]]), 2)) == [B, A, D]
    assert entries(make_pool(new, torch.tensor([[False, False, False]]), 2, 4)) == []


ngrams = st.lists(st.tuples(*[st.integers(0, 2)] * 3), min_size=1, max_size=6)


@given(st.lists(ngrams, min_size=1, max_size=6), st.integers(1, 3), st.integers(1, 9))
def test_pool_equals_a_list(batches, per_key, capacity):
    expected = add([], batches[0], per_key, capacity)
    pool = made(batches[0], per_key, capacity)
    for batch in batches[1:]:
        assert entries(pool) == expected
        pool, expected = after(pool, *batch, per_key=per_key), add(expected, batch, per_key, capacity)
    assert entries(pool) == expected
    for key in range(3):
        found = [list(e[1:]) for e in expected if e[0] == key]
        assert recall(pool, torch.tensor([[key]]), 4)[0].tolist() == (found + [[-1, -1]] * 4)[:4]


@given(ngrams, ngrams)
def test_rows_do_not_see_each_other(first, second):
    count = min(len(first), len(second))
    both = torch.cat([tensor(first[:count]), tensor(second[:count])])
    pool = remember(make_pool(both, all_valid(both), 2, 5), both.flip(0), all_valid(both), 2)
    for row, (a, b) in enumerate([(first, second), (second, first)]):
        assert entries(pool, row) == entries(after(made(a[:count], 2, 5), *b[:count]))


@pytest.mark.parametrize("n", [2, 5])
def test_ngrams_of_other_lengths(n):
    grams = [tuple(range(start, start + n)) for start in (3, 4, 5)]
    pool = make_pool(tensor(grams, n), all_valid(tensor(grams, n)), 1, 8)
    assert recall(pool, torch.tensor([[4]]), 1).tolist() == [[list(grams[1][1:])]]
