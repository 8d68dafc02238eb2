"""Tests the strategy with the conformance kit, its drafts, and its entry point."""

from __future__ import annotations

import torch
from decoders_example import Bigram

from decoders import Sequences
from decoders.registry import registry
from decoders.testing import check_strategy, context


def propose(rows: list[list[int]], length: int) -> list[list[int]]:
    """Draft tokens for `rows` of different lengths; the tokens after a row's end are arbitrary on purpose."""
    longest = max(map(len, rows)) + 3
    tokens = torch.tensor([row + [9] * (longest - len(row)) for row in rows])
    lengths = torch.tensor([len(row) for row in rows])
    zeros = torch.zeros_like(lengths)
    strategy = Bigram(length=length)
    sequences = Sequences(tokens, lengths, lengths, zeros.bool(), zeros)
    return strategy.propose(strategy.start(context(len(rows), slots=longest, vocab_size=10)), sequences).tokens.tolist()


def test_passes_the_conformance_kit() -> None:
    check_strategy(Bigram)


def test_follows_the_most_recent_follower() -> None:
    assert propose([[1, 2, 3, 1, 4, 5, 1]], length=3) == [[4, 5, 1]]


def test_rows_learn_apart_and_an_unseen_token_ends_the_draft() -> None:
    assert propose([[1, 2, 1], [1, 3, 4, 7, 3], [0, 5]], length=3) == [[2, 1, 2], [4, 7, 3], [-1, -1, -1]]


def test_is_found_through_its_entry_point() -> None:
    assert registry().strategy("bigram") is Bigram
    assert registry().strategies()["bigram"].provider == "decoders-example"
