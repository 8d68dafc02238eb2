"""The legal tokens of automaton states inside JSON strings, from the number of plain characters (which need no escape) that may follow.

Inside a string, all plain characters lead to the same state. So only the number of plain characters at a token's beginning and the
rest of the token after them matter. The automaton reads only the rest, which many tokens share.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..patterns.limits import check
from .determinise import distinct
from .lexicon import Ints, Lexicon, room

#: Number of states from which the automaton reads the rests of tokens at once.
CHUNK = 512


@dataclass(frozen=True)
class StringStates:
    """The states inside strings, in ``K`` classes. In all states of a class the same tokens are legal, and the same rests of tokens.

    Attributes:
        class_of: ``[S]`` int64, class of each state, -1 outside of strings.
        room: ``[K]`` int64, how many plain characters may come next.
        sets: ``[K, longest + 1]`` int32, index of the set of rests that are legal after 0, 1, … plain characters; -1 (the empty set)
            where that many plain characters are illegal.
        legal: ``[sets + 1, rests]`` bool, which rests are in each set. The last set is empty. All other sets contain the empty rest,
            which is the end of a token.
    """

    class_of: NDArray[np.int64]
    room: NDArray[np.int64]
    sets: NDArray[np.int32]
    legal: NDArray[np.bool_]
    lexicon: Lexicon

    @staticmethod
    def of(transitions: Ints, byte_class: NDArray[np.int64], lexicon: Lexicon) -> StringStates:
        """The states inside strings of a UTF-8 automaton ``[S, C]`` with columns `byte_class` ``[256]``; only state 0 is a dead end."""
        space = room(transitions, byte_class, lexicon.longest)
        states = np.flatnonzero(space.exact & (space.least > 0))
        number, legal = _legal_rests(transitions, byte_class, space.reached(states), lexicon)
        sets = np.full((len(states), lexicon.longest + 1), -1, np.int32)
        reached = states
        for length in range(lexicon.longest + 1):
            sets[:, length] = np.where(length <= space.least[states], number[reached], -1)
            reached = space.next[reached]
        classes, first_of_class = distinct(sets)
        class_of = np.full(len(transitions), -1, np.int64)
        class_of[states] = classes
        return StringStates(class_of, space.least[states[first_of_class]], sets[first_of_class], legal, lexicon)

    def masks(self) -> list[NDArray[np.int32]]:
        """The mask ``[W]`` of each class."""
        lexicon = self.lexicon
        text = np.flatnonzero((self.legal.any(0) & (np.arange(len(lexicon.rests)) > 0))[lexicon.rest])
        length, rest = lexicon.length[text], lexicon.rest[text]
        return [
            lexicon.plain[most] | lexicon.mask(lexicon.tokens[text[self.legal[sets[length], rest]]])
            for most, sets in zip(self.room.tolist(), self.sets, strict=True)
        ]

    def below(self, nodes: Ints, classes: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The legal tokens below given nodes of the trie.

        Args:
            nodes, classes: pairs of a node, and the class of the automaton's state at this node.

        Returns:
            for each legal token: the index of its pair, and the token.
        """
        lexicon, trie = self.lexicon, self.lexicon.trie
        low = trie.low[nodes].astype(np.int64)
        count = trie.high[nodes] - low
        place = np.repeat(np.arange(len(nodes)), count)
        text = np.arange(len(place)) + (low - np.cumsum(count) + count)[place]
        length = lexicon.length[text] - trie.characters[nodes][place]
        is_legal = self.legal[self.sets[classes[place], length], lexicon.rest[text]]
        return place[is_legal], lexicon.tokens[text[is_legal]]


def _legal_rests(
    transitions: Ints, byte_class: NDArray[np.int64], states: NDArray[np.int64], lexicon: Lexicon
) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    """``[S]``, for each of `states` the index of the set of rests that are legal there; and the sets (``StringStates.legal``)."""
    set_numbers: dict[bytes, int] = {}
    sets: list[NDArray[np.int32]] = []
    number = np.zeros(len(transitions), np.int32)
    for begin in range(0, len(states), CHUNK):
        check("computing the masks of a table")
        part = states[begin : begin + CHUNK]
        paths = lexicon.ends.walk(transitions, byte_class, part)
        order = np.lexsort((paths.token, paths.row))
        rest = paths.token[order]
        bounds = np.searchsorted(paths.row[order], np.arange(len(part) + 1)).tolist()
        for place, state in enumerate(part.tolist()):
            legal_rests = rest[bounds[place] : bounds[place + 1]]
            set_number = number[state] = set_numbers.setdefault(legal_rests.tobytes(), len(sets))
            if set_number == len(sets):
                sets.append(legal_rests)
    legal = np.zeros((len(sets) + 1, len(lexicon.rests)), np.bool_)
    for set_number, legal_rests in enumerate(sets):
        legal[set_number, legal_rests] = legal[set_number, 0] = True
    return number, legal
