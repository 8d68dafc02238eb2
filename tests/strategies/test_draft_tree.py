"""Trees of draft tokens: their shapes, which nodes are kept, and what the draft model says at each of them."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from decoders.drafters import Expansion
from decoders.errors import DraftError
from decoders.strategies import Speculative
from decoders.strategies.draft_tree import RANK_SHARES, DynamicTree, StaticTree, best_nodes, likely_paths
from decoders.testing import Spy, decode, prompts
from decoders.testing.spy import inspect_tree
from decoders.tree import Topology, TreeTensors

from .conftest import paths_of

CPU = torch.device("cpu")


@pytest.mark.parametrize("depth, children, nodes", [(5, 4, 24), (1, 2, 2), (3, 8, 60), (8, 2, 7), (2, 3, 12)])
def test_likely_paths_are_the_likeliest_of_all_paths(depth, children, nodes):
    paths = likely_paths(depth, children, nodes)
    every = (
        [p for d in range(1, depth + 1) for p in itertools.product(range(min(children, 8)), repeat=d)]
        if depth < 6
        else []
    )
    assert len(set(paths)) == len(paths) == min(nodes, len(every) or nodes)
    assert all(path[:-1] in paths for path in paths if len(path) > 1), "no node without its parent"
    assert paths == likely_paths(depth, children, nodes)

    def chance(path: tuple[int, ...]) -> float:
        return math.prod(RANK_SHARES[rank] for rank in path)

    assert sorted(map(chance, paths), reverse=True) == pytest.approx(
        sorted(map(chance, every), reverse=True)[:nodes] or list(map(chance, paths))
    )


def test_fewer_paths_than_nodes_are_all_of_them():
    assert likely_paths(1, 3, 24) == ((0,), (1,), (2,))
    assert len(likely_paths(2, 32, 256)) == 8 + 64


class Table:
    """A draft model whose next token depends on the token before: ``[B, V, V]`` log-probabilities by row."""

    def __init__(self, table: Tensor, children: int) -> None:
        self.table, self.children = table, children

    def root(self) -> Expansion:
        return self._after(torch.zeros(len(self.table), 1, dtype=torch.int64))

    def expand(self, nodes: Tensor, tree: TreeTensors) -> Expansion:
        assert nodes.shape[1] < len(tree) and bool(tree.visible[:, :, 0].all()), "everything sees the root"
        inspect_tree(tree, len(nodes))
        return self._after(nodes)

    def _after(self, nodes: Tensor) -> Expansion:
        scores = self.table.gather(1, nodes[..., None].expand(-1, -1, self.table.shape[2]))
        best = scores.topk(self.children)
        return Expansion(best.indices, best.values, scores)


def table(rows: int, vocab: int, seed: int = 0, ties: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(0, 3, (rows, vocab, vocab), generator=generator).float() if ties else torch.randn(
        rows, vocab, vocab, generator=generator
    ).mul(2)  # fmt: skip
    return logits.log_softmax(-1)


def test_a_static_tree_holds_the_ranks_that_its_template_says():
    template = [(0,), (2,), (0, 1), (0, 0), (2, 0), (0, 1, 0)]
    tree, model = StaticTree(template, 2, CPU), Table(table(2, 6), 3)
    assert tree.children == 3
    draft = tree.draft(model)
    assert draft.scores is not None and draft.scores.shape == (2, 6, 6)
    for row in range(2):
        wanted = set()
        for path in template:
            tokens: tuple[int, ...] = ()
            for rank in path:
                best = model.table[row, tokens[-1] if tokens else 0].topk(3).indices.tolist()
                tokens = (*tokens, best[rank])
            wanted.add(tokens)
        found = paths_of(draft, row)
        assert set(found) == wanted
        for path, node in found.items():
            before = path[-2] if len(path) > 1 else 0
            assert torch.equal(draft.scores[row, node - 1], model.table[row, before]), "what the token was drawn from"


def test_a_template_with_a_missing_parent_is_refused(target, near):
    with pytest.raises(DraftError, match=r"path \[1, 0\] has no parent \[1\]"):
        decode(
            target, prompts(), Speculative(tree="static", template=((0,), (1, 0))), assistant_model=near, max_new_tokens=4,
            decoders_config={"compile": False},
        )  # fmt: skip


def test_a_template_of_the_users_own(target, near):
    spy = Spy(Speculative(tree="static", template=((0,), (1,), (4,), (4, 0), (4, 0, 0))))
    out = decode(target, prompts(3), spy, assistant_model=near, max_new_tokens=20, decoders_config={"compile": False})
    assert torch.equal(out.sequences, decode(target, prompts(3), max_new_tokens=20).sequences)
    assert spy.seen[0].draft.topology == Topology.from_parents([-1, 0, 0, 0, 3, 4]) and out.report.nodes == 6


def weight_of(rows: Tensor, path: tuple[int, ...], children: int) -> float:
    """Cumulative log-probability of a path, all of whose steps are among the best children."""
    weight = 0.0
    for before, token in itertools.pairwise((0, *path)):
        assert token in rows[before].topk(children).indices
        weight += float(rows[before, token])
    return weight


def beam_search(
    rows: Tensor, depth: int, beam: int, children: int, floor: float | None
) -> dict[tuple[int, ...], float]:
    """All nodes that the search finds in one row, with cumulative log-probability, in plain Python."""

    def after(path: tuple[int, ...], weight: float) -> dict[tuple[int, ...], float]:
        best = rows[path[-1] if path else 0].topk(children)
        return {(*path, int(t)): weight + float(w) for t, w in zip(best.indices, best.values, strict=True)}

    level = after((), 0.0)
    found = dict(level)
    for _ in range(1, depth):
        kept = sorted(level, key=lambda path: -level[path])[:beam]
        kept = [path for path in kept if floor is None or level[path] >= floor]
        level = {child: weight for path in kept for child, weight in after(path, level[path]).items()}
        found |= level
    return found


@given(
    seed=st.integers(0, 10**6), rows=st.integers(1, 3), depth=st.integers(1, 5), beam=st.integers(1, 4),
    children=st.integers(1, 4), nodes=st.integers(2, 30), floor=st.sampled_from([None, -1.0, -3.0]),
)  # fmt: skip
def test_a_dynamic_tree_is_the_likeliest_part_of_a_beam_search(seed, rows, depth, beam, children, nodes, floor):
    """Rows differ in shape. Paths around a cycle may weigh the same whatever their order: which of them is kept is open."""
    log = table(rows, 6, seed)
    limit = None if floor is None else torch.full((rows,), floor)
    draft, weights = DynamicTree(depth, beam, nodes, children, lambda f: f).weighted(Table(log, children), limit)
    draft.check(rows)
    inspect_tree(draft.topology, rows)  # type: ignore[arg-type]
    for row in range(rows):
        every = beam_search(log[row], depth, beam, children, floor)
        best = sorted(every.values(), reverse=True)[:nodes]
        found = paths_of(draft, row)
        weighed = {path: weight_of(log[row], path, children) for path in found}
        assert sorted(weighed.values(), reverse=True) == pytest.approx(best, abs=1e-4)
        for path, node in found.items():
            assert float(weights[row, node - 1]) == pytest.approx(weighed[path], abs=1e-4)


@given(seed=st.integers(0, 10**6), depth=st.integers(1, 5), beam=st.integers(1, 4), nodes=st.integers(2, 20))
def test_equally_likely_nodes_make_a_sound_tree(seed, depth, beam, nodes):
    draft, weights = DynamicTree(depth, beam, nodes, 3, lambda f: f).weighted(Table(table(3, 5, seed, ties=True), 3))
    inspect_tree(draft.topology, 3)  # type: ignore[arg-type]
    assert draft.tokens.shape[1] <= nodes and torch.isfinite(weights).all()
    for row in range(3):
        assert paths_of(draft, row), "something is proposed"


def test_a_certain_draft_is_kept_as_a_chain():
    """Every token of the chain has probability one: parents and children tie, and all of them are the best nodes."""
    certain = torch.full((1, 6, 6), -40.0)
    certain[0, torch.arange(6), (torch.arange(6) + 1) % 6] = 0.0
    draft, _ = DynamicTree(5, 2, 5, 2, lambda f: f).weighted(Table(certain, 2))
    assert (1, 2, 3, 4, 5) in paths_of(draft, 0)


@pytest.mark.parametrize("nodes", [1, 2, 3, 4])
def test_a_budget_that_splits_a_tie_keeps_parents_first(nodes):
    """A certain chain of six: whatever the budget, what is kept is its beginning."""
    parents = torch.tensor([[-1, 0, 1, 2, 3, 4]])
    tokens, _, _, offsets, _, ancestors = best_nodes(torch.arange(6)[None], torch.zeros(1, 6), parents, nodes, 6)
    assert tokens[0].tolist() == list(range(nodes))
    assert offsets[0].tolist() == list(range(nodes + 1)) and bool(ancestors[0].diagonal().all())


def test_what_does_not_count_is_no_draft_token():
    weights = torch.tensor([[-0.1, float("-inf"), -0.2, float("-inf")]])
    tokens, kept, *_ = best_nodes(torch.tensor([[5, 6, 7, 8]]), weights, torch.tensor([[-1, -1, 0, 1]]), 4, 2)
    assert tokens[0].tolist() == [5, -1, 7, -1] and (kept[tokens == -1] == float("-inf")).all()


@pytest.mark.in_turns
@pytest.mark.parametrize("tree", ["static", "dynamic"])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_every_level_says_what_a_plain_forward_over_the_nodes_own_path_says(target, monkeypatch, tree, name):
    """Read off the drafter: the log-probabilities of each level's continuations, over several steps and ragged rows."""
    from decoders.engine.decode.drafters.drafter import ModelDrafter
    from decoders.testing import tiny_model

    draft, checked = tiny_model(name, seed=2), []
    expand = ModelDrafter.expand

    def checking(self: ModelDrafter, nodes: Tensor, block: TreeTensors) -> Expansion:
        expansion = expand(self, nodes, block)
        if nodes.shape[1] == len(block) - 1:
            run[:] = []
        run.append(nodes)
        every = torch.cat(run, dim=1)
        for row in range(len(nodes)):
            text = self.rows.tokens[row, : self.rows.length[row]]
            for q in range(nodes.shape[1]):
                at = len(block) - nodes.shape[1] + q
                path = [k for k in range(1, len(block)) if block.visible[row, at, k]]
                with torch.no_grad():
                    logits = draft(torch.cat([text, every[row, [k - 1 for k in path]]])[None]).logits[0, -1]
                best = logits.log_softmax(-1).topk(expansion.tokens.shape[2])
                torch.testing.assert_close(expansion.weights[row, q], best.values, atol=1e-4, rtol=1e-4)
                assert torch.equal(expansion.tokens[row, q], best.indices)
                checked.append(len(path))
        return expansion

    run: list[Tensor] = []
    monkeypatch.setattr(ModelDrafter, "expand", checking)
    strategy = Speculative(tree=tree, length=4, nodes=10, children=3, beam=2)
    decode(target, prompts(2), strategy, assistant_model=draft, max_new_tokens=5, decoders_config={"compile": False})
    assert set(checked) == {1, 2, 3}
