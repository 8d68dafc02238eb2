"""Checks of how matchers move: taking tokens, giving them back, forking, going down trees of draft tokens."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch

from ..constraints.base import Matcher, mask_words
from ..tree import NO_PARENT
from .grammar_case import STEPS, GrammarCase, observed
from .languages import STOPPED


def check_advance(case: GrammarCase) -> None:
    """advance() takes tokens up to the first illegal one, says how many, and goes on as if nothing had been."""
    strangers = [-1, len(case.vocabulary), 1 << 40]
    for matcher, state, taken in case.walks():
        legal = {} if state == STOPPED else case.legal(matcher, state)
        illegal = sorted(set(range(len(case.vocabulary))) - set(legal))
        before, where = observed(matcher), f"after {case.told(taken)}"
        for token in case.chance.sample(illegal, min(4, len(illegal))) + strangers:
            for method in (matcher.validate, matcher.advance):
                assert method([token]) == 0, f"{where}: {method.__name__}() takes {case.told([token])}"
                assert observed(matcher) == before, f"{where}: {method.__name__}([{token}]) changed the matcher"
            some = [token for token, after in legal.items() if after != STOPPED][:1]
            if some:
                assert matcher.advance(some) == 1, f"{where}: after an illegal token nothing is legal"
                matcher.rollback(1)
            again = case.grammar.start()
            for method in (again.validate, again.advance):
                count = method([*taken, token, *taken])
                assert count == len(taken), (
                    f"{method.__name__}() takes {count} of {len(taken)} legal tokens before an illegal one"
                )
            assert observed(again) == before, f"{where}: taking the tokens at once comes to another place"
        assert matcher.advance([]) == matcher.validate([]) == 0, f"{where}: no tokens, but some were taken"


def check_rollback(case: GrammarCase) -> None:
    """Rolling back undoes any number of tokens exactly, a stop token among them; too many are an error."""
    seen: list[tuple[object, ...]] = []
    for matcher, state, taken in case.walks():
        seen[len(taken) :] = [observed(matcher)]
        matcher.rollback(0)
        if state != STOPPED and len(taken) < STEPS:
            continue
        while taken:
            count = case.chance.randint(1, len(taken))
            gone, taken = taken[-count:], taken[:-count]
            matcher.rollback(count)
            assert observed(matcher) == seen[len(taken)], (
                f"rollback({count}) over {case.told(gone)} does not come back to where {case.told(taken)} led"
            )
            assert matcher.advance(gone) == count, f"after rollback({count}) {case.told(gone)} is no longer taken"
            assert observed(matcher) == seen[len(taken) + count], f"rollback({count}) and again: another place"
            matcher.rollback(count)
        _goes_back_no_further(matcher, "rollback() behind the beginning")


def check_fork(case: GrammarCase) -> None:
    """A fork stands where the original stands, and neither moves the other."""
    for matcher, state, taken in case.walks():
        before, twin = observed(matcher), matcher.fork()
        assert observed(twin) == before, f"after {case.told(taken)}: the fork stands elsewhere"
        if state == STOPPED:
            continue
        token, _ = case.choose(case.legal(matcher, state))
        assert twin.advance([token]) == 1, f"the fork refuses {case.told([token])}"
        assert observed(matcher) == before, "advancing a fork moves the original"
        moved = observed(twin)
        assert matcher.advance([token]) == 1 and observed(matcher) == moved, (
            "original and fork come to different places"
        )
        matcher.rollback(1)
        assert observed(twin) == moved, "rolling back the original moves the fork"
        twin.rollback(1)
        assert observed(twin) == before, "a fork is not rolled back to where it was made"
        _goes_back_no_further(twin, "a fork rolled back behind the place where it was made")


def check_tree(case: GrammarCase) -> None:
    """fill_tree() says what walking to each node says; the masks of all other nodes are ones, the matcher stays."""
    for matcher, state, taken in case.walks():
        parents, tokens = _tree(case, matcher, state)
        before = observed(matcher)
        out = torch.full((len(parents), mask_words(len(case.vocabulary))), 0x5A5A5A5A, dtype=torch.int32)
        legal = matcher.fill_tree(parents, tokens, out)
        where = f"after {case.told(taken)}, parents {parents}, tokens {tokens}"
        assert len(legal) == len(parents), f"{where}: fill_tree() tells of {len(legal)} nodes"
        assert observed(matcher) == before, f"{where}: fill_tree() moves the matcher"
        for node in range(len(parents)):
            path = _path(parents, node)
            twin = matcher.fork()
            reached = path is not None and twin.advance([tokens[n] for n in path]) == len(path)
            assert legal[node] == reached, (
                f"{where}: node {node} is {'' if reached else 'il'}legal, fill_tree() disagrees"
            )
            want = torch.full_like(out[node], -1)
            if reached:
                twin.fill_mask(want)
            assert torch.equal(out[node], want), f"{where}: the mask of node {node} is not that of its path"


def _goes_back_no_further(matcher: Matcher, what: str) -> None:
    try:
        matcher.rollback(1)
    except ValueError:
        return
    raise AssertionError(f"{what} must raise ValueError")


def _tree(case: GrammarCase, matcher: Matcher, state: Hashable) -> tuple[list[int], list[int]]:
    """Draft tokens, most of them legal; some missing (-1), some nodes without a parent, some behind illegal ones or the end."""
    parents, tokens = [NO_PARENT], [case.chance.randrange(len(case.vocabulary))]
    states: list[Hashable | None] = [state]
    ways: list[list[int]] = [[]]
    for node in range(1, case.chance.randint(2, 14)):
        possible = [n for n in range(node) if n == 0 or parents[n] != NO_PARENT]
        parent = NO_PARENT if case.chance.random() < 0.15 else case.chance.choice(possible)
        token = case.chance.choice([-1, case.chance.randrange(len(case.vocabulary))])
        after: Hashable | None = None
        at = states[parent] if parent != NO_PARENT else None
        if at is not None and at != STOPPED:
            twin = matcher.fork()
            twin.advance(ways[parent])
            legal = case.legal(twin, at)
            if case.chance.random() < 0.75:
                token = case.choose(legal)[0]
            after = legal.get(token)
        parents.append(parent)
        tokens.append(token)
        states.append(after)
        ways.append([*ways[parent], token] if parent != NO_PARENT else [])
    return parents, tokens


def _path(parents: Sequence[int], node: int) -> list[int] | None:
    """Nodes from below the root down to `node`; None if it is never accepted."""
    path: list[int] = []
    while node:
        path.insert(0, node)
        node = parents[node]
        if node == NO_PARENT:
            return None
    return path
