"""A compiled grammar under check: what is true of it, and random walks through it."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..constraints import CompiledGrammar, Matcher, Vocabulary, mask_words
from .languages import STOPPED, Reference

WALKS, STEPS = 4, 10


@dataclass(frozen=True)
class GrammarCase:
    """A compiled language, what is true of it, and the source of random walks."""

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
        options = list(legal.items())
        sample = self.chance.sample(options, min(3, len(options)))
        if self.chance.random() < 0.2:
            sample = [option for option in options if option[1] == STOPPED] or sample
        return max(sample, key=lambda option: len(self.vocabulary.tokens[option[0]] or b""))

    def after(self, taken: Sequence[int]) -> Matcher:
        """Another matcher, which has taken the same tokens."""
        matcher = self.grammar.start()
        assert matcher.advance(taken) == len(taken), f"{self.told(taken)} is taken token by token, but not at once"
        return matcher

    def told(self, tokens: Sequence[int]) -> str:
        """Tokens for a message."""
        return f"{list(tokens)} {self.vocabulary.spell([t for t in tokens if 0 <= t < len(self.vocabulary)])!r}"


Check = Callable[[GrammarCase], None]


def mask(matcher: Matcher) -> set[int]:
    """The tokens in a matcher's mask; bits behind the vocabulary must be zero or at least without effect."""
    out = torch.full((mask_words(len(matcher.grammar.vocabulary)),), 0x5A5A5A5A, dtype=torch.int32)
    matcher.fill_mask(out)
    bits = np.unpackbits(out.numpy().view(np.uint8), count=len(matcher.grammar.vocabulary), bitorder="little")
    return set(bits.nonzero()[0].tolist())


def takes(matcher: Matcher, token: int) -> bool:
    """Whether a matcher takes a token; it stays where it is."""
    count = matcher.advance([token])
    matcher.rollback(count)
    return count == 1


def observed(matcher: Matcher) -> tuple[object, ...]:
    """All that a matcher says about where it is."""
    return mask(matcher), matcher.accepting, matcher.forced_bytes()
