"""What a step adds to the rows, with hand-made choices: accepted draft tokens and one more, cut where a row ends."""

from __future__ import annotations

import torch

from decoders.engine.decode.verify import append, follow_matches
from decoders.tree import Topology

LENGTHS = [3, 2]


def committed(
    finished: list[bool], limit: list[int] | None = None, stops: list[int] | None = None
) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
    """Two rows whose chain of two draft tokens is right: their texts after the step, their new tokens, and the summary."""
    tokens, length = torch.zeros(2, 12, dtype=torch.int64), torch.tensor(LENGTHS)
    nodes, chosen = torch.tensor([[9, 1, 2], [9, 4, 5]]), torch.tensor([[1, 2, 3], [4, 5, 6]])
    ended = torch.tensor(finished)
    tree = Topology.chain(2).tensors(2, torch.device("cpu"))
    new, summary = append(
        nodes, chosen, tree, follow_matches(nodes, chosen, tree), tokens, length,
        torch.tensor(limit or [12, 12]), ended, torch.tensor(stops or []),
    )  # fmt: skip
    texts = [row[start:end].tolist() for row, start, end in zip(tokens, LENGTHS, length.tolist(), strict=True)]
    assert ended.tolist() == summary[3].bool().tolist()
    return texts, new.tolist(), summary.tolist()


def test_a_right_chain_gives_its_tokens_and_one_more():
    texts, new, summary = committed([False, False])
    assert texts == new == [[1, 2, 3], [4, 5, 6]]
    assert summary == [[3, 3], [2, 2], [2, 2], [0, 0]]


def test_a_row_that_has_ended_neither_grows_nor_counts():
    texts, _, summary = committed([False, True])
    assert texts == [[1, 2, 3], []]
    assert summary == [[3, 0], [2, 0], [2, 0], [0, 1]]


def test_a_row_ends_at_its_limit_in_the_middle_of_a_draft():
    texts, _, summary = committed([False, False], limit=[5, 12])
    assert texts == [[1, 2], [4, 5, 6]]
    assert summary == [[2, 3], [2, 2], [2, 2], [1, 0]]


def test_a_row_ends_behind_the_first_stop_token_wherever_it_stands():
    texts, _, summary = committed([False, False], stops=[2, 6])
    assert texts == [[1, 2], [4, 5, 6]]
    assert summary == [[2, 3], [2, 2], [2, 2], [1, 1]]
