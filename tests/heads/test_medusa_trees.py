"""Trees: the default one, and the search."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from decoders.errors import DecodersError
from decoders.heads.medusa import DEFAULT_TREE, accepted_length, picture, search_tree
from decoders.tree import Topology


def random_ranks(seed: int, positions: int = 400, heads: int = 4) -> torch.Tensor:
    """Ranks as heads have them: low ones more often; some unknown."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(positions, heads, generator=generator) ** 3 * 20).long() - 1


def test_default_tree_is_the_papers():
    topology, picks = Topology.from_paths(DEFAULT_TREE)
    assert len(set(DEFAULT_TREE)) == 63 and len(topology) == 64
    assert topology.max_depth == 4 and max(rank for _, rank in picks) == 9
    for nodes in range(1, 64):
        Topology.from_paths(DEFAULT_TREE[:nodes])  # best first: every beginning is a tree


def test_accepted_length_counts_the_bonus_token():
    ranks = torch.tensor([[0, 0], [0, 1], [1, 0], [5, 0], [-1, -1]])
    assert accepted_length(ranks, [(0,), (0, 0)]) == (3 + 2 + 1 + 1 + 1) / 5
    assert accepted_length(ranks, [(1,), (1, 0)]) == (1 + 1 + 3 + 1 + 1) / 5


@given(st.integers(0, 10_000), st.integers(1, 63))
def test_searched_tree_is_at_least_as_good_as_the_default_at_equal_nodes(seed, nodes):
    ranks = random_ranks(seed)
    tree = search_tree(ranks, nodes)
    Topology.from_paths(tree)
    assert len(tree) <= nodes
    assert accepted_length(ranks, tree) >= accepted_length(ranks, DEFAULT_TREE[:nodes])


@pytest.mark.parametrize("nodes", [1, 2, 3, 4])
def test_searched_tree_is_the_best_of_all(nodes):
    ranks = random_ranks(5, heads=2).clamp(max=2)
    paths = [(a,) for a in range(3)] + [(a, b) for a in range(3) for b in range(3)]
    best = max(
        accepted_length(ranks, tree)
        for tree in itertools.combinations(paths, nodes)
        if all(len(path) == 1 or path[:1] in tree for path in tree)
    )
    assert accepted_length(ranks, search_tree(ranks, nodes)) == best


def test_smaller_budget_gives_the_beginning_of_the_tree():
    ranks = random_ranks(1)
    assert search_tree(ranks, 63)[:20] == search_tree(ranks, 20)


def test_heads_that_are_never_right_have_no_tree():
    with pytest.raises(DecodersError, match="none of the first head's 16 best tokens is ever right"):
        search_tree(torch.full((5, 2), 40), 8)


def test_picture_shows_who_sees_whom():
    lines = picture([(0,), (1,), (0, 0)]).splitlines()
    assert [line.rsplit("  ")[0].strip() for line in lines] == ["root", "head 1 0", "head 1 1", "head 2 0·0"]
    assert [line[-7:] for line in lines] == ["■ · · ·", "■ ■ · ·", "■ · ■ ·", "■ ■ · ■"]
