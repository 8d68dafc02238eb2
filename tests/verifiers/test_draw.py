"""Drawing from the outcome distribution of a step: it follows the outcome distribution, with noise that nothing else shares."""

from __future__ import annotations

import pytest
import torch
from scipy import stats

from decoders.engine.decode.rules import draw
from decoders.engine.decode.verify import step_keys
from decoders.sampling.processors import SamplingInputs, SamplingPlan, choose, row_keys
from decoders.tree import Topology
from decoders.verifiers import Block, BlockVerification, Coupled, Outcomes, Rejection, TreeRejection

from .blocks import VOCAB, random_block

ROWS = 20_000
CPU = torch.device("cpu")
TREE = Topology.from_parents([-1, 0, 0, 1, 1, 2])


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    """One outcome distribution for all rows; the last node is never the end."""
    generator = torch.Generator().manual_seed(0)
    end = torch.tensor([0.3, 0.1, 0.2, 0.15, 0.25, 0.0])
    after = torch.randn(6, VOCAB, generator=generator).softmax(-1)
    after[1, :3] = 0
    after[1] /= after[1].sum()
    return Outcomes(end.expand(ROWS, -1), after.expand(ROWS, -1, -1))


def drawn(outcomes: Outcomes, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """End node and next token ``[ROWS]``."""
    nodes = torch.zeros(ROWS, 6, dtype=torch.int64)
    acceptance, token, sound = draw(nodes, TREE.tensors(ROWS, CPU), outcomes, keys)
    assert sound.all()
    return acceptance.path.gather(1, acceptance.depth[:, None])[:, 0], token


def assert_independent(first: torch.Tensor, second: torch.Tensor) -> None:
    size = int(max(first.max(), second.max())) + 1
    joint = torch.bincount(first * size + second, minlength=size * size).view(size, size)
    joint = joint[joint.sum(1) > 0][:, joint.sum(0) > 0]
    assert stats.chi2_contingency(joint.numpy()).pvalue > 1e-3


def test_end_and_next_follow_the_outcomes(outcomes):
    end, token = drawn(outcomes, row_keys(0, ROWS, CPU))
    expected = (outcomes.end[0][:, None] * outcomes.next[0]).flatten().double()
    counts = torch.bincount(end * VOCAB + token, minlength=len(expected))
    assert counts[expected == 0].sum() == 0
    possible = expected > 0
    wanted = (expected / expected.sum() * ROWS)[possible]
    assert stats.chisquare(counts[possible].numpy(), wanted.numpy()).pvalue > 1e-3


def test_path_leads_to_the_end_and_stays_put_behind_it():
    after = torch.full((6, 6, 3), 1 / 3)
    acceptance, *_ = draw(
        torch.zeros(6, 6, dtype=torch.int64), TREE.tensors(6, CPU), Outcomes(torch.eye(6), after), row_keys(0, 6, CPU)
    )
    assert acceptance.depth.tolist() == [0, 1, 1, 2, 2, 2]
    assert acceptance.path[4].tolist() == [0, 1, 4, 3, 4, 5]
    assert acceptance.path[5].tolist() == [0, 2, 5, 3, 4, 5]


def test_certain_next_token_is_taken():
    tokens = torch.tensor([2, 0, 1])
    outcomes = Outcomes(torch.ones(3, 1), torch.nn.functional.one_hot(tokens, 3).float()[:, None])
    _, token, _ = draw(
        torch.zeros(3, 1, dtype=torch.int64), Topology.chain(0).tensors(3, CPU), outcomes, row_keys(1, 3, CPU)
    )
    assert token.tolist() == tokens.tolist()


def test_missing_draft_token_is_not_accepted_even_if_the_law_says_so():
    outcomes = Outcomes(torch.tensor([[0.0, 1.0]]).expand(50, -1), torch.full((50, 2, 3), 1 / 3))
    nodes = torch.tensor([[3, -1]]).expand(50, -1)
    acceptance, *_ = draw(nodes, Topology.chain(1).tensors(50, CPU), outcomes, row_keys(0, 50, CPU))
    assert acceptance.depth.tolist() == [0] * 50


def test_equal_keys_give_equal_draws(outcomes):
    keys = row_keys(5, ROWS, CPU)
    assert all(torch.equal(a, b) for a, b in zip(drawn(outcomes, keys), drawn(outcomes, keys), strict=True))


def test_steps_are_independent(outcomes):
    keys = row_keys(0, ROWS, CPU)
    first, second = (drawn(outcomes, step_keys(keys, torch.full_like(keys, position))) for position in (4, 5))
    assert_independent(first[0], second[0])
    assert_independent(first[1], second[1])


@pytest.mark.parametrize("per_step", [False, True])
def test_draws_are_independent_of_the_noise_of_the_draft(outcomes, per_step):
    keys = row_keys(0, ROWS, CPU)
    positions = torch.arange(3).expand(ROWS, -1)
    inputs = SamplingInputs(torch.zeros(1), keys, torch.tensor([-1]))
    drafted = choose(torch.zeros(ROWS, 3, VOCAB), SamplingPlan(sample=True), inputs, positions)
    for result in drawn(outcomes, step_keys(keys, positions[:, 1]) if per_step else keys):
        for position in range(3):
            assert_independent(drafted[:, position], result)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_draw_equals_eager(outcomes, backend):
    keys = row_keys(5, ROWS, CPU)
    nodes = torch.zeros(ROWS, 6, dtype=torch.int64)
    arguments = nodes, TREE.tensors(ROWS, CPU), outcomes, keys
    acceptance, token, sound = torch.compile(draw, fullgraph=True, backend=backend)(*arguments)
    eager, eager_token, _ = draw(*arguments)
    # Vectorised logarithms differ in the last bit, which may turn a tie around: not more often than once in the batch.
    assert (acceptance.path != eager.path).any(1).sum() <= 1
    assert (acceptance.depth != eager.depth).sum() <= 1
    assert (token != eager_token).sum() <= 1
    assert sound.all()


@pytest.mark.slow
@pytest.mark.parametrize("verifier", [Coupled, Rejection, TreeRejection, BlockVerification], ids=lambda v: v.name)
def test_compiled_step_equals_eager_for_any_number_of_nodes(verifier):
    """Outcome distribution and draw in one graph; with a bound on siblings the number of nodes stays dynamic."""
    rule = verifier()

    def step(block: Block, keys: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outcomes = rule.outcomes(block)
        acceptance, token, _ = draw(block.nodes, block.tree, outcomes, keys)
        return outcomes.end, outcomes.next, acceptance.path, acceptance.depth, token

    graphs = torch._dynamo.utils.counters["stats"]
    before = graphs["unique_graphs"]
    compiled = torch.compile(step, fullgraph=True, dynamic=True)
    keys = step_keys(row_keys(3, 64, CPU), torch.arange(64))
    for topology in (Topology.branches(1, 4), Topology.branches(1, 7), Topology.branches(2, 3)):
        block = random_block(64, topology)
        for got, want in zip(compiled(block, keys), step(block, keys), strict=True):
            torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)
    assert graphs["unique_graphs"] == before + 1
