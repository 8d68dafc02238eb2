"""The rules on hand-made numbers: never, always and sometimes accepted."""

from __future__ import annotations

import pytest
import torch

from decoders.tree import Topology
from decoders.verifiers import Block, BlockVerification, Coupled, Outcomes, Rejection, TreeRejection

ALL = [Coupled, Rejection, TreeRejection, BlockVerification]
SAMPLED = [Rejection, TreeRejection, BlockVerification]  # rules that read q
CPU = torch.device("cpu")
A, B, C, D = 0, 1, 2, 3
UNIFORM = [0.25, 0.25, 0.25, 0.25]


def only(token: int) -> list[float]:
    return [float(t == token) for t in range(4)]


def judge(verifier, parents: list[int], drafted: list[int], p: list[list[float]], q: list[list[float]]) -> Outcomes:
    """The outcome distribution for one row; `p` per node, `q` per draft token."""
    topology = Topology.from_parents(parents)
    block = Block(
        torch.tensor([[A, *drafted]]),
        topology.tensors(1, CPU),
        torch.tensor([p]),
        torch.tensor(q).view(1, len(drafted), 4),
    )
    return verifier().outcomes(block)


def ends(outcomes: Outcomes) -> list[float]:
    return pytest.approx(outcomes.end[0].tolist(), abs=1e-6)


def after(outcomes: Outcomes, node: int) -> list[float]:
    return pytest.approx(outcomes.next[0, node].tolist(), abs=1e-6)


@pytest.mark.parametrize("verifier", ALL)
def test_certain_and_right_chain_is_always_accepted(verifier):
    outcomes = judge(verifier, [-1, 0, 1], [B, C], [only(B), only(C), UNIFORM], [only(B), only(C)])
    assert ends(outcomes) == [0, 0, 1]
    assert after(outcomes, 2) == UNIFORM


@pytest.mark.parametrize("verifier", SAMPLED)
def test_draft_equal_to_the_target_is_accepted_whatever_its_rounding(verifier):
    p = torch.randn(200, 2, 50, generator=torch.Generator().manual_seed(0)).softmax(-1)
    nodes = torch.arange(200)[:, None] % 50 * torch.tensor([0, 1])
    block = Block(nodes, Topology.chain(1).tensors(200, CPU), p, p[:, :1])
    assert torch.equal(verifier().outcomes(block).end, torch.tensor([[0.0, 1.0]]).expand(200, -1))


@pytest.mark.parametrize("verifier", SAMPLED)
def test_rejected_draft_token_leaves_the_residual(verifier):
    outcomes = judge(verifier, [-1, 0], [A], [[0.2, 0.4, 0.4, 0], UNIFORM], [[0.5, 0.2, 0.3, 0]])
    assert ends(outcomes) == [0.6, 0.4]  # 0.2 / 0.5 accepted
    assert after(outcomes, 0) == [0, 2 / 3, 1 / 3, 0]


@pytest.mark.parametrize("verifier", ALL)
def test_sure_draft_token_is_accepted_as_often_as_the_target_draws_it(verifier):
    outcomes = judge(verifier, [-1, 0], [B], [[0.1, 0.7, 0.2, 0], UNIFORM], [only(B)])
    assert ends(outcomes) == [0.3, 0.7]
    assert after(outcomes, 0) == [1 / 3, 0, 2 / 3, 0]


def test_second_token_is_judged_by_itself_in_rejection_and_with_its_prefix_in_block_verification():
    p = [[0.25, 0.75, 0, 0], [0.5, 0.5, 0, 0], UNIFORM]
    q = [[0.5, 0.5, 0, 0], [0.25, 0.75, 0, 0]]
    # First draft token at 1/2 of its chance, second at twice: the rule of blocks lets the second pay for the first.
    assert ends(judge(Rejection, [-1, 0, 1], [A, A], p, q)) == [1 / 2, 0, 1 / 2]
    # p_1 = 1/2, p_2 = 1; the chain is kept whole.
    assert ends(judge(BlockVerification, [-1, 0, 1], [A, A], p, q)) == [0, 0, 1]


def test_block_verification_keeps_a_prefix_of_a_chain_that_fails_later():
    p = [[0.25, 0.75, 0, 0], [0.5, 0.5, 0, 0], UNIFORM]
    q = [[0.5, 0.5, 0, 0], [0.25, 0.75, 0, 0]]
    outcomes = judge(BlockVerification, [-1, 0, 1], [A, B], p, q)
    # p_1 = 1/2, p_2 = 1/3; S_1 = max(1/4 - 1/4, 0) + max(1/4 - 3/4, 0) = 0, so h_1 = 0.
    assert ends(outcomes) == [2 / 3, 0, 1 / 3]
    assert after(outcomes, 0) == [0, 1, 0, 0]


def test_siblings_without_replacement_are_tried_on_what_is_left():
    p, q = [0.1, 0.4, 0.5, 0], [0.5, 0.3, 0.2, 0]
    outcomes = judge(TreeRejection, [-1, 0, 0], [A, B], [p, UNIFORM, UNIFORM], [q, q])
    # A: 0.1/0.5. Rejected: r = (0, 1/4, 3/4), q = (0, 3/5, 2/5). B: (1/4) / (3/5) = 5/12 of 4/5. Left: all on C.
    assert ends(outcomes) == [0.8 * 7 / 12, 0.2, 0.8 * 5 / 12]
    assert after(outcomes, 0) == [0, 0, 1, 0]


@pytest.mark.parametrize("verifier", [TreeRejection, Coupled])
def test_twin_of_a_sibling_is_never_accepted(verifier):
    outcomes = judge(verifier, [-1, 0, 0], [B, B], [[0.5, 0.5, 0, 0], UNIFORM, UNIFORM], [only(B), only(B)])
    assert ends(outcomes) == [0.5, 0.5, 0]
    assert after(outcomes, 0) == [1, 0, 0, 0]


@pytest.mark.parametrize("verifier", ALL)
def test_missing_draft_token_is_not_accepted_nor_what_continues_it_and_leaves_the_target_alone(verifier):
    p = [0.1, 0.2, 0.3, 0.4]
    outcomes = judge(verifier, [-1, 0, 1], [-1, B], [p, only(B), UNIFORM], [only(A), only(B)])
    assert ends(outcomes) == [1, 0, 0]
    assert p == after(outcomes, 0)


@pytest.mark.parametrize("verifier", ALL)
def test_row_of_a_missing_draft_token_may_hold_anything(verifier):
    p = [0.1, 0.2, 0.3, 0.4]
    outcomes = judge(verifier, [-1, 0], [-1], [p, UNIFORM], [[float("nan")] * 4])
    assert ends(outcomes) == [1, 0]
    assert p == after(outcomes, 0)


@pytest.mark.parametrize("verifier", SAMPLED)
def test_token_that_the_draft_rules_out_counts_as_no_draft_token(verifier):
    p = [0.1, 0.2, 0.3, 0.4]
    outcomes = judge(verifier, [-1, 0], [A], [p, UNIFORM], [[0, 0.5, 0.5, 0]])
    assert ends(outcomes) == [1, 0]
    assert p == after(outcomes, 0)


@pytest.mark.parametrize("verifier", [Rejection, BlockVerification])
def test_rule_for_chains_keeps_to_the_first_chain_of_a_tree(verifier):
    p = [[0.5, 0.5, 0, 0], UNIFORM, UNIFORM]
    outcomes = judge(verifier, [-1, 0, 0], [A, B], p, [only(A), only(B)])
    assert ends(outcomes) == [0.5, 0.5, 0]
    assert after(outcomes, 0) == [0, 1, 0, 0]
