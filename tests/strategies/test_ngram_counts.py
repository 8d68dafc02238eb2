"""Counts that follow a text against counts of the text as it is."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decoders.strategies import Ngram
from decoders.strategies.followed_text import OVERLAP, FollowedText, follow_rows
from decoders.strategies.ngram import NgramState, mini_tree
from decoders.strategies.ngram_counts import NgramCounts
from decoders.strategy import HostRows, Sequences

WIDTHS = (3, 2, 1, 1)


def fresh(text: list[int], max_ngram: int) -> NgramCounts:
    counts = NgramCounts(max_ngram)
    counts.extend(text)
    return counts


def state_of(counts: NgramCounts) -> tuple:
    """Everything that a text's counts say of it, in an order that does not depend on its history."""
    orders = [{context: (sorted(f.slots.items()), f.total) for context, f in order.items()} for order in counts._orders]
    return counts.tokens.tolist(), orders, list(counts._by_frequency())


texts = st.lists(st.integers(0, 4), max_size=30)


@settings(deadline=None)
@given(st.integers(1, 3), st.lists(st.tuples(texts, st.integers(0, 8)), min_size=1, max_size=6))
def test_counts_of_a_text_that_grew_and_shrank_are_those_of_the_text(max_ngram, changes):
    counts = NgramCounts(max_ngram)
    for added, taken in changes:
        counts.extend(added)
        counts.spine((1, 2))  # what was made for a draft is no longer true when the text changes
        counts.truncate(max(len(counts.tokens) - taken, 0))
        again = fresh(counts.tokens.tolist(), max_ngram)
        assert state_of(counts) == state_of(again)
        assert counts.spine(WIDTHS) == again.spine(WIDTHS)


@settings(deadline=None)
@given(st.integers(1, 3), st.lists(texts.filter(len), min_size=1, max_size=6), st.booleans())
def test_drafts_follow_a_row_whatever_becomes_of_its_text(max_ngram, versions, append_only):
    """Rows are taken back where they draft for a draft model, and given to other texts where requests come and go."""
    strategy = Ngram(max_ngram=max_ngram, widths=WIDTHS)
    state = NgramState(mini_tree, torch.zeros(1, 8, dtype=torch.int32), (), [strategy._text()], append_only)
    text: list[int] = []
    for version in versions:
        text = text + version if append_only else version
        length = torch.tensor([len(text)])
        draft = strategy.propose(state, Sequences(torch.tensor([text]), length, length, length < 0, length))
        assert draft.tokens.tolist() == [fresh(text, max_ngram).spine(WIDTHS)[0]]


def test_a_row_that_has_ended_is_not_drafted_for():
    strategy = Ngram(widths=(2, 1))
    state = NgramState(mini_tree, torch.zeros(2, 8, dtype=torch.int32), (), [strategy._text() for _ in "ab"], True)
    tokens, length = torch.tensor([[1, 2, 1, 2, 1]] * 2), torch.tensor([5, 5])
    draft = strategy.propose(state, Sequences(tokens, length, length, torch.tensor([True, False]), length))
    assert draft.tokens.tolist() == [[-1, -1, -1], [2, 1, 1]]


def test_a_row_that_has_ended_is_read_to_its_end_once_and_no_long_text_for_it():
    """Such as padding: its end stays near the begin, and others' texts would be read from there on in every step."""
    rows, firsts = [FollowedText(NgramCounts(2)) for _ in range(2)], []
    long = [number % 7 for number in range(100)]

    class Read:
        def __init__(self, texts: list[list[int]]) -> None:
            self.texts = texts

        def read(self) -> HostRows:
            return HostRows(
                [len(text) for text in self.texts], [1, 50], [len(self.texts[0]) == 3, False], self.tokens_from
            )

        def tokens_from(self, first: int) -> list[list[int]]:
            firsts.append(first)
            return [text[first:] for text in self.texts]

    versions = [
        [[5], long],
        [[5, 6, 7], long + [1]],
        [[5, 6, 7], long + [1, 2]],
        [[5, 6, 7], [*long, 1, 2, 3]],
        [[8], long],
    ]
    for texts in versions:
        follow_rows(rows, Read(texts), True, lambda _: FollowedText(NgramCounts(2)))  # type: ignore[arg-type]
        if texts[0] != [8]:
            assert [row.index.tokens.tolist() for row in rows] == texts
    assert rows[0].index.tokens.tolist() == [8]  # another text has taken the row
    assert firsts[:4] == [0, 0, 102 - 1 - OVERLAP, 102 - OVERLAP]


def test_rows_that_stay_keep_their_counts_and_new_ones_begin_with_none():
    class Rows:
        rows, vocab_size = 2, 8

    strategy = Ngram()
    texts = [FollowedText(NgramCounts(3)) for _ in range(2)]
    texts[1].index.extend([1, 2, 3])
    state = NgramState(mini_tree, torch.zeros(2, 8, dtype=torch.int32), (), texts, True)
    after = strategy.rebatch(state, torch.tensor([1, -1]), Rows())
    assert after.texts[0] is texts[1] and not after.texts[1].index.tokens
