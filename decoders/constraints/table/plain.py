"""*Plain* characters, those that a JSON string holds without an escape, and how many of them a state takes.

Inside a string nearly the whole vocabulary is legal. Its tokens need not be walked one by one: where n plain characters
are legal, whichever they are, so are all tokens of up to n plain characters; of the others only what comes after their
plain characters needs walking, and few of them end differently.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

#: UTF-8 of plain characters: ranges of the first and of the further bytes (Unicode 15, table 3-7).
_RANGES = (
    ((0x20, 0x21),), ((0x23, 0x5B),), ((0x5D, 0x7E),),
    ((0xC2, 0xC2), (0xA0, 0xBF)), ((0xC3, 0xDF), (0x80, 0xBF)),
    ((0xE0, 0xE0), (0xA0, 0xBF), (0x80, 0xBF)), ((0xE1, 0xEC), (0x80, 0xBF), (0x80, 0xBF)),
    ((0xED, 0xED), (0x80, 0x9F), (0x80, 0xBF)), ((0xEE, 0xEF), (0x80, 0xBF), (0x80, 0xBF)),
    ((0xF0, 0xF0), (0x90, 0xBF), (0x80, 0xBF), (0x80, 0xBF)), ((0xF1, 0xF3), (0x80, 0xBF), (0x80, 0xBF), (0x80, 0xBF)),
    ((0xF4, 0xF4), (0x80, 0x8E), (0x80, 0xBF), (0x80, 0xBF)), ((0xF4, 0xF4), (0x8F, 0x8F), (0x80, 0xBE), (0x80, 0xBF)),
    ((0xF4, 0xF4), (0x8F, 0x8F), (0xBF, 0xBF), (0x80, 0xBE)),
)  # fmt: skip


#: One plain character.
_PLAIN = re.compile(
    b"|".join(b"".join(b"[\\x%02x-\\x%02x]" % pair for pair in ranges) for ranges in _RANGES), re.DOTALL
)
_BEGIN = re.compile(b"(?:%s)*" % _PLAIN.pattern, re.DOTALL)


def split(text: bytes) -> tuple[int, bytes]:
    """How many plain characters a token begins with, and what is left of it."""
    begin = _BEGIN.match(text)
    end = begin.end() if begin else 0
    # A character has one byte that does not continue another.
    return sum(byte & 0xC0 != 0x80 for byte in text[:end]), text[end:]


@dataclass(frozen=True)
class Room:
    """How many plain characters states take.

    Attributes:
        least: ``[S]`` int64: any as many plain characters may come next, at least.
        exact: ``[S]`` bool: and no plain characters more than that.
        next: ``[S]`` int64: the state after any plain character where there is room.
    """

    least: NDArray[np.int64]
    exact: NDArray[np.bool_]
    next: NDArray[np.int64]

    def reached(self, states: NDArray[np.int64]) -> NDArray[np.int64]:
        """`states` and all states that plain characters lead to from them, as far as there is room."""
        known = states
        while len(states):
            states = np.setdiff1d(self.next[states], known)
            states = states[states > 0]
            known = np.union1d(known, states)
        return known


def room(transitions: NDArray[np.int32], byte_class: NDArray[np.int64], longest: int) -> Room:
    """Room for up to `longest` plain characters in the states of an automaton ``[S, C]``.

    Followed as long as all plain characters lead from a state to the same state, as they do in strings.
    """
    low = np.full(len(transitions), len(transitions), np.int64)
    high = np.zeros(len(transitions), np.int64)
    for ranges in _RANGES:
        least = most = np.arange(len(transitions))
        for first, last in reversed(ranges):
            targets = transitions[:, np.unique(byte_class[first : last + 1])]
            least, most = least[targets].min(1), most[targets].max(1)
        low, high = np.minimum(low, least), np.maximum(high, most)
    same = low == high
    count = np.zeros(len(transitions), np.int64)
    state = np.arange(len(transitions))
    for _ in range(longest):
        following = np.where(same[state], low[state], 0)
        if not following.any():
            break
        count += following > 0
        state = np.where(following > 0, following, state)
    return Room(count, (same[state] & (low[state] == 0)) | (count >= longest), np.where(count > 0, low, 0))
