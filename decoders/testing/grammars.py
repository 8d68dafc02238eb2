"""The check that every grammar backend must pass: its masks, walks and returns are those of the language.

On small regular languages and a recursive one (:mod:`.languages`), over one token per byte and over merged tokens,
everything that a matcher says along random walks is compared with an automaton that shares no code with a backend.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from ..constraints.base import Backend, Grammar, Language, Matcher, Policy, Tabulated, mask_words, unpack
from ..constraints.vocabulary import Vocabulary
from ..errors import GrammarError
from ..tree import NO_PARENT
from .languages import STOPPED, Reference, byte_vocabulary, references

NOTATIONS = ("regex", "lark")
WALKS, STEPS = 4, 10


def check_backend(
    backend: Backend | type[Backend], *, policies: Sequence[Policy] = ("full", "canonical"), seed: int = 0
) -> None:
    """Compiles every language that the backend reads, in every notation it reads, and runs all checks on it.

    Raises:
        AssertionError: the first check that failed, for which language, and why.
    """
    backend = backend() if isinstance(backend, type) else backend
    _check_class(backend)
    notations = [notation for notation in NOTATIONS if _reads(backend, notation)]
    assert notations, f"{backend!r} compiles neither a plain regex nor a plain lark grammar"
    for reference in references():
        for notation in notations:
            text = getattr(reference.language, notation)
            if text is None:
                continue
            language = Language(f"{reference.language.name} ({notation})", **{notation: text})
            for policy in policies:
                try:
                    grammar = backend.compile(language, reference.vocabulary, policy)
                except GrammarError as error:
                    raise AssertionError(f"{backend!r} refuses {language.name}: {error}") from error
                check_grammar(grammar, reference, seed=seed)


def check_grammar(
    grammar: Grammar, reference: Reference, *, checks: Iterable[Check] | None = None, seed: int = 0
) -> None:
    """All checks, or `checks`, on one compiled language.

    Raises:
        AssertionError: the first check that failed and why.
    """
    for check in CHECKS if checks is None else checks:
        try:
            check(Case(grammar, reference, random.Random(seed)))
        except Exception as error:
            reason = str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
            name = (
                f"{grammar.backend}, {grammar.language.name}, {len(grammar.vocabulary)} tokens, policy {grammar.policy}"
            )
            raise AssertionError(f"{name} fails {check.__name__}: {reason}") from error


@dataclass(frozen=True)
class Case:
    """A compiled language, what is true of it, and the source of random walks."""

    grammar: Grammar
    reference: Reference
    chance: random.Random

    @property
    def vocabulary(self) -> Vocabulary:
        return self.grammar.vocabulary

    @property
    def start(self) -> Hashable:
        return self.reference.automaton.start

    def legal(self, matcher: Matcher, state: Hashable) -> dict[int, Hashable]:
        """What may come next under the policy, each token with the state after it."""
        legal = self.reference.legal(state)
        if self.grammar.policy == "canonical" and state != STOPPED:
            first = self.vocabulary.canonical(matcher.forced_bytes())[:1]
            assert all(token in legal for token in first), f"canonical token {first} of the forced bytes is illegal"
            return {token: legal[token] for token in first} or legal
        return legal

    def walks(self, count: int = WALKS, steps: int = STEPS) -> Iterator[tuple[Matcher, Hashable, list[int]]]:
        """Every position of random walks, which end with a stop token or after `steps`: matcher, state, tokens taken."""
        for _ in range(count):
            matcher, state = self.grammar.start(), self.start
            taken: list[int] = []
            yield matcher, state, taken
            while state != STOPPED and len(taken) < steps:
                token, state = self.choose(self.legal(matcher, state))
                assert matcher.advance([token]) == 1, f"after {self.told(taken)}: {self.told([token])} is refused"
                taken = [*taken, token]
                yield matcher, state, taken

    def choose(self, legal: dict[int, Hashable]) -> tuple[int, Hashable]:
        """A legal token, long ones and the end more often than by chance."""
        ways = list(legal.items())
        some = self.chance.sample(ways, min(3, len(ways)))
        if self.chance.random() < 0.2:
            some = [way for way in ways if way[1] == STOPPED] or some
        return max(some, key=lambda way: len(self.vocabulary.tokens[way[0]] or b""))

    def told(self, tokens: Sequence[int]) -> str:
        """Tokens for a message."""
        return f"{list(tokens)} {self.vocabulary.spell([t for t in tokens if 0 <= t < len(self.vocabulary)])!r}"


Check = Callable[[Case], None]


def mask(matcher: Matcher) -> set[int]:
    """The tokens in a matcher's mask; bits behind the vocabulary must be zero or at least without effect."""
    out = torch.full((mask_words(len(matcher.grammar.vocabulary)),), 0x5A5A5A5A, dtype=torch.int32)
    matcher.fill_mask(out)
    return set(unpack(out, len(matcher.grammar.vocabulary)).nonzero().flatten().tolist())


