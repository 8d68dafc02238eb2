"""What `token_recycling` learns from logits, and how it fills its tree."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from decoders import enable, forget
from decoders.strategies import TokenRecycling
from decoders.strategies.draft_tree import likely_paths
from decoders.strategies.token_recycling import (
    FOLLOWED,
    SUREST,
    _verified,
    fill,
    filled,
    follow,
    learn,
    learn_listed,
    levels_of,
)
from decoders.testing import prompts, tiny_model
from decoders.tree import Topology

V, K = 10, 2


def empty() -> torch.Tensor:
    return torch.full((V + 1, K + 1), -1, dtype=torch.int32)


def logits(*best: tuple[int, int], margin: float = 1.0) -> torch.Tensor:
    """``[1, N, V]``: of every node the best two tokens, and how far apart they are."""
    rows = torch.zeros(1, len(best), V)
    for node, (first, second) in enumerate(best):
        rows[0, node, first], rows[0, node, second] = 1.0 + margin, 1.0
    return rows


def worth(count: int, *path: int) -> torch.Tensor:
    values = torch.zeros(1, count, dtype=torch.int64)
    for depth, node in enumerate(path):
        values[0, node] = depth
    return values


def tree(*paths: tuple[int, ...]):
    """Topology, ranks, and what :func:`fill` takes."""
    topology, picks = Topology.from_paths(paths)
    ranks = tuple(rank for _, rank in picks)
    return topology, ranks, levels_of(topology, ranks, torch.device("cpu")), torch.tensor(topology.parents[1:])


def test_the_likeliest_successors_of_every_node_are_kept_rejected_ones_included():
    matrix = empty()
    learn(matrix, torch.tensor([[3, 4, 5]]), logits((4, 7), (8, 9), (1, 2)), worth(3, 0, 1))
    assert matrix[[3, 4, 5], :K].tolist() == [[4, 7], [8, 9], [1, 2]]
    assert matrix[6, :K].tolist() == [-1, -1]


def test_missing_nodes_teach_nothing():
    matrix = empty()
    learn(matrix, torch.tensor([[3, -1]]), logits((4, 7), (8, 9)), worth(2, 0))
    assert (matrix >= 0).any(1).tolist() == [t == 3 for t in range(V + 1)]


def test_of_equal_tokens_the_accepted_node_counts_and_then_the_last():
    matrix = empty()
    learn(matrix, torch.tensor([[3, 5, 5, 5]]), logits((5, 6), (1, 2), (3, 4), (7, 8)), worth(4, 0, 2))
    assert matrix[5, :K].tolist() == [3, 4]
    learn(matrix, torch.tensor([[3, 5, 5]]), logits((5, 6), (1, 2), (7, 8)), worth(3, 0))
    assert matrix[5, :K].tolist() == [7, 8]


def test_the_tree_is_filled_row_after_row():
    matrix = empty()
    learn(matrix, torch.tensor([[1, 2, 3]]), logits((2, 3), (4, 5), (6, 7)), worth(3, 0))
    topology, _, *parts = tree((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0))
    drafted, _ = fill(matrix, torch.tensor([[1], [2]]), *parts)
    assert topology.parents == (-1, 0, 0, 1, 1, 2, 3)
    assert drafted.tolist() == [[2, 3, 4, 5, 6, -1], [4, 5, -1, -1, -1, -1]]


def test_a_draft_tokens_grade_is_how_far_the_target_preferred_the_best_successor_of_its_parent():
    matrix = empty()
    for token, margin in ((1, 0.5), (2, 1.5), (3, 9.0)):
        learn(matrix, torch.tensor([[token]]), logits((token + 1, 0), margin=margin), worth(1, 0))
    follow(matrix, [[4, 5]], [2])
    drafted, grades = fill(matrix, torch.tensor([[1]]), *tree((0,), (0, 0), (0, 0, 0), (0, 0, 0, 0))[2:])
    assert drafted.tolist() == [[2, 3, 4, 5]]
    assert grades.tolist() == [[0, 1, SUREST, FOLLOWED]]


def test_one_successor_alone_has_a_grade_as_well():
    matrix = torch.full((V + 1, 2), -1, dtype=torch.int32)
    learn(matrix, torch.tensor([[3]]), logits((4, 7), margin=2.5), worth(1, 0))
    assert matrix[3].tolist() == [4, 2]


@given(st.data())
def test_the_host_learns_and_fills_what_tensors_do(data):
    rows, count, seed = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 6)), data.draw(st.integers(0, 999))
    k = data.draw(st.integers(1, 3))
    by_tensors, generator = torch.full((V + 1, k + 1), -1, dtype=torch.int32), torch.Generator().manual_seed(seed)
    by_host = by_tensors.clone()
    for _ in range(3):
        nodes = torch.randint(-1, V, (rows, count), generator=generator)
        scores = 4 * torch.randn(rows, count, V, generator=generator)
        values = torch.randint(0, 3, (rows, count), generator=generator)
        learn(by_tensors, nodes, scores, values)
        listed = [
            (w, p, t) for p, (w, t) in enumerate(zip(values.flatten().tolist(), nodes.flatten().tolist(), strict=True))
        ]
        learn_listed(by_host, [node for node in listed if node[2] >= 0], scores.flatten(0, 1))
        assert by_host.tolist() == by_tensors.tolist()
    topology, ranks, *parts = tree(*likely_paths(3, k, 6))
    last = torch.randint(0, V, (rows, 1), generator=generator)
    tokens, grades = fill(by_tensors, last, *parts)
    assert filled(by_host, last[:, 0].tolist(), topology.parents[1:], ranks) == (tokens.tolist(), grades.tolist())


def test_the_host_learns_nothing_from_rows_that_have_ended():
    parts = dict(nodes=[[3, 4], [5, 6]], path=[[0, 1], [0, 1]], accepted=[1, 0], emitted=[2, 0])
    step: Any = SimpleNamespace(**{name: torch.tensor(part) for name, part in parts.items()})
    assert _verified(step) == [(0, 0, 3), (1, 1, 4)]


def test_scores_that_forbid_all_but_one_token_or_are_no_numbers_have_a_grade():
    for margin, grade in ((float("inf"), SUREST), (float("nan"), 0)):
        by_tensors, by_host, scores = empty(), empty(), torch.full((1, 1, V), float("-inf"))
        scores[0, 0, 4] = margin
        learn(by_tensors, torch.tensor([[3]]), scores, worth(1, 0))
        learn_listed(by_host, [(0, 0, 3)], scores[0])
        assert by_tensors[3, K] == by_host[3, K] == grade


def test_unknown_tokens_get_what_followed_them_in_the_prompt_the_latest_first():
    matrix = empty()
    learn(matrix, torch.tensor([[7]]), logits((8, 9)), worth(1, 0))
    follow(matrix, [[1, 2, 1, 3, 1, 2, 7, 5, 0, 0]], [8])
    assert matrix[[1, 2, 3], :K].tolist() == [[2, 3], [7, 1], [1, -1]]
    assert matrix[7, :K].tolist() == [8, 9], "what the target thought is worth more"
    assert matrix[[5, 0], :K].tolist() == [[-1, -1]] * 2, "nothing behind a row's end is read"


def test_the_matrix_takes_two_megabytes_per_hundred_thousand_tokens_at_most():
    k = TokenRecycling().settings.k
    assert 100_000 * (k + 1) * torch.empty(0, dtype=torch.int32).element_size() <= 2e6


def test_later_calls_begin_with_what_earlier_ones_learnt_until_it_is_forgotten():
    model, inputs = enable(tiny_model("llama")), prompts(1)
    options = dict(
        strategy="token_recycling", max_new_tokens=40, do_sample=False, return_dict_in_generate=True,
        decoders_config={"compile": False},
    )  # fmt: skip
    first, second = (model.generate(**inputs, **options) for _ in range(2))
    third = model.generate(**inputs, **options | {"decoders_config": {"compile": False, "memory": False}})
    forget(model)
    fourth = model.generate(**inputs, **options)
    assert second.sequences.tolist() == first.sequences.tolist()
    assert second.report.steps < first.report.steps == third.report.steps == fourth.report.steps


def test_the_prompts_logits_are_learnt_from_where_that_is_asked_for():
    model, inputs = enable(tiny_model("llama")), prompts(2)
    options = dict(max_new_tokens=24, do_sample=False, decoders_config={"compile": False, "memory": False})
    plain = model.generate(**inputs, strategy="autoregressive", **options)
    strategy = TokenRecycling(prompt_logits=True)
    assert strategy.reads_prompt and not TokenRecycling().reads_prompt
    assert model.generate(**inputs, strategy=strategy, **options).tolist() == plain.tolist()
