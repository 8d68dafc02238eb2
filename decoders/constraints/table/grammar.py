"""A regular language compiled for a vocabulary: its tables, and the tokens' ways through them as far as they were asked."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..base import Grammar, Language, Policy, Tables
from ..vocabulary import Vocabulary
from . import files
from .automaton import Automaton
from .forced import Forced
from .matcher import TableMatcher

#: Steps (a state and a token) that are remembered.
STEPS = 1 << 20


class TableGrammar(Grammar):
    """Immutable but for what it remembers. States are numbers; 0: illegal.

    Attributes:
        automaton: arrays. accepting, mask_of: of each state. forced: bytes that every text goes on with, by state.
        stopped: the state after a stop token.
    """

    backend = "table"

    def __init__(self, language: Language, vocabulary: Vocabulary, policy: Policy, automaton: Automaton) -> None:
        """Of an automaton with the masks of the policy."""
        self.language, self.vocabulary, self.policy = language, vocabulary, policy
        self.automaton = automaton
        tables = automaton.tables
        self.accepting: list[bool] = automaton.accepting.tolist()
        self.mask_of: list[int] = tables.mask_of.tolist()
        self.forced = Forced(automaton)
        self.stopped = tables.stopped
        self._after: list[list[int]] = tables.next.tolist()
        self._kind = bytes(tables.classes.tolist())
        self._masks: NDArray[np.int32] = tables.masks.numpy()
        self._stops = frozenset(vocabulary.stops)
        self._steps: list[dict[int, int]] = [{} for _ in self.mask_of]
        self._remembered = 0

    @staticmethod
    def load(
        path: str | os.PathLike[str], language: Language, vocabulary: Vocabulary, policy: Policy = "full"
    ) -> TableGrammar:
        """What :meth:`save` wrote for the same regex, vocabulary and policy.

        Raises:
            GrammarError: the file is missing, damaged, of another version, or of something else.
        """
        automaton = files.load(path, files.identity(language, vocabulary, policy), len(vocabulary))
        return TableGrammar(language, vocabulary, policy, automaton)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes what was compiled as safetensors, whole or not at all."""
        files.save(path, self.automaton, files.identity(self.language, self.vocabulary, self.policy))

    def start(self) -> TableMatcher:
        return TableMatcher(self, self.automaton.tables.start)

    @property
    def nbytes(self) -> int:
        return self.automaton.tables.nbytes

    def tables(self) -> Tables:
        return self.automaton.tables

    def step(self, state: int, token: int) -> int:
        """The state after a token; 0 if it is illegal, as everything is after that."""
        known = self._steps[state]
        after = known.get(token)
        if after is None:
            after = self._fold(state, token)
            if self._remembered >= STEPS:
                self._steps = [{} for _ in self._steps]
                self._remembered = 0
            self._steps[state][token] = after
            self._remembered += 1
        return after

    def walk(self, parents: Sequence[int], tokens: Sequence[int], state: int) -> list[int]:
        """The state after each node of a tree, see :meth:`Matcher.fill_tree`; 0 where it is illegal or never accepted."""
        states = [state]
        append, steps = states.append, self._steps
        for node in range(1, len(parents)):
            parent = parents[node]
            if parent < 0:
                append(0)
                continue
            try:
                append(steps[states[parent]][tokens[node]])
            except KeyError:
                append(self.step(states[parent], tokens[node]))
                steps = self._steps
        return states

    def _fold(self, state: int, token: int) -> int:
        """Along the bytes of a token that the mask allows."""
        if not state or state == self.stopped or not 0 <= token < len(self.vocabulary):
            return 0
        word = int(self._masks[self.mask_of[state], token >> 5])
        if not word >> (token & 31) & 1:
            return 0
        if token in self._stops:
            return self.stopped
        for byte in self.vocabulary.tokens[token] or b"":
            state = self._after[state][self._kind[byte]]
        return state
