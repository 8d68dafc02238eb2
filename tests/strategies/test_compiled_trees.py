"""The tree functions compiled: a handful of graphs for all settings, and eagerly where the compiler gives up."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from decoders.enabling import graphs_compiled
from decoders.engine.model.compiled.functions import CompiledFunction
from decoders.strategies.draft_tree import best_nodes, depth_bound
from decoders.strategies.staged import path_with_leaves

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def nodes_found(rows: int, found: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(found)
    weights = torch.rand(rows, found, generator=generator).log()
    parents = torch.stack([(torch.arange(found) * 0.7).long() - 1] * rows)
    return torch.randint(0, 50, (rows, found), generator=generator), weights, parents.clamp(min=-1)


@pytest.mark.usefixtures("traced_or_compiled")
def test_trees_of_every_depth_and_budget_share_graphs():
    compiled, before = CompiledFunction(best_nodes), graphs_compiled()
    for depth, found, nodes in ((2, 9, 4), (3, 20, 9), (4, 30, 12), (6, 40, 14), (9, 60, 25), (12, 63, 28), (15, 64, 29)):  # fmt: skip
        arguments = (*nodes_found(3, found), nodes, depth_bound(depth))
        for ours, plain in zip(compiled(*arguments), best_nodes(*arguments), strict=True):
            assert torch.equal(ours, plain)
    assert graphs_compiled() - before <= 2


@pytest.mark.slow
@pytest.mark.usefixtures("traced_or_compiled")
def test_paths_of_every_length_share_graphs():
    compiled, before = CompiledFunction(path_with_leaves), graphs_compiled()
    generator = torch.Generator().manual_seed(0)
    for length, children, nodes in ((16, 4, 36), (9, 3, 20), (12, 4, 36), (7, 2, 12), (5, 4, 11), (14, 3, 25), (8, 5, 30),
                                    (13, 6, 40), (10, 4, 17), (11, 7, 37)):  # fmt: skip
        weights = torch.rand(3, length + 1, children, generator=generator).log()
        tokens = torch.randint(0, 50, weights.shape, generator=generator)
        arguments = (tokens[:, :length, 0].contiguous(), tokens, weights, nodes, depth_bound(length))
        for ours, plain in zip(compiled(*arguments), path_with_leaves(*arguments), strict=True):
            assert torch.equal(ours, plain)
    assert graphs_compiled() - before <= 4


def test_what_cannot_be_compiled_runs_eagerly_after_one_warning():
    def reads_the_host(x: Tensor) -> Tensor:
        return x * int(x.tolist()[0] > 0) if x.sum().item() > 0 else -x

    compiled = CompiledFunction(reads_the_host)
    with pytest.warns(UserWarning, match="reads_the_host could not be compiled and runs uncompiled"):
        assert compiled(torch.tensor([2.0, 3.0])).tolist() == [2.0, 3.0]
    assert compiled(torch.tensor([-2.0, -3.0])).tolist() == [2.0, 3.0]
