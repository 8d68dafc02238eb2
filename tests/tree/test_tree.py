"""Topologies: static and on the device, against plain-Python walks."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from decoders.common.devices import moved_together
from decoders.common.host_reads import as_recorded
from decoders.errors import DraftError
from decoders.strategy import Draft
from decoders.tree import Topology, TreeTensors

CPU = torch.device("cpu")


@st.composite
def parent_lists(draw, max_nodes: int = 12, non_candidates: bool = False) -> list[int]:
    """Parents of a tree; with `non_candidates`, some nodes have none and no children."""
    parents = [-1]
    for node in range(1, draw(st.integers(1, max_nodes))):
        possible = [p for p in range(node) if p == 0 or parents[p] >= 0]
        parents.append(draw(st.sampled_from([-1, *possible] if non_candidates else possible)))
    return parents


def walk(parents: list[int], node: int) -> list[int]:
    path = [node]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path


def same(left: TreeTensors, right: TreeTensors) -> bool:
    return all(torch.equal(getattr(left, f.name), getattr(right, f.name)) for f in dataclasses.fields(TreeTensors))


@given(parent_lists(non_candidates=True))
def test_ancestors_are_the_walk_to_the_root(parents):
    tree = Topology.from_parents(parents).tensors(2, CPU)
    for node in range(len(parents)):
        path = walk(parents, node)
        candidate = path[-1] == 0
        expected = [candidate and k in path for k in range(len(parents))]
        assert tree.ancestors[0, node].tolist() == tree.ancestors[1, node].tolist() == expected
        assert tree.visible[0, node].tolist() == [k in path for k in range(len(parents))]
        assert tree.offsets[0, node] == len(path) - 1


@given(parent_lists(non_candidates=True), parent_lists(non_candidates=True))
def test_topology_made_on_the_device_equals_the_static_one(first, second):
    nodes = max(len(first), len(second))
    rows = [Topology.from_parents(p).padded(nodes) for p in (first, second)]
    parents = torch.tensor([r.parents for r in rows])
    with as_recorded():
        made = TreeTensors.from_parents(parents)
    assert same(TreeTensors.from_parents(parents), made), "on the host it is made node by node"
    for row, topology in enumerate(rows):
        alone = TreeTensors(*(getattr(made, f.name)[row : row + 1] for f in dataclasses.fields(TreeTensors)))
        assert same(alone, topology.tensors(1, CPU))


def test_deep_chain_on_the_device_reaches_its_root():
    with as_recorded():
        made = TreeTensors.from_parents(torch.arange(-1, 64)[None])
    assert same(made, Topology.chain(64).tensors(1, CPU))


@given(parent_lists(non_candidates=True), parent_lists(non_candidates=True))
def test_merged_trees_share_only_the_root(left, right):
    a, b = Topology.from_parents(left), Topology.from_parents(right)
    merged = a.merge(b)
    assert len(merged) == len(a) + len(b) - 1
    assert merged.parents[: len(a)] == a.parents
    for node in range(1, len(b)):
        moved = [0 if k == 0 else k + len(a) - 1 for k in walk(right, node)]
        assert walk(list(merged.parents), node + len(a) - 1) == moved
        assert merged.offsets[node + len(a) - 1] == b.offsets[node]


def test_merging_renumbers_extra_visible():
    window = Topology((-1, -1, -1), (0, 1, 2), ((), (0,), (0, 1)))
    merged = Topology.chain(2).merge(window)
    assert merged.extra_visible == ((), (), (), (0,), (0, 3))
    assert merged.tensors(1, CPU).visible[0, 4].tolist() == [True, False, False, True, True]


@given(parent_lists(non_candidates=True), st.integers(1, 14))
def test_head_keeps_the_first_nodes(parents, nodes):
    tree = Topology.from_parents(parents)
    kept = tree.head(nodes)
    assert kept.parents == tree.parents[:nodes]
    assert kept.offsets == tree.offsets[:nodes]


def test_head_forgets_visibility_of_what_is_gone():
    tree = Topology((-1, -1, -1), (0, 1, 2), ((), (0, 2), (0,)))
    assert tree.head(2).extra_visible == ((), (0,))


@given(parent_lists(), st.integers(1, 20))
def test_padding_is_never_accepted_and_changes_nobody(parents, nodes):
    tree = Topology.from_parents(parents)
    padded = tree.padded(nodes)
    assert len(padded) == max(nodes, len(tree))
    tensors, n = padded.tensors(1, CPU), len(tree)
    assert not tensors.ancestors[0, n:].any()
    assert torch.equal(tensors.ancestors[:, :n, :n], tree.tensors(1, CPU).ancestors)
    assert not tensors.visible[0, :n, n:].any()


def test_paths_in_medusas_notation():
    tree, draft_tokens = Topology.from_paths([[0], [0, 0], [1], [0, 1], [1, 0]])
    assert tree.parents == (-1, 0, 0, 1, 1, 2)
    assert draft_tokens == ((0, 0), (0, 1), (1, 0), (1, 1), (1, 0))


@given(st.sets(st.lists(st.integers(0, 2), min_size=1, max_size=3).map(tuple), max_size=6))
def test_every_path_becomes_the_node_that_it_spells(paths):
    closed = {path[:end] for path in paths for end in range(1, len(path) + 1)}
    tree, draft_tokens = Topology.from_paths(sorted(closed))
    spelled = {tuple(draft_tokens[node - 1][1] for node in tree.path_to(n)[1:]) for n in range(1, len(tree))}
    assert spelled == closed
    assert all(level == tree.offsets[node + 1] - 1 for node, (level, _) in enumerate(draft_tokens))


def test_path_without_its_parent_is_refused():
    with pytest.raises(DraftError, match=r"\[1, 0\] has no parent \[1\]"):
        Topology.from_paths([[0], [1, 0]])


@pytest.mark.parametrize(
    ("parents", "offsets", "extra_visible", "message"),
    [
        ((), (), (), "node 0 must be the root"),
        ((0,), (0,), (), "node 0 must be the root"),
        ((-1,), (1,), (), "node 0 must be the root"),
        ((-1, 0), (0,), (), "lengths differ"),
        ((-1, 0), (0, 1), ((),), "lengths differ"),
        ((-1, 1), (0, 1), (), "a parent must come before its child"),
        ((-1, 2, 0), (0, 1, 1), (), "a parent must come before its child"),
        ((-1, -2), (0, 1), (), "a parent must come before its child"),
        ((-1, 0), (0, 2), (), "one position after its parent"),
        ((-1, -1, 1), (0, 1, 2), (), "can never be accepted"),
        ((-1, -1), (0, 1), ((), (2,)), "numbered 0 to 1"),
        ((-1, 0, 0), (0, 1, 1), ((), (), (1,)), "may see its own ancestors only"),
        ((-1, -1), (0, 1), ((1,), ()), "may see its own ancestors only"),
    ],
)
def test_broken_topology_is_refused(parents, offsets, extra_visible, message):
    with pytest.raises(DraftError, match=message):
        Topology(parents, offsets, extra_visible)


@pytest.mark.parametrize("parents", [[-1, 1], [-1, 5], [-1, -2]])
def test_from_parents_refuses_what_is_no_tree(parents):
    with pytest.raises(DraftError):
        Topology.from_parents(parents)


def test_topologies_of_the_same_shape_share_their_tensors():
    assert Topology.branches(2, 3).tensors(2, CPU) is Topology.branches(2, 3).tensors(2, CPU)
    assert Topology.from_parents([-1, 0]) == Topology.chain(1)


SHAPES = [[-1], [-1, 0], [-1, 0, 0, 1, 1, 2], [-1, 0, 1, 2], [-1, -1, 0, 2], [-1, 0, 0, 0, -1, 3]]


def same_candidates(trees: TreeTensors, topology: Topology) -> None:
    """`trees` are `topology` in every row, as far as it may be accepted; of other nodes nothing is asked here."""
    rows = len(trees.offsets)
    wanted = topology.tensors(rows, CPU)
    assert len(trees) == len(topology)
    assert torch.equal(trees.ancestors, wanted.ancestors) and torch.equal(trees.candidates, wanted.candidates)
    may = wanted.candidates
    for field in ("parents", "offsets", "visible"):
        assert torch.equal(getattr(trees, field)[may], getattr(wanted, field)[may]), field


@pytest.mark.parametrize("parents", SHAPES, ids=str)
def test_trees_per_row_are_cut_and_padded_as_topologies_are(parents):
    topology = Topology.from_parents(parents)
    trees = TreeTensors.from_parents(torch.tensor([parents] * 2))
    same_candidates(trees, topology)
    for nodes in range(1, len(parents) + 1):
        same_candidates(trees.head(nodes), topology.head(nodes))
    for nodes in range(len(parents), len(parents) + 4):
        same_candidates(trees.padded(nodes), topology.padded(nodes))
        assert bool(trees.padded(nodes).visible.diagonal(dim1=1, dim2=2).all()), "a row that sees nothing gives NaN"


@pytest.mark.parametrize("second", SHAPES, ids=str)
@pytest.mark.parametrize("first", SHAPES, ids=str)
def test_trees_per_row_are_merged_as_topologies_are(first, second):
    merged = TreeTensors.from_parents(torch.tensor([first] * 2)).merge(
        TreeTensors.from_parents(torch.tensor([second] * 2))
    )
    same_candidates(merged, Topology.from_parents(first).merge(Topology.from_parents(second)))


def test_rows_of_different_shape_are_merged_each_by_itself():
    first = [[-1, 0, 1], [-1, 0, 0]]
    second = [[-1, 0, 0, 1], [-1, -1, 0, 2]]
    merged = TreeTensors.from_parents(torch.tensor(first)).merge(TreeTensors.from_parents(torch.tensor(second)))
    for row in range(2):
        alone = TreeTensors(
            *(getattr(merged, f)[row : row + 1] for f in ("parents", "offsets", "visible", "ancestors"))
        )
        same_candidates(alone, Topology.from_parents(first[row]).merge(Topology.from_parents(second[row])))


@given(st.lists(st.integers(-1, 6), min_size=1, max_size=10))
def test_trees_made_on_the_device_are_those_made_on_the_host(raw):
    parents = [-1]
    for node, parent in enumerate(raw, start=1):
        parent = min(parent, node - 1)
        sound = parent <= 0 or parents[parent] >= 0
        parents.append(parent if sound else -1)
    topology = Topology.from_parents(parents)
    for depth in (None, topology.max_depth):
        with as_recorded():
            made = TreeTensors.from_parents(torch.tensor([parents]), depth)
        same_candidates(made, topology)


@pytest.mark.parametrize("parents", [None, [[-1, 0, 1, 0], [-1, 0, 0, -1]]], ids=["chains", "trees"])
@pytest.mark.parametrize("grades", [None, [[1, 2, 3], [4, 5, 0]]], ids=["", "grades"])
@pytest.mark.parametrize("scored", [False, True], ids=["", "scores"])
def test_a_draft_of_lists_is_on_the_host_and_moves_in_one_copy(parents: Any, grades: Any, scored: bool) -> None:
    tokens = [[7, 8, 9], [5, 6, -1]]
    here = dataclasses.replace(
        Draft.listed(tokens, parents, 2, grades), scores=torch.zeros(2, 3, 5) if scored else None
    )
    here.check(2)
    assert here.read() == (tokens, here.parents, grades) and here.on_host and here.head(2).on_host
    assert here.tokens.tolist() == tokens and [list(row) for row in here.parents] == (parents or [[-1, 0, 1, 2]] * 2)
    assert grades is None or (here.grades is not None and here.grades.tolist() == grades)
    there = here.moved(torch.device("meta"))
    there.check(2)
    assert there.moved(torch.device("cpu")) is there
    tensors = [t for part in (there, there.topology) for t in vars(part).values() if isinstance(t, torch.Tensor)]
    assert len(tensors) == 1 + (grades is not None) + scored + 4 * (parents is not None)
    assert len({tensor.untyped_storage()._cdata for tensor in tensors}) == 1 and there.levels == here.levels


def test_tensors_that_move_together_keep_their_values_and_are_parts_of_one() -> None:
    tensors = [
        torch.tensor([True, False, True]),
        torch.arange(4).view(2, 2),
        torch.arange(3).float().expand(2, 3),
        torch.empty(0, 5),
    ]
    moved = moved_together(tensors, torch.device("cpu"))
    assert all(map(torch.equal, moved, tensors)) and [t.dtype for t in moved] == [t.dtype for t in tensors]
    assert len({tensor.untyped_storage().data_ptr() for tensor in moved}) == 1
