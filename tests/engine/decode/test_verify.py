"""Acceptance with hand-made tokens: the target's choice after each node decides, nothing else."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from decoders.engine.decode.verify import follow_matches
from decoders.tree import Topology, TreeTensors

CPU = torch.device("cpu")


def verify(topology: Topology, nodes: list[int], chosen: list[int]) -> tuple[list[int], int]:
    """Accepted path (root included) and depth of one row."""
    acceptance = follow_matches(torch.tensor([nodes]), torch.tensor([chosen]), topology.tensors(1, CPU))
    depth = int(acceptance.depth)
    assert acceptance.path[0, depth + 1 :].tolist() == list(range(depth + 1, len(nodes)))
    return acceptance.path[0, : depth + 1].tolist(), depth


def test_chain_is_accepted_up_to_its_first_mistake():
    assert verify(Topology.chain(3), [9, 1, 7, 3], [1, 2, 3, 4]) == ([0, 1], 1)


def test_rows_may_hold_trees_of_different_shape():
    tree = TreeTensors.from_parents(torch.tensor([[-1, 0, 1], [-1, 0, 0]]))
    acceptance = follow_matches(torch.tensor([[9, 1, 2], [9, 1, 2]]), torch.tensor([[1, 2, 3], [2, 2, 3]]), tree)
    assert acceptance.depth.tolist() == [2, 1]
    assert acceptance.path[1, 1] == 2


def brute_force(parents: list[int], nodes: list[int], chosen: list[int]) -> list[int]:
    """The deepest path from the root all of whose tokens the target chose; of equals the one that ends first."""
    best = [0]

    def descend(path: list[int]) -> None:
        nonlocal best
        if (len(path), -path[-1]) > (len(best), -best[-1]):
            best = path
        for child in range(1, len(parents)):
            if parents[child] == path[-1] and nodes[child] == chosen[path[-1]]:
                descend([*path, child])

    descend([0])
    return best


@st.composite
def blocks(draw) -> tuple[list[int], list[int], list[int]]:
    n = draw(st.integers(1, 10))
    parents = [-1]
    for node in range(1, n):
        parents.append(draw(st.sampled_from([-1] + [p for p in range(node) if p == 0 or parents[p] >= 0])))
    few = st.integers(0, 1)  # two tokens only, so that many paths match
    nodes = draw(st.lists(st.integers(-1, 1), min_size=n, max_size=n))
    return parents, [draw(few), *nodes[1:]], draw(st.lists(few, min_size=n, max_size=n))


@given(blocks())
def test_acceptance_equals_a_walk_in_plain_python(block):
    parents, nodes, chosen = block
    path, depth = verify(Topology.from_parents(parents), nodes, chosen)
    assert path == brute_force(parents, nodes, chosen)
    assert depth == len(path) - 1
