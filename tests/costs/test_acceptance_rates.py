"""Rates of acceptance by kind, trees of proposals, and how they are judged by what is written."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoders.costs.acceptance import PRIOR, AcceptanceRates, Follower, Proposals

A, B = 1, 2


def test_unseen_kinds_are_expected_to_be_like_the_nearest_seen_ones() -> None:
    rates = AcceptanceRates()
    assert rates.rate(A, 1) == PRIOR
    for _ in range(50):
        rates.learn(A, 1, 0, 2, True)
        rates.learn(B, 1, 0, 2, False)
    assert rates.rate(A, 1) > 0.95 > 0.05 > rates.rate(B, 1)
    assert rates.rate(A, 3) > 0.9  # a depth that was never judged: as the one before
    assert rates.rate(A | B, 1) > 0.9  # both propose it: as the better one
    assert rates.rate(A, 1, 0, grade=7) > 0.9  # a grade that was never judged: as all of them


def test_grades_are_kinds_of_their_own_once_they_are_seen() -> None:
    rates = AcceptanceRates()
    for _ in range(40):
        rates.learn(A, 1, 0, 3, True)
        rates.learn(A, 1, 0, 1, False)
    assert rates.rate(A, 1, 0, 3) > 0.9 and rates.rate(A, 1, 0, 1) < 0.1
    assert 0.3 < rates.rate(A, 1) < 0.7


def test_what_grades_mean_as_a_rule_is_expected_of_those_that_were_not_seen() -> None:
    rule = {A: (0.1, 0.5, 0.9)}
    rates = AcceptanceRates(grade_rates=rule)
    assert [rates.rate(A, 1, 0, grade) for grade in range(3)] == [0.1, 0.5, 0.9]
    assert rates.rate(A, 1, 0, 3) == PRIOR  # no rule says what that means
    assert rates.rate(A, 1, 1, 2) == pytest.approx(0.025)  # where the best sibling is right nine times of ten
    assert rates.rate(B, 1, 0, 2) == PRIOR
    assert rates.rate(A | B, 1, 0, 2) == 0.9
    assert AcceptanceRates(rates).rate(A, 1, 0, 2) == 0.9  # a row begins with what holds for all


def test_a_rule_that_does_not_hold_is_expected_to_hold_as_little_elsewhere() -> None:
    rates = AcceptanceRates(grade_rates={A: (0.1, 0.5, 0.9)})
    for _ in range(20):
        rates.learn(A, 1, 0, 1, False)
    assert rates.rate(A, 1, 0, 2) < 0.9 / 2
    for _ in range(60):
        rates.learn(A, 2, 0, 1, True)
    assert rates.rate(A, 1, 0, 2) == 1.0


def test_the_rate_of_a_drafter_counts_what_it_shares_with_others() -> None:
    rates = AcceptanceRates()
    for _ in range(40):
        rates.learn(A | B, 1, 0, -1, True)
    assert rates.rate_of(A, 1) > 0.9 and rates.rate_of(B, 1) > 0.9


def test_a_row_begins_with_what_all_rows_know_and_keeps_its_own() -> None:
    common = AcceptanceRates()
    one, other = AcceptanceRates(common), AcceptanceRates(common)
    for _ in range(40):
        one.learn(A, 1, 0, -1, True)
    assert other.rate(A, 1) > 0.9
    for _ in range(40):
        other.learn(A, 1, 0, -1, False)
    assert one.rate(A, 1) > 0.9 and other.rate(A, 1) < 0.1


def test_a_change_is_noticed_within_ten_tokens() -> None:
    rates = AcceptanceRates()
    for _ in range(100):
        rates.learn(A, 1, 0, -1, True)
    for _ in range(10):
        rates.learn(A, 1, 0, -1, False)
    assert rates.rate(A, 1) < 0.25
    for _ in range(10):
        rates.learn(A, 1, 0, -1, True)
    assert rates.rate(A, 1) > 0.75


def test_what_several_propose_stands_in_the_tree_once() -> None:
    proposals = Proposals()
    proposals.add(A, [5, 6, 7], [-1, 0, 1, 2], [1, 1, 1])
    proposals.add(B, [5, 8, 6], [-1, 0, 0, 1], [4, 0, 0])
    assert proposals.tokens == [-1, 5, 6, 7, 8]
    assert proposals.parents == [-1, 0, 1, 2, 0]
    assert proposals.sources == [0, A | B, A | B, A, B]
    assert proposals.ranks == [0, 0, 0, 0, 1]
    assert proposals.grades == [-1, 4, 1, 1, 0]


def test_a_missing_token_ends_its_branch() -> None:
    proposals = Proposals()
    proposals.add(A, [5, -1, 7, 9], [-1, 0, 1, 2, 0])
    assert proposals.tokens == [-1, 5, 9]


def test_proposals_are_judged_by_the_tokens_that_come_verified_or_not() -> None:
    rates = AcceptanceRates()
    follower = Follower(rates)
    for start in range(0, 300, 3):
        proposals = Proposals()
        proposals.add(A, [start, start + 1, 999], [-1, 0, 1, 2])
        proposals.add(B, [998], [-1, 0])
        follower.follow(proposals)
        assert [follower.write(start + i) for i in range(3)] == [A, A, 0]
    assert rates.rate(A, 1) > 0.95 and rates.rate(A, 2) > 0.95 and rates.rate(A, 3) < 0.05
    assert rates.rate(B, 1, 0) < 0.05


trees = st.lists(st.tuples(st.integers(0, 5), st.integers(-1, 4)), min_size=1, max_size=20)


@given(
    st.lists(st.tuples(st.sampled_from([A, B, 4]), trees), min_size=1, max_size=3),
    st.lists(st.integers(0, 4), max_size=8),
)
def test_chosen_nodes_form_trees_and_siblings_come_to_one_at_most(
    drafts: list[tuple[int, list[tuple[int, int]]]], text: list[int]
) -> None:
    rates, proposals = AcceptanceRates(), Proposals()
    for source, nodes in drafts:
        parents = [-1, *(min(parent, index) for index, (parent, _) in enumerate(nodes))]
        proposals.add(source, [token for _, token in nodes], parents)
    follower = Follower(rates)
    follower.follow(proposals)
    for token in text:
        follower.write(token)
    ranked = proposals.ranked(rates, least=0.0)
    assert [likely for likely, _ in ranked] == sorted((likely for likely, _ in ranked), reverse=True)
    seen = {0}
    for likely, node in ranked:
        assert 0 <= likely <= 1 and proposals.parents[node] in seen
        seen.add(node)
    chance = {node: likely for likely, node in ranked} | {0: 1.0}
    for node, children in enumerate(proposals.children):
        assert sum(chance[c] for c in children.values()) <= chance[node] + 1e-9


@pytest.mark.parametrize("least", [0.01, 0.3])
def test_nodes_that_are_hardly_ever_right_are_left_out(least: float) -> None:
    proposals = Proposals()
    proposals.add(A, list(range(30)), list(range(-1, 30)))
    ranked = proposals.ranked(AcceptanceRates(), least)
    assert all(likely >= least for likely, _ in ranked) and 0 < len(ranked) < 30
