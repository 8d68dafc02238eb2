"""Properties of every rule on random blocks in single precision."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decoders.testing.verifiers import check_contract, rows_of
from decoders.tree import TreeTensors
from decoders.verifiers import Block, BlockVerification, Coupled, Rejection, TreeRejection

ALL = [Coupled, Rejection, TreeRejection, BlockVerification]
quick = settings(deadline=None, max_examples=25)


@st.composite
def blocks(draw, chain: bool = False, most: int = 7) -> Block:
    """Random trees per row (or one chain), draft tokens that need not come from ``q``, sharp and flat distributions."""
    rows, n, vocab = draw(st.integers(1, 4)), draw(st.integers(1, most)), draw(st.integers(2, 9))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    sharpness = draw(st.sampled_from([0.0, 1.0, 10.0, 300.0]))
    p, q = ((sharpness * torch.randn(rows, n - k, vocab, generator=generator)).softmax(-1) for k in (0, 1))
    if draw(st.booleans()):
        q = p[:, :-1].clone()
    parents = []
    for _ in range(rows):
        row = [-1]
        for node in range(1, n):
            trees = [-1] + [k for k in range(node) if k == 0 or row[k] >= 0]
            row.append(node - 1 if chain else draw(st.sampled_from(trees)))
        parents.append(row)
    nodes = torch.randint(-1, vocab, (rows, n), generator=generator)
    nodes[:, 0] = 0
    return Block(nodes, TreeTensors.from_parents(torch.tensor(parents)), p, q, draw(st.sampled_from([None, 1, 2])))


@pytest.mark.parametrize("verifier", ALL)
@quick
@given(block=blocks())
def test_outcomes_are_distributions_and_missing_draft_tokens_are_never_accepted(verifier, block):
    check_contract(block, verifier().outcomes(block))


@pytest.mark.parametrize("verifier", ALL)
@quick
@given(block=blocks())
def test_rows_are_independent(verifier, block):
    outcomes = verifier().outcomes(block)
    for row in range(len(block.nodes)):
        alone = verifier().outcomes(rows_of(block, slice(row, row + 1)))
        torch.testing.assert_close(alone.end[0], outcomes.end[row])
        torch.testing.assert_close(alone.next[0], outcomes.next[row])


@pytest.mark.parametrize("verifier", ALL)
@quick
@given(block=blocks())
def test_inputs_are_left_as_they_are(verifier, block):
    copies = [t.clone() for t in (block.nodes, block.target, block.draft)]
    verifier().outcomes(block)
    assert all(torch.equal(a, b) for a, b in zip(copies, (block.nodes, block.target, block.draft), strict=True))


@quick
@given(block=blocks(chain=True))
def test_on_a_chain_the_tree_rule_is_the_chain_rule(block):
    tree, chain = TreeRejection().outcomes(block), Rejection().outcomes(block)
    torch.testing.assert_close(tree.end, chain.end)
    possible = chain.end > 0
    torch.testing.assert_close(tree.next[possible], chain.next[possible])


@quick
@given(block=blocks())
def test_on_sure_draft_tokens_the_tree_rule_is_coupled(block):
    sure = torch.nn.functional.one_hot(block.nodes[:, 1:].clamp(min=0), block.target.shape[2]).float()
    block = Block(block.nodes, block.tree, block.target, sure)
    tree, coupled = TreeRejection().outcomes(block), Coupled().outcomes(block)
    torch.testing.assert_close(tree.end, coupled.end, atol=1e-5, rtol=1e-4)
    likely = coupled.end > 1e-3
    torch.testing.assert_close(tree.next[likely], coupled.next[likely], atol=1e-3, rtol=1e-3)


@quick
@given(block=blocks(chain=True, most=2))
def test_one_draft_token_is_judged_alike_by_all_rules_for_drawn_draft_tokens(block):
    first = Rejection().outcomes(block)
    for verifier in (TreeRejection, BlockVerification):
        torch.testing.assert_close(verifier().outcomes(block).end, first.end, atol=1e-5, rtol=1e-4)
