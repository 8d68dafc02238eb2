"""A byte automaton made small: states that lead nowhere go, those that mean the same become one."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..equivalence import classes
from .determinise import Bytes


def minimise(automaton: Bytes) -> Bytes:
    """The same language with as few states as possible, in which every state is reached and reaches the end of a text."""
    narrow, _ = columns(automaton.next)
    rows: list[tuple[int, ...]] = [tuple(row) for row in narrow.tolist()]
    reached = {0, automaton.start}
    todo = [automaton.start]
    while todo:
        more = {*rows[todo.pop()]} - reached
        reached |= more
        todo += more
    blocks = classes(sorted(reached), rows, automaton.accepting.tolist())
    names = {blocks[0]: 0}  # the dead state's block has all states from which no text ends
    number = np.zeros(len(rows), np.int32)
    for state in sorted(reached):
        number[state] = names.setdefault(blocks[state], len(names))
    one = np.zeros(len(names), np.int64)
    kept = np.array(sorted(reached), np.int64)
    one[number[kept]] = kept
    one[0] = 0
    return Bytes(number[automaton.next[one]], automaton.accepting[one], int(number[automaton.start]))


def columns(after: NDArray[np.int32]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """``[S, C]`` with each column of ``[S, 256]`` once, and the column of each byte."""
    seen: dict[bytes, int] = {}
    turned = np.ascontiguousarray(after.T)
    kind = np.array([seen.setdefault(row.tobytes(), len(seen)) for row in turned])
    first = np.unique(kind, return_index=True)[1]
    return np.ascontiguousarray(turned[first].T), kind
