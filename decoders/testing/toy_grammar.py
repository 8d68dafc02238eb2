"""Grammars over the token ids of tiny models, which have no tokenizer."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from ..constraints import CompiledGrammar, Language, Matcher, Tables, Tabulated, Vocabulary, pack

#: The state after a stop token.
ENDED = 1


class TokenAutomaton(Tabulated):
    """An automaton over token ids.

    Args:
        following: for each state from 2 on, a dict from its legal tokens to the next state. State 0 is dead, and :data:`ENDED` is 1.
        accepting: states in which the text may end.
        vocabulary: size of the model's logits.
        stops: tokens that end a text.
    """

    backend = "toy"
    policy = "full"
    first = 2

    def __init__(
        self, following: Sequence[dict[int, int]], accepting: set[int], vocabulary: int, stops: Sequence[int]
    ) -> None:
        names = [b"%c%c" % divmod(token, 128) for token in range(vocabulary)]
        self.language = Language("toy", regex="toy")
        self.vocabulary = Vocabulary(names, stops)
        self.following = [{}, {}, *following]
        self.accepting = [state == ENDED or state in accepting for state in range(len(self.following))]
        self.mask_rows = range(len(self.following))
        allowed = torch.zeros(len(self.following), vocabulary, dtype=torch.bool)
        for state, successors in enumerate(self.following):
            allowed[state, list(successors)] = True
            if self.accepting[state]:
                allowed[state, list(self.vocabulary.stops)] = True
        self.masks = pack(allowed)

    @staticmethod
    def anything(vocabulary: int, stops: Sequence[int] = ()) -> TokenAutomaton:
        """The automaton that allows all texts."""
        return TokenAutomaton([dict.fromkeys(set(range(vocabulary)) - set(stops), 2)], {2}, vocabulary, stops)

    @staticmethod
    def random(seed: int, vocabulary: int, stops: Sequence[int], states: int = 12) -> TokenAutomaton:
        """A random automaton: some states force one token, and others allow a few or many. Texts can have any length."""
        chance = random.Random(seed)
        tokens = [token for token in range(vocabulary) if token not in stops]
        following = []
        for _ in range(states):
            size = chance.choice([1, 1, 2, 8, len(tokens) // 2, len(tokens)])
            following.append({t: 2 + chance.randrange(states) for t in chance.sample(tokens, size)})
        accepting = {state for state in range(2, 2 + states) if chance.random() < 0.3}
        return TokenAutomaton(following, accepting, vocabulary, stops)

    def step(self, state: int, token: int) -> int:
        if token in self.vocabulary.stops:
            return ENDED if self.accepting[state] and state != ENDED else 0
        return self.following[state].get(token, 0)

    def forced_bytes(self, state: int) -> bytes:
        run: list[int] = []  # at most 64 tokens, because some automata force endless text
        while len(run) < 64 and len(self.following[state]) == 1 and not self.accepting[state]:
            token, state = next(iter(self.following[state].items()))
            run.append(token)
        return self.vocabulary.spell(run)

    def tables(self) -> Tables:
        """The automaton's transitions by byte. Each token is spelled with two bytes, and no text may end between the two bytes."""
        halves = {(state, token >> 7) for state, after in enumerate(self.following) for token in after}
        between = {half: len(self.following) + place for place, half in enumerate(sorted(halves))}
        following = torch.zeros(len(self.following) + len(between), 256, dtype=torch.int32)
        for state, successors in enumerate(self.following):
            for token, after in successors.items():
                half = between[state, token >> 7]
                following[state, token >> 7] = half
                following[half, token & 127] = after
        mask_of = torch.nn.functional.pad(torch.arange(len(self.following)), (0, len(between)))
        return Tables(following, torch.arange(256), mask_of, self.masks, self.first, ENDED)

    @property
    def nbytes(self) -> int:
        return self.tables().nbytes

    def fill(self, state: int, out: Tensor) -> None:
        out.copy_(self.masks[state])


class Matched(CompiledGrammar):
    """A grammar that has only matchers, and no tables."""

    def __init__(self, inner: CompiledGrammar) -> None:
        self.inner, self.backend, self.policy = inner, inner.backend, inner.policy
        self.language, self.vocabulary = inner.language, inner.vocabulary

    def start(self) -> Matcher:
        return self.inner.start()

    @property
    def nbytes(self) -> int:
        return self.inner.nbytes
