"""Partitions of states by bounded look-ahead: one state of each part is walked for all."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .minimise import distinct
from .trie import Ints

#: Bytes that are looked at first; then twice as many, and so on.
FIRST = 4


@dataclass(frozen=True)
class EquivalentStates:
    """The states of an automaton ``[S, C]`` by what up to `depth` bytes lead to: nowhere, into strings, or elsewhere.

    Where they lead into strings, the class of the state there says all about what may follow: states of one part take
    the same tokens if of these no more than `depth` bytes are read outside of strings.

    Attributes:
        strings: ``[S]`` int64, class of the states inside strings, -1 of the others.
        part: ``[S]`` int64, part of each state.
        final: no bytes tell apart what is in one part.
    """

    transitions: Ints
    strings: NDArray[np.int64]
    part: NDArray[np.int64]
    depth: int = 0
    final: bool = False

    @staticmethod
    def of(transitions: Ints, strings: NDArray[np.int64]) -> EquivalentStates:
        """The partition at depth 0: dead, in a class of strings, or neither."""
        part = np.where(strings < 0, strings.max() + 2, strings + 1)
        part[0] = 0
        return EquivalentStates(transitions, strings, part)

    def finer(self) -> EquivalentStates:
        """The partition at twice the depth."""
        others = np.flatnonzero(self.strings < 0)[1:]
        transitions, part, known = self.transitions[others], self.part, self.strings.max() + 2
        depth = 2 * self.depth or FIRST
        for _ in range(depth - self.depth):
            before, part = part, part.copy()
            part[others] = known + distinct(before.astype(np.int32)[transitions])[0]
            if part.max() == before.max():
                return EquivalentStates(self.transitions, self.strings, part, depth, final=True)
        return EquivalentStates(self.transitions, self.strings, part, depth)
