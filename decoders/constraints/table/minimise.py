"""A byte automaton made small: states that lead nowhere go, those that mean the same become one."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .determinise import Bytes


def minimise(automaton: Bytes) -> Bytes:
    """The same language with as few states as possible, in which every state is reached and reaches the end of a text.

    By refinement of the partition of states that accept and that do not, from the states before those that have just been
    told apart: as a bounded text is told apart character by character, rounds over all states would be quadratic.
    """
    narrow, _ = columns(automaton.next)
    rows: list[tuple[int, ...]] = [tuple(row) for row in narrow.tolist()]
    reached = {0, automaton.start}
    todo = [automaton.start]
    while todo:
        more = {*rows[todo.pop()]} - reached
        reached |= more
        todo += more
    blocks = _blocks(sorted(reached), rows, automaton.accepting.tolist())
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
    turned = np.ascontiguousarray(after.T)
    kind, first = distinct(turned)
    return np.ascontiguousarray(turned[first].T), kind


def distinct(rows: NDArray[np.int32]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """``[n]``: number of each row of ``[n, m]`` among the different ones, in the order in which they come; ``[k]``: their places."""
    raw, size = rows.tobytes(), rows.itemsize * rows.shape[1]
    seen: dict[bytes, int] = {}
    number = np.fromiter(
        (seen.setdefault(raw[place * size : (place + 1) * size], len(seen)) for place in range(len(rows))),
        np.int64, len(rows),
    )  # fmt: skip
    return number, np.unique(number, return_index=True)[1]


def _blocks(states: list[int], rows: list[tuple[int, ...]], accepting: list[bool]) -> dict[int, int]:
    """Block of each state: the coarsest partition that bytes cannot tell apart. A block's largest part keeps its name."""
    blocks = {state: int(accepting[state]) for state in states}
    before: dict[int, list[int]] = {state: [] for state in states}
    for state in states:
        for after in {*rows[state]}:
            before[after].append(state)
    ways: dict[
        int, tuple[int, ...]
    ] = {}  # blocks that follow each block's members, but for those about to be looked at
    size = {1: sum(blocks.values())}
    size[0] = len(states) - size[1]
    dirty = {*states}
    while dirty:
        touched: dict[int, list[int]] = {}
        for state in dirty:
            touched.setdefault(blocks[state], []).append(state)
        moved: list[tuple[int, int]] = []
        for block, members in touched.items():
            parts: dict[tuple[int, ...], list[int]] = {}
            for state in members:
                parts.setdefault(tuple([blocks[after] for after in rows[state]]), []).append(state)
            if len(members) == size[block]:
                ways[block] = max(parts, key=lambda way: len(parts[way]))
            parts.pop(ways[block], None)
            for way, part in parts.items():
                name = len(size)
                ways[name], size[name] = way, len(part)
                size[block] -= len(part)
                moved += [(state, name) for state in part]
        blocks.update(moved)
        dirty = {earlier for state, _ in moved for earlier in before[state]}
    return blocks
