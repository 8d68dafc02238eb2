"""What `token_recycling` learns from logits, and how it fills its tree."""

from __future__ import annotations

import torch

from decoders import enable, forget
from decoders.strategies import TokenRecycling
from decoders.strategies.token_recycling import fill, follow, learn, static_tree
from decoders.testing import prompts, tiny_model

V, K = 10, 2


def empty() -> torch.Tensor:
    return torch.full((V + 1, K), -1, dtype=torch.int32)


def logits(*best: tuple[int, int]) -> torch.Tensor:
    """``[1, N, V]``: of every node the best two tokens."""
    rows = torch.zeros(1, len(best), V)
    for node, (first, second) in enumerate(best):
        rows[0, node, first], rows[0, node, second] = 2.0, 1.0
    return rows


def worth(count: int, *path: int) -> torch.Tensor:
    values = torch.zeros(1, count, dtype=torch.int64)
    for depth, node in enumerate(path):
        values[0, node] = depth
    return values


def test_the_likeliest_successors_of_every_node_are_kept_rejected_ones_included():
    matrix = empty()
    learn(matrix, torch.tensor([[3, 4, 5]]), logits((4, 7), (8, 9), (1, 2)), worth(3, 0, 1))
    assert matrix[[3, 4, 5]].tolist() == [[4, 7], [8, 9], [1, 2]]
    assert matrix[6].tolist() == [-1, -1]


def test_missing_nodes_teach_nothing():
    matrix = empty()
    learn(matrix, torch.tensor([[3, -1]]), logits((4, 7), (8, 9)), worth(2, 0))
    assert (matrix >= 0).any(1).tolist() == [t == 3 for t in range(V + 1)]


def test_of_equal_tokens_the_accepted_node_counts_and_then_the_last():
    matrix = empty()
    learn(matrix, torch.tensor([[3, 5, 5, 5]]), logits((5, 6), (1, 2), (3, 4), (7, 8)), worth(4, 0, 2))
    assert matrix[5].tolist() == [3, 4]
    learn(matrix, torch.tensor([[3, 5, 5]]), logits((5, 6), (1, 2), (7, 8)), worth(3, 0))
    assert matrix[5].tolist() == [7, 8]


def test_the_tree_is_filled_row_after_row():
    matrix = empty()
    learn(matrix, torch.tensor([[1, 2, 3]]), logits((2, 3), (4, 5), (6, 7)), worth(3, 0))
    topology, levels = static_tree(((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)), torch.device("cpu"))
    drafted = fill(matrix, torch.tensor([[1], [2]]), levels)
    assert topology.parents == (-1, 0, 0, 1, 1, 2, 3)
    assert drafted.tolist() == [[2, 3, 4, 5, 6, -1], [4, 5, -1, -1, -1, -1]]


def test_unknown_tokens_get_what_followed_them_in_the_prompt_the_latest_first():
    matrix = empty()
    learn(matrix, torch.tensor([[7]]), logits((8, 9)), worth(1, 0))
    follow(matrix, [[1, 2, 1, 3, 1, 2, 7, 5, 0, 0]], [8])
    assert matrix[[1, 2, 3]].tolist() == [[2, 3], [7, 1], [1, -1]]
    assert matrix[7].tolist() == [8, 9], "what the target thought is worth more"
    assert matrix[[5, 0]].tolist() == [[-1, -1]] * 2, "nothing behind a row's end is read"


def test_the_matrix_takes_two_megabytes_per_hundred_thousand_tokens_at_most():
    k = TokenRecycling().settings.k
    assert 100_000 * k * torch.empty(0, dtype=torch.int32).element_size() <= 2e6


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
