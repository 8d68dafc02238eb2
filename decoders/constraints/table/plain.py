"""Tokens of nothing but *plain* characters, and how many of these a state takes.

Inside a string nearly the whole vocabulary is legal. Its tokens need not be walked one by one: where any plain character
is legal n times over, all tokens of up to n plain characters are. Plain is what a JSON string holds without an escape.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

#: All of Unicode but quotes, backslashes, the control characters of ASCII and of Latin-1, and the very last character,
#: which ends a text inside the automata.
_PLAIN = re.compile('[^"\\\\\x00-\x1f\x7f-\x9f\U0010ffff]+')
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


def plain_length(text: bytes) -> int:
    """How many characters a token of plain characters has; 0 for all other tokens."""
    try:
        characters = text.decode()
    except UnicodeDecodeError:
        return 0
    return len(characters) if _PLAIN.fullmatch(characters) else 0


@dataclass(frozen=True)
class Room:
    """How many plain characters states take.

    Attributes:
        least: ``[S]`` int64: any as many plain characters may come next, at least.
        exact: ``[S]`` bool: and no plain characters more than that.
    """

    least: NDArray[np.int64]
    exact: NDArray[np.bool_]


def room(after: NDArray[np.int32], kind: NDArray[np.int64], longest: int) -> Room:
    """Room for up to `longest` plain characters in the states of an automaton ``[S, C]``.

    Followed as long as all plain characters lead from a state to the same state, as they do in strings.
    """
    low = np.full(len(after), len(after), np.int64)
    high = np.zeros(len(after), np.int64)
    for ranges in _RANGES:
        least = most = np.arange(len(after))
        for first, last in reversed(ranges):
            ways = after[:, np.unique(kind[first : last + 1])]
            least, most = least[ways].min(1), most[ways].max(1)
        low, high = np.minimum(low, least), np.maximum(high, most)
    same = low == high
    count = np.zeros(len(after), np.int64)
    at = np.arange(len(after))
    for _ in range(longest):
        to = np.where(same[at], low[at], 0)
        if not to.any():
            break
        count += to > 0
        at = np.where(to > 0, to, at)
    return Room(count, (same[at] & (low[at] == 0)) | (count >= longest))