def observed(matcher: Matcher) -> tuple[object, ...]:
    """All that a matcher says about where it is."""
    return mask(matcher), matcher.accepting, matcher.stopped, matcher.forced_bytes(), tuple(matcher.forced_tokens(99))


def check_masks(case: Case) -> None:
    """The mask holds the legal tokens, exactly those that validate() takes; after the end it holds the stop tokens."""
    everything = range(len(case.vocabulary))
    for matcher, state, taken in case.walks():
        where = f"after {case.told(taken)}"
        want, got = set(case.legal(matcher, state)), mask(matcher)
        if state == STOPPED:
            want = set(case.vocabulary.stops)
        wrong = sorted(want ^ got)[:8]
        missing = [token for token in wrong if token in want]
        assert not wrong, f"{where}: the mask lacks {case.told(missing)} and has {case.told(sorted(got - want)[:8])}"
        taken_alone = {token for token in everything if matcher.validate([token])}
        wrong = sorted(taken_alone ^ (set() if state == STOPPED else got))
        assert not wrong, f"{where}: validate() and the mask say different things of {case.told(wrong[:8])}"
        assert matcher.accepting == case.reference.ends(state), f"{where}: accepting is {matcher.accepting}"
        assert matcher.stopped == (state == STOPPED), f"{where}: stopped is {matcher.stopped}"


def check_special_tokens(case: Case) -> None:
    """Nothing that stands for no text is ever legal, but a stop token where the text may end."""
    silent = {token for token, text in enumerate(case.vocabulary.tokens) if text is None}
    for matcher, state, taken in case.walks():
        allowed = set(case.vocabulary.stops) if case.reference.ends(state) else set()
        wrong = sorted((mask(matcher) & silent) - allowed)
        assert not wrong, f"after {case.told(taken)}: tokens {wrong[:8]} stand for no text, and are legal"


def check_advance(case: Case) -> None:
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


def check_rollback(case: Case) -> None:
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
        try:
            matcher.rollback(1)
        except ValueError:
            continue
        raise AssertionError("rollback() behind the beginning must raise ValueError")


def check_fork(case: Case) -> None:
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
        try:
            twin.rollback(1)
        except ValueError:
            continue
        raise AssertionError("a fork rolled back behind the place where it was made must raise ValueError")


def check_tree(case: Case) -> None:
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


def _tree(case: Case, matcher: Matcher, state: Hashable) -> tuple[list[int], list[int]]:
    """Guesses, most of them legal; some missing (-1), some nodes without a parent, some behind illegal ones or the end."""
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


def check_ends(case: Case) -> None:
    """No dead ends: some token is legal everywhere, and every position can be brought to an end."""
    single = case.vocabulary.ids
    for matcher, state, taken in case.walks(steps=2 * STEPS):
        assert mask(matcher), f"after {case.told(taken)}: no token is legal"
        if state == STOPPED or case.grammar.policy != "full":
            continue
        ending = [single[bytes([byte])] for byte in case.reference.ending(state)]
        twin = matcher.fork()
        assert twin.advance([*ending, case.vocabulary.stops[-1]]) == len(ending) + 1, (
            f"after {case.told(taken)}: the text cannot be ended by {case.told(ending)}"
        )
        assert twin.stopped and twin.accepting, "a stop token was taken, but stopped or accepting is False"


