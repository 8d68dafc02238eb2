"""Checks of a compiled grammar on random walks: which tokens are legal at every position, and how matchers advance and roll back."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..constraints import CompiledGrammar, Matcher, Tabulated, Vocabulary, mask_words, unpack
from ..tree import NO_PARENT
from .languages import STOPPED, Reference

WALKS, STEPS = 4, 10


@dataclass(frozen=True)
class GrammarCase:
    """A compiled grammar to check, the automaton that it must agree with (:mod:`.languages`), and the random generator for walks."""

    grammar: CompiledGrammar
    reference: Reference
    chance: random.Random

    @property
    def vocabulary(self) -> Vocabulary:
        return self.grammar.vocabulary

    @property
    def start(self) -> Hashable:
        return self.reference.automaton.start

    def legal(self, matcher: Matcher, state: Hashable) -> dict[int, Hashable]:
        """Maps the legal tokens to the states after them. With policy "canonical", forced bytes have one legal tokenization."""
        legal = self.reference.legal(state)
        if self.grammar.policy == "canonical" and state != STOPPED:
            first = self.vocabulary.canonical(matcher.forced_bytes())[:1]
            assert all(token in legal for token in first), f"canonical token {first} of the forced bytes is illegal"
            return {token: legal[token] for token in first} or legal
        return legal

    def walks(self, count: int = WALKS, steps: int = STEPS) -> Iterator[tuple[Matcher, Hashable, list[int]]]:
        """Takes `count` random walks of at most `steps` tokens. Yields, at every position, the matcher, the automaton's state and the
        tokens so far.
        """
        for _ in range(count):
            matcher, state = self.grammar.start(), self.start
            taken: list[int] = []
            yield matcher, state, taken
            while state != STOPPED and len(taken) < steps:
                token, state = self.choose(self.legal(matcher, state))
                assert matcher.advance([token]) == 1, f"after {self.shown(taken)}: {self.shown([token])} is refused"
                taken = [*taken, token]
                yield matcher, state, taken

    def choose(self, legal: dict[int, Hashable]) -> tuple[int, Hashable]:
        """A random legal token and the state after it. Long tokens and stop tokens are more likely."""
        options = list(legal.items())
        sample = self.chance.sample(options, min(3, len(options)))
        if self.chance.random() < 0.2:
            sample = [option for option in options if option[1] == STOPPED] or sample
        return max(sample, key=lambda option: len(self.vocabulary.tokens[option[0]] or b""))

    def after(self, taken: Sequence[int]) -> Matcher:
        """A new matcher that has accepted the tokens `taken`."""
        matcher = self.grammar.start()
        assert matcher.advance(taken) == len(taken), f"{self.shown(taken)} is taken token by token, but not at once"
        return matcher

    def shown(self, tokens: Sequence[int]) -> str:
        """The tokens and their text, for messages."""
        return f"{list(tokens)} {self.vocabulary.spell([t for t in tokens if 0 <= t < len(self.vocabulary)])!r}"


Check = Callable[[GrammarCase], None]


def mask(matcher: Matcher) -> set[int]:
    """The tokens in a matcher's mask. Bits after the end of the vocabulary are ignored."""
    out = torch.full((mask_words(len(matcher.grammar.vocabulary)),), 0x5A5A5A5A, dtype=torch.int32)
    matcher.fill_mask(out)
    bits = np.unpackbits(out.numpy().view(np.uint8), count=len(matcher.grammar.vocabulary), bitorder="little")
    return set(bits.nonzero()[0].tolist())


def takes(matcher: Matcher, token: int) -> bool:
    """Whether a matcher accepts a token. The matcher is rolled back afterwards."""
    count = matcher.advance([token])
    matcher.rollback(count)
    return count == 1


def observed(matcher: Matcher) -> tuple[object, ...]:
    """Everything that a matcher reports about its position."""
    return mask(matcher), matcher.accepting, matcher.forced_bytes()


def check_special_tokens(case: GrammarCase) -> None:
    """Tokens without text are never legal, except stop tokens where the text may end."""
    silent = {token for token, text in enumerate(case.vocabulary.tokens) if text is None}
    for matcher, state, taken in case.walks():
        allowed = set(case.vocabulary.stops) if case.reference.ends(state) else set()
        wrong = sorted((mask(matcher) & silent) - allowed)
        assert not wrong, f"after {case.shown(taken)}: tokens {wrong[:8]} stand for no text, and are legal"


