"""Every grammar backend keeps the contract; backends that do not are found out.

``Walked`` is the smallest backend there can be: it walks the kit's own automaton token by token.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import pytest
import torch
from torch import Tensor

from decoders.constraints.base import Backend, CompiledGrammar, Language, Matcher, Policy, pack
from decoders.constraints.table import Table
from decoders.constraints.vocabulary import Vocabulary
from decoders.errors import GrammarError
from decoders.testing import check_backend, grammars
from decoders.testing.languages import STOPPED, Nested, Reference, ToyRegex


class WalkedMatcher(Matcher):
    def __init__(self, grammar: WalkedGrammar, state: Hashable) -> None:
        self.grammar: WalkedGrammar = grammar
        self.states = [state]

    @property
    def accepting(self) -> bool:
        return self.grammar.reference.ends(self.states[-1])

    @property
    def stopped(self) -> bool:
        return self.states[-1] == STOPPED

    def advance(self, tokens: Sequence[int]) -> int:
        for count, token in enumerate(tokens):
            after = self.legal().get(token)
            if after is None:
                return count
            self.states.append(after)
        return len(tokens)

    def rollback(self, count: int) -> None:
        if count >= len(self.states):
            raise ValueError(f"{count} tokens back, {len(self.states) - 1} taken")
        del self.states[len(self.states) - count :]

    def legal(self) -> dict[int, Hashable]:
        legal = self.grammar.reference.legal(self.states[-1])
        first = self.forced_tokens() if self.grammar.policy == "canonical" else []
        return {token: legal[token] for token in first} or legal

    def fill_mask(self, out: Tensor) -> None:
        allowed = torch.zeros(len(self.grammar.vocabulary), dtype=torch.bool)
        allowed[list(self.grammar.vocabulary.stops if self.stopped else self.legal())] = True
        out.copy_(pack(allowed))

    def forced_bytes(self) -> bytes:
        return self.grammar.reference.forced(self.states[-1])

    def forced_tokens(self) -> list[int]:
        return self.grammar.vocabulary.canonical(self.forced_bytes())[:1]


class WalkedGrammar(CompiledGrammar):
    nbytes = 0

    def __init__(self, backend: Walked, reference: Reference, policy: Policy) -> None:
        self.backend, self.matcher, self.reference, self.policy = backend.name, backend.matcher, reference, policy
        self.language, self.vocabulary = reference.language, reference.vocabulary

    def start(self) -> Matcher:
        return self.matcher(self, self.reference.automaton.start)


class Walked(Backend):
    name = "walked"
    summary = "walks an automaton token by token"
    matcher = WalkedMatcher

    def compile(self, language: Language, vocabulary: Vocabulary, policy: Policy = "full") -> CompiledGrammar:
        automaton = (
            ToyRegex(language.regex) if language.regex else Nested() if language.name == "nested (lark)" else None
        )
        if automaton is None:
            raise GrammarError(f"{language.name}: no regex")
        return WalkedGrammar(self, Reference(language, automaton, vocabulary), policy)


#: Backends that must keep the contract.
BACKENDS: list[type[Backend]] = [Walked, Table]


@pytest.mark.parametrize(
    "backend",
    [pytest.param(b, id=b.name, marks=pytest.mark.slow) for b in BACKENDS],
)
def test_backend_keeps_the_contract(backend):
    check_backend(backend)


def test_table_keeps_the_contract(monkeypatch):
    """Every language over one of the two vocabularies."""
    chosen = [reference for place, reference in enumerate(grammars.references()) if place % 2 != place // 2 % 2]
    monkeypatch.setattr(grammars, "references", lambda: chosen)
    check_backend(Table)


class ForgetsTheStopToken(WalkedMatcher):
    """As llguidance does by itself: after the end, rolling back one token takes a real one."""

    def rollback(self, count: int) -> None:
        over = count > 0 and self.stopped
        super().rollback(count)
        if over and len(self.states) > 1:
            self.states.pop()


class MaskLies(WalkedMatcher):
    """One bit is flipped where the text is long."""

    def fill_mask(self, out: Tensor) -> None:
        super().fill_mask(out)
        if len(self.states) > 3:
            out[2] ^= 1 << 5


class ForcesOneSpelling(WalkedMatcher):
    """The mask has one token where bytes are forced, while others are accepted."""

    def fill_mask(self, out: Tensor) -> None:
        super().fill_mask(out)
        first = self.forced_tokens()
        if first:
            out.zero_()
            out[first[0] // 32] = torch.tensor(1 << first[0] % 32).to(torch.int32)


class Poisoned(WalkedMatcher):
    """After an illegal token nothing is legal any more."""

    poisoned = False

    def advance(self, tokens: Sequence[int]) -> int:
        taken = 0 if self.poisoned else super().advance(tokens)
        self.poisoned = self.poisoned or taken < len(tokens)
        return taken


class MatchersShareAPosition(WalkedMatcher):
    """All matchers of a grammar stand where one of them has gone last."""

    def __init__(self, grammar: WalkedGrammar, state: Hashable) -> None:
        super().__init__(grammar, state)
        grammar.position = self.states

    def advance(self, tokens: Sequence[int]) -> int:
        self.states = self.grammar.position
        return super().advance(tokens)

    def fill_mask(self, out: Tensor) -> None:
        self.states = self.grammar.position
        super().fill_mask(out)


class CountsWhatItRefused(WalkedMatcher):
    """What is rolled back after some tokens have been refused begins with one of these."""

    refused = False

    def advance(self, tokens: Sequence[int]) -> int:
        taken = super().advance(tokens)
        self.refused = 0 < taken < len(tokens)
        return taken

    def rollback(self, count: int) -> None:
        super().rollback(count - (self.refused and count > 0))
        self.refused = False


class ForcesTooMuch(WalkedMatcher):
    """Takes the first of two ways."""

    def forced_bytes(self) -> bytes:
        return super().forced_bytes() if self.stopped else self.grammar.reference.ending(self.states[-1])


class ForcesNothing(WalkedMatcher):
    def forced_bytes(self) -> bytes:
        return b""


class StopsAnywhere(WalkedMatcher):
    def legal(self) -> dict[int, Hashable]:
        return super().legal() | ({} if self.stopped else dict.fromkeys(self.grammar.vocabulary.stops, STOPPED))


class NegativeIdsCountFromTheEnd(WalkedMatcher):
    def advance(self, tokens: Sequence[int]) -> int:
        size = len(self.grammar.vocabulary)
        return super().advance([token + size if token < 0 else token % size for token in tokens])


BROKEN = {
    ForgetsTheStopToken: "check_rollback",
    MaskLies: "check_masks",
    ForcesOneSpelling: "check_masks",
    Poisoned: "check_advance",
    MatchersShareAPosition: "check_apart",
    CountsWhatItRefused: "check_tree",
    ForcesTooMuch: "check_forced",
    ForcesNothing: "check_forced",
    StopsAnywhere: "check_special_tokens",
    NegativeIdsCountFromTheEnd: "check_advance",
}


@pytest.mark.parametrize("matcher", BROKEN, ids=lambda matcher: matcher.__name__)
def test_broken_backend_is_found_out(matcher):
    class Broken(Walked):
        pass

    Broken.matcher = matcher
    with pytest.raises(AssertionError, match=rf"fails {BROKEN[matcher]}:"):
        check_backend(Broken, policies=["full"])


def test_canonical_policy_that_allows_every_spelling_is_found_out():
    class Full(Walked):
        def compile(self, language: Language, vocabulary: Vocabulary, policy: Policy = "full") -> CompiledGrammar:
            grammar = super().compile(language, vocabulary, "full")
            grammar.policy = policy
            grammar.start = lambda: WalkedMatcher(twin, grammar.reference.automaton.start)
            twin = WalkedGrammar(self, grammar.reference, "full")
            return grammar

    with pytest.raises(AssertionError, match="policy canonical fails check_masks: .* the mask lacks"):
        check_backend(Full)


def test_backend_that_reads_nothing_is_found_out():
    class Refuses(Walked):
        def compile(self, language: Language, vocabulary: Vocabulary, policy: Policy = "full") -> CompiledGrammar:
            raise GrammarError("no")

    with pytest.raises(AssertionError, match="neither a plain regex nor a plain lark"):
        check_backend(Refuses)
