"""Every verifier keeps the target's distribution, computed over all drafts; rules that do not are found out."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from decoders.registry import registry
from decoders.testing import check_verifier
from decoders.testing.verifiers import EnumerationCase, cases
from decoders.verifiers import Block, BlockVerification, Coupled, Outcomes, Rejection, TreeRejection, Verifier

BUILT_IN = [entry.cls for entry in registry().verifiers().values() if entry.provider == "hf-decoders"]


@pytest.mark.parametrize("verifier", BUILT_IN, ids=lambda v: v.name)
def test_tokens_follow_the_target(verifier):
    check_verifier(verifier)


class OneChild(TreeRejection):
    """Passes over every child but the first."""

    def outcomes(self, block: Block) -> Outcomes:
        return super().outcomes(replace(block, siblings=1))


@pytest.mark.slow
def test_passing_over_siblings_is_exact():
    check_verifier(OneChild)


class SiblingsKeepTheirShare(TreeRejection):
    """Forgets that a sibling cannot be drawn twice."""

    @staticmethod
    def left(q, tried):
        return q


class SiblingsLoseTheirShare(TreeRejection):
    """Takes the drawn sibling out of q, but does not scale what is left."""

    @staticmethod
    def left(q, tried):
        return q.masked_fill(tried, 0.0)


class NoResidual(Rejection):
    """Draws from p, not from the residual, after a rejection."""

    def outcomes(self, block: Block) -> Outcomes:
        return replace(super().outcomes(block), next=block.target)


class TokenWeights(BlockVerification):
    """Ends the block by the token rule, but goes on as the block rule does."""

    def outcomes(self, block: Block) -> Outcomes:
        return replace(super().outcomes(block), end=Rejection().outcomes(block).end)


class Eager(Rejection):
    """Accepts all draft tokens, missing ones too."""

    def outcomes(self, block: Block) -> Outcomes:
        end = torch.zeros_like(block.target[..., 0])
        end[:, -1] = 1
        return Outcomes(end, block.target)


class Scaling(Rejection):
    """Reads a value on the host, and torch.compile can trace it."""

    def outcomes(self, block: Block) -> Outcomes:
        outcomes = super().outcomes(block)
        return replace(outcomes, end=outcomes.end + block.target.sum().item() * 0)


class MovesTheTree(Rejection):
    """Computes with parents in place."""

    def outcomes(self, block: Block) -> Outcomes:
        outcomes = super().outcomes(block)
        block.tree.parents.zero_()
        return outcomes


class Peeking(Rejection):
    """Reads a value on the host."""

    def outcomes(self, block: Block) -> Outcomes:
        assert float(block.target.sum()) > 0
        return super().outcomes(block)


@pytest.mark.parametrize(
    "broken, reason",
    [
        (SiblingsKeepTheirShare, "the target.s is"),
        (SiblingsLoseTheirShare, "the target.s is"),
        (NoResidual, "the target.s is"),
        (TokenWeights, "the target.s is"),
        (Eager, "the target.s is|without a draft token"),
        (Peeking, "without graph breaks"),
        (Scaling, "reads values on the host"),
        (MovesTheTree, "writes into the block"),
    ],
)
def test_broken_rule_is_caught(broken, reason):
    with pytest.raises(AssertionError, match=reason):
        check_verifier(broken)


def test_lossy_rule_is_held_to_the_contract_only():
    class Lossy(NoResidual):
        exact = False

    check_verifier(Lossy)

    class LossyAndEager(Eager):
        exact = False

    with pytest.raises(AssertionError, match="without a draft token"):
        check_verifier(LossyAndEager)


@pytest.mark.parametrize("given, reason", [((1, 2), "must return Outcomes, not a tuple"), (KeyError(3), "KeyError: 3")])
def test_a_verifier_that_gives_nothing_is_told_where(given, reason):
    class Broken(Rejection):
        def outcomes(self, block: Block) -> Outcomes:
            if isinstance(given, Exception):
                raise given
            return given

    with pytest.raises(AssertionError, match=rf"Broken\(\) on root alone, .*: .*{reason}"):
        check_verifier(Broken())


@pytest.mark.parametrize(
    "change, reason",
    [
        (lambda o: replace(o, end=o.end.float()), "float32"),
        (lambda o: replace(o, end=o.end[:, :1]), "`end` must be"),
        (lambda o: replace(o, next=o.next[..., :-1]), "`next` must be"),
        (lambda o: replace(o, end=o.end / 2), "end does not sum to 1"),
        (lambda o: replace(o, next=o.next / 2), "next does not sum to 1"),
        (lambda o: replace(o, next=o.next / 0), "not finite"),
    ],
)
def test_contract_is_checked(change, reason):
    class Changed(Rejection):
        exact = False

        def outcomes(self, block: Block) -> Outcomes:
            return change(super().outcomes(block))

    with pytest.raises(AssertionError, match=reason):
        check_verifier(Changed)


class WritesIntoTheBlock(Rejection):
    """Computes the residual in place."""

    def outcomes(self, block: Block) -> Outcomes:
        outcomes = super().outcomes(block)
        block.target.mul_(0.5)
        return outcomes


def test_rule_that_writes_into_the_block_is_caught():
    with pytest.raises(AssertionError, match="writes into"):
        check_verifier(WritesIntoTheBlock)


def test_name_and_summary_are_checked():
    with pytest.raises(AssertionError, match="snake_case"):
        check_verifier(type("Shouting", (Rejection,), {"name": "REJECT"}))
    with pytest.raises(AssertionError, match="one line"):
        check_verifier(type("Silent", (Rejection,), {"summary": ""}))


class ReadsOtherRows(Rejection):
    """Mixes the rows of a batch."""

    exact = False

    def outcomes(self, block: Block) -> Outcomes:
        outcomes = super().outcomes(block)
        return replace(outcomes, end=outcomes.end.roll(1, 0))


def test_rows_that_depend_on_each_other_are_caught():
    with pytest.raises(AssertionError, match="other rows|without a draft token"):
        check_verifier(ReadsOtherRows)


def accepted(verifier: Verifier, case: EnumerationCase) -> float:
    drafts = case.drafts()
    return case.accepted(drafts, verifier.outcomes(drafts.block))


def test_block_verification_accepts_as_much_as_rejection_or_more():
    more = 0
    for case in cases(trees=False, seed=1):
        token, block = accepted(Rejection(), case), accepted(BlockVerification(), case)
        assert block >= token - 1e-12, case.name
        more += block > token + 1e-3
    assert more > 5


def test_tree_rejection_accepts_as_much_as_coupled_on_drawn_draft_tokens():
    for case in cases(trees=True, seed=1):
        if "drawn" in case.name and case.parents == (-1, 0):  # one draft token: rejection is optimal, 1 - TV(p, q)
            p, q = case.target[0][0], case.draft[0][0]
            assert accepted(TreeRejection(), case) == pytest.approx(float(torch.minimum(p, q).sum()))
            assert accepted(Coupled(), case) == pytest.approx(float((p * q).sum()))


def test_example_of_the_block_verification_paper():
    """Two tokens, p = (1/3, 2/3), q = (2/3, 1/3), two draft tokens: 10/9 by tokens, 11/9 by blocks (its section 2)."""
    p, q = torch.tensor([1 / 3, 2 / 3], dtype=torch.float64), torch.tensor([2 / 3, 1 / 3], dtype=torch.float64)
    case = EnumerationCase(
        "paper", (-1, 0, 1), tuple(p.expand(2**d, 2) for d in range(3)), tuple(q.expand(2**d, 2) for d in range(3))
    )
    assert accepted(Rejection(), case) == pytest.approx(10 / 9)
    assert accepted(BlockVerification(), case) == pytest.approx(11 / 9)