def check_forced(case: Case) -> None:
    """Forced bytes are all that every continuation begins with; forced tokens are how the tokenizer writes them."""
    for matcher, state, taken in case.walks():
        where, forced = f"after {case.told(taken)}", matcher.forced_bytes()
        want = case.reference.forced(state)
        assert want.startswith(forced), f"{where}: {forced!r} is not forced, only {want!r} is"
        # Up to the end of a character: a backend of characters may not see further.
        left = want[len(forced) :]
        assert len(left) < 4 and not any(byte < 0x80 for byte in left), (
            f"{where}: {want!r} is forced, not only {forced!r}"
        )
        tokens = matcher.forced_tokens(99)
        assert matcher.validate(tokens) == len(tokens), f"{where}: forced tokens {case.told(tokens)} are illegal"
        text = case.vocabulary.spell(tokens)
        assert forced.startswith(text), f"{where}: forced tokens spell {text!r}, the forced bytes are {forced!r}"
        assert matcher.forced_tokens(1) == tokens[:1] and matcher.forced_tokens(0) == [], (
            "forced_tokens() passes its limit"
        )
        if tokens:
            rest = case.reference.ending(case.reference.after(state, text))
            whole = list(case.vocabulary.encode((text + rest).decode()))
            assert whole[: len(tokens)] == tokens, (
                f"{where}: the tokenizer writes {text + rest!r} as {whole}, the forced tokens are {tokens}"
            )


def check_tables(case: Case) -> None:
    """A grammar that is walked by numbers gives the matcher's masks and steps, by its tensors too."""
    grammar = case.grammar
    if not isinstance(grammar, Tabulated):
        return
    tables = grammar.tables()
    assert tables.nbytes > 0, "tables of no size"
    assert int(tables.next[0].abs().max()) == 0, "state 0 must be dead: all bytes lead back to it"
    for matcher, state, taken in case.walks():
        if state == STOPPED:
            continue
        at = grammar.first
        for token in taken:
            at = grammar.step(at, token)
        forced = grammar.forced_tokens(at, 64)
        assert forced == matcher.forced_tokens(64), f"after {case.told(taken)}: {forced} are forced by its number"
        row = unpack(tables.masks[grammar.mask_rows[at]], len(case.vocabulary)).nonzero().flatten().tolist()
        assert set(row) == mask(matcher), f"after {case.told(taken)}: the mask by its number is not the matcher's"
        at = tables.start
        for byte in case.vocabulary.spell(taken):
            at = int(tables.next[at, tables.classes[byte]])
        row = unpack(tables.masks[tables.mask_of[at]], len(case.vocabulary)).nonzero().flatten().tolist()
        assert set(row) == mask(matcher), f"after {case.told(taken)}: the tables' mask is not the matcher's"


CHECKS: tuple[Check, ...] = (
    check_special_tokens, check_masks, check_advance, check_rollback, check_fork, check_tree, check_ends, check_forced,
    check_tables,
)  # fmt: skip


def _reads(backend: Backend, notation: str) -> bool:
    """Whether the backend compiles a language that is given in one notation."""
    languages = {"regex": Language("a", regex="a"), "lark": Language("a", lark='start: "a"\n')}
    try:
        backend.compile(languages[notation], byte_vocabulary())
    except GrammarError:
        return False
    return True


def _check_class(backend: Backend) -> None:
    """Name and summary can be listed and looked up."""
    cls = type(backend)
    name, summary = getattr(cls, "name", None), cls.summary
    assert isinstance(name, str) and re.fullmatch("[a-z][a-z0-9]*(_[a-z0-9]+)*", name), (
        f"{cls.__name__}.name must be snake_case, not {name!r}"
    )
    assert isinstance(summary, str) and summary.strip() and "\n" not in summary, (
        f"{cls.__name__}.summary must be one line that says what it does, not {summary!r}"
    )