def check_masks(case: GrammarCase) -> None:
    """Masks contain exactly the legal tokens, and advance() accepts exactly these tokens. After the end, masks hold the stop tokens."""
    everything = range(len(case.vocabulary))
    for matcher, state, taken in case.walks():
        where = f"after {case.shown(taken)}"
        want, got = set(case.legal(matcher, state)), mask(matcher)
        if state == STOPPED:
            want = set(case.vocabulary.stops)
        wrong = sorted(want ^ got)[:8]
        missing = [token for token in wrong if token in want]
        assert not wrong, f"{where}: the mask lacks {case.shown(missing)} and has {case.shown(sorted(got - want)[:8])}"
        taken_alone = {token for token in everything if takes(matcher, token)}
        wrong = sorted(taken_alone ^ (set() if state == STOPPED else got))
        assert not wrong, f"{where}: advance() and the mask disagree about {case.shown(wrong[:8])}"
        assert matcher.accepting == case.reference.ends(state), f"{where}: accepting is {matcher.accepting}"


def check_ends(case: GrammarCase) -> None:
    """There are no dead ends: at every position some token is legal, and the text can be completed."""
    single = case.vocabulary.ids
    for matcher, state, taken in case.walks(steps=2 * STEPS):
        assert mask(matcher), f"after {case.shown(taken)}: no token is legal"
        if state == STOPPED or case.grammar.policy != "full":
            continue
        ending = [single[bytes([byte])] for byte in case.reference.ending(state)]
        other = case.after(taken)
        assert other.advance([*ending, case.vocabulary.stops[-1]]) == len(ending) + 1, (
            f"after {case.shown(taken)}: the text cannot be ended by {case.shown(ending)}"
        )
        assert other.accepting, "a stop token was taken, but accepting is False"


def check_forced(case: GrammarCase) -> None:
    """Forced bytes are the longest common beginning of all continuations. Forced tokens are these bytes as split by the tokenizer."""
    for matcher, state, taken in case.walks():
        where, forced = f"after {case.shown(taken)}", matcher.forced_bytes()
        want = case.reference.forced(state)
        assert want.startswith(forced), f"{where}: {forced!r} is not forced, only {want!r} is"
        # Some backends work on characters, so forced bytes may lack the bytes of a last, incomplete character.
        left = want[len(forced) :]
        assert len(left) < 4 and not any(byte < 0x80 for byte in left), (
            f"{where}: {want!r} is forced, not only {forced!r}"
        )
        tokens = case.vocabulary.written(forced, 99, case.grammar.policy)
        count = matcher.advance(tokens)
        assert count == len(tokens), f"{where}: forced tokens {case.shown(tokens)} are illegal"
        matcher.rollback(count)
        text = case.vocabulary.spell(tokens)
        assert forced.startswith(text), f"{where}: forced tokens spell {text!r}, the forced bytes are {forced!r}"
        if tokens:
            rest = case.reference.ending(case.reference.after(state, text))
            whole = list(case.vocabulary.encode((text + rest).decode()))
            # Some tokenizers add a blank in front, or recognize special tokens. The texts then cannot be compared.
            if case.vocabulary.spell(whole) != text + rest:
                continue
            assert whole[: len(tokens)] == tokens, (
                f"{where}: the tokenizer writes {text + rest!r} as {whole}, the forced tokens are {tokens}"
            )


def check_tables(case: GrammarCase) -> None:
    """If a grammar has tables, its masks by state number and the masks in the tables' tensors equal the masks of its matchers."""
    grammar = case.grammar
    if not isinstance(grammar, Tabulated):
        return
    tables = grammar.tables()
    assert tables.nbytes > 0, "tables of no size"
    assert int(tables.next[0].abs().max()) == 0, "state 0 must be dead: all bytes lead back to it"
    for matcher, state, taken in case.walks():
        if state == STOPPED:
            continue
        state_number = grammar.first
        for token in taken:
            state_number = grammar.step(state_number, token)
        forced = grammar.forced_bytes(state_number)
        assert forced == matcher.forced_bytes(), f"after {case.shown(taken)}: {forced!r} is forced by its number"
        row = unpack(tables.masks[grammar.mask_rows[state_number]], len(case.vocabulary)).nonzero().flatten().tolist()
        assert set(row) == mask(matcher), f"after {case.shown(taken)}: the mask by its number is not the matcher's"
        state_number = tables.start
        for byte in case.vocabulary.spell(taken):
            state_number = int(tables.next[state_number, tables.classes[byte]])
        row = unpack(tables.masks[tables.mask_of[state_number]], len(case.vocabulary)).nonzero().flatten().tolist()
        assert set(row) == mask(matcher), f"after {case.shown(taken)}: the tables' mask is not the matcher's"


