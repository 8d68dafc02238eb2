"""Checks of how matchers move: taking tokens, giving them back, going from node to node of draft tokens, side by side."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from ..constraints import Matcher
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
            assert matcher.advance([token]) == 0, f"{where}: advance() takes {case.told([token])}"
            assert observed(matcher) == before, f"{where}: advance([{token}]) changed the matcher"
            some = [token for token, after in legal.items() if after != STOPPED][:1]
            if some:
                assert matcher.advance(some) == 1, f"{where}: after an illegal token nothing is legal"
                matcher.rollback(1)
            again = case.grammar.start()
            count = again.advance([*taken, token, *taken])
            assert count == len(taken), f"advance() takes {count} of {len(taken)} legal tokens before an illegal one"
            assert observed(again) == before, f"{where}: taking the tokens at once comes to another place"
        assert matcher.advance([]) == 0, f"{where}: no tokens, but some were taken"


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


def check_apart(case: GrammarCase) -> None:
    """Two matchers of one grammar, as two rows have them, do not move each other."""
    for matcher, state, taken in case.walks():
        before, where = observed(matcher), f"after {case.told(taken)}"
        other = case.after(taken)
        assert observed(other) == before, f"{where}: another matcher stands elsewhere"
        assert observed(matcher) == before, f"{where}: another matcher that comes here moves the first"
        if state == STOPPED:
            continue
        token, _ = case.choose(case.legal(matcher, state))
        assert other.advance([token]) == 1, f"{where}: another matcher refuses {case.told([token])}"
        assert observed(matcher) == before, f"{where}: advancing another matcher moves the first"
        moved = observed(other)
        assert matcher.advance([token]) == 1 and observed(matcher) == moved, f"{where}: two matchers come apart"
        matcher.rollback(1)
        assert observed(other) == moved, f"{where}: rolling one matcher back moves another"


def check_tree(case: GrammarCase) -> None:
    """A matcher brought from node to node of a tree, as the loop brings it, says what one says that went there directly."""
    for matcher, state, taken in case.walks():
        parents, tokens = _tree(case, state, taken)
        before, where = observed(matcher), f"after {case.told(taken)}, parents {parents}, tokens {tokens}"
        path: list[int] = []  # nodes whose tokens the matcher has taken
        for node in case.chance.sample(range(len(parents)), len(parents)):
            wanted = _path(parents, node)
            if wanted is None:
                continue
            shared = next((i for i, (a, b) in enumerate(zip(path, wanted, strict=False)) if a != b), None)
            shared = min(len(path), len(wanted)) if shared is None else shared
            matcher.rollback(len(path) - shared)
            path = wanted[: shared + matcher.advance([tokens[n] for n in wanted[shared:]])]
            direct = case.after(taken)
            reached = direct.advance([tokens[n] for n in wanted])
            assert len(path) == reached, (
                f"{where}: {len(path)} tokens down to node {node} are legal, {reached} directly"
            )
            assert observed(matcher) == observed(direct), f"{where}: node {node} says something else than directly"
        matcher.rollback(len(path))
        assert observed(matcher) == before, f"{where}: the matcher does not come back from the tree"


def _goes_back_no_further(matcher: Matcher, what: str) -> None:
    try:
        matcher.rollback(1)
    except ValueError:
        return
    raise AssertionError(f"{what} must raise ValueError")


def _tree(case: GrammarCase, state: Hashable, taken: Sequence[int]) -> tuple[list[int], list[int]]:
    """Draft tokens, most of them legal; some missing (-1), some nodes without a parent, some behind illegal ones or the end."""
    parents, tokens = [NO_PARENT], [case.chance.randrange(len(case.vocabulary))]
    states: list[Hashable | None] = [state]
    paths: list[list[int]] = [[]]
    for node in range(1, case.chance.randint(2, 14)):
        possible = [n for n in range(node) if n == 0 or parents[n] != NO_PARENT]
        parent = NO_PARENT if case.chance.random() < 0.15 else case.chance.choice(possible)
        token = case.chance.choice([-1, case.chance.randrange(len(case.vocabulary))])
        after: Hashable | None = None
        parent_state = states[parent] if parent != NO_PARENT else None
        if parent_state is not None and parent_state != STOPPED:
            legal = case.legal(case.after([*taken, *paths[parent]]), parent_state)
            if case.chance.random() < 0.75:
                token = case.choose(legal)[0]
            after = legal.get(token)
        parents.append(parent)
        tokens.append(token)
        states.append(after)
        paths.append([*paths[parent], token] if parent != NO_PARENT else [])
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