def check_advance(case: GrammarCase) -> None:
    """advance() accepts the tokens before the first illegal token, and returns their number. The matcher can be used afterwards."""
    strangers = [-1, len(case.vocabulary), 1 << 40]
    for matcher, state, taken in case.walks():
        legal = {} if state == STOPPED else case.legal(matcher, state)
        illegal = sorted(set(range(len(case.vocabulary))) - set(legal))
        before, where = observed(matcher), f"after {case.shown(taken)}"
        for token in case.chance.sample(illegal, min(4, len(illegal))) + strangers:
            assert matcher.advance([token]) == 0, f"{where}: advance() takes {case.shown([token])}"
            assert observed(matcher) == before, f"{where}: advance([{token}]) changed the matcher"
            some = [token for token, after in legal.items() if after != STOPPED][:1]
            if some:
                assert matcher.advance(some) == 1, f"{where}: after an illegal token nothing is legal"
                matcher.rollback(1)
            again = case.grammar.start()
            count = again.advance([*taken, token, *taken])
            assert count == len(taken), f"advance() takes {count} of {len(taken)} legal tokens before an illegal one"
            assert observed(again) == before, f"{where}: taking the tokens at once leads to another position"
        assert matcher.advance([]) == 0, f"{where}: advance([]) takes tokens"


def check_rollback(case: GrammarCase) -> None:
    """rollback() undoes any number of tokens exactly, including a stop token. It raises for more tokens than were accepted."""
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
                f"rollback({count}) over {case.shown(gone)} does not lead back to the position after {case.shown(taken)}"
            )
            assert matcher.advance(gone) == count, f"after rollback({count}) {case.shown(gone)} is no longer taken"
            assert observed(matcher) == seen[len(taken) + count], (
                f"after rollback({count}) the same tokens lead to another position"
            )
            matcher.rollback(count)
        _goes_back_no_further(matcher, "rollback() of more tokens than were taken")


def check_apart(case: GrammarCase) -> None:
    """Matchers of one grammar, such as the matchers of two rows, do not influence each other."""
    for matcher, state, taken in case.walks():
        before, where = observed(matcher), f"after {case.shown(taken)}"
        other = case.after(taken)
        assert observed(other) == before, f"{where}: another matcher is at another position"
        assert observed(matcher) == before, f"{where}: moving another matcher to this position moves the first"
        if state == STOPPED:
            continue
        token, _ = case.choose(case.legal(matcher, state))
        assert other.advance([token]) == 1, f"{where}: another matcher refuses {case.shown([token])}"
        assert observed(matcher) == before, f"{where}: advancing another matcher moves the first"
        moved = observed(other)
        assert matcher.advance([token]) == 1 and observed(matcher) == moved, (
            f"{where}: two matchers differ after the same tokens"
        )
        matcher.rollback(1)
        assert observed(other) == moved, f"{where}: rolling one matcher back moves another"


def check_tree(case: GrammarCase) -> None:
    """A matcher that moves from node to node of a draft tree reports the same at each node as a matcher that goes there directly."""
    for matcher, state, taken in case.walks():
        parents, tokens = _tree(case, state, taken)
        before, where = observed(matcher), f"after {case.shown(taken)}, parents {parents}, tokens {tokens}"
        path: list[int] = []  # the nodes on the matcher's present path
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
            assert observed(matcher) == observed(direct), (
                f"{where}: node {node} reports otherwise than when it is reached directly"
            )
        matcher.rollback(len(path))
        assert observed(matcher) == before, f"{where}: after the tree the matcher is at another position"


def _goes_back_no_further(matcher: Matcher, what: str) -> None:
    try:
        matcher.rollback(1)
    except ValueError:
        return
    raise AssertionError(f"{what} must raise ValueError")


def _tree(case: GrammarCase, state: Hashable, taken: Sequence[int]) -> tuple[list[int], list[int]]:
    """The parents and tokens of a random tree. Some tokens are missing (-1) or illegal, have no parent, or follow a stop token."""
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
    """The nodes of the path to `node`, without the root. None if the path does not begin at the root."""
    path: list[int] = []
    while node:
        path.insert(0, node)
        node = parents[node]
        if node == NO_PARENT:
            return None
    return path
