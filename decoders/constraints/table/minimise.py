"""A byte automaton made small: states that lead nowhere go, those that mean the same become one."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .determinise import Bytes


def minimise(automaton: Bytes) -> Bytes:
    """The same language with as few states as possible, in which every state is reached and reaches the end of a text.

    By refinement of a partition of the states, from the states before those that have just been told apart: as a bounded
    text is told apart character by character, rounds over all states would be quadratic.
    """
    narrow, kind = columns(automaton.next)
    source, column = np.nonzero(narrow)
    target = narrow[source, column]
    ends = np.flatnonzero(automaton.accepting)
    useful = _reached(_grouped(source, target, len(narrow)), [automaton.start])
    useful &= _reached(_grouped(target, source, len(narrow)), ends.tolist())
    kept = useful[source] & useful[target]
    source, column, target = source[kept], column[kept], target[kept]
    # Where different bytes go on, or the text may end, states are told apart at once.
    live = np.zeros((len(narrow), narrow.shape[1] + 1), np.bool_)
    live[source, column] = True
    live[ends, -1] = True
    states = np.flatnonzero(useful)
    blocks = np.full(len(narrow), -1, np.int64)
    blocks[states] = distinct(live[states])[0]
    blocks = _refined(
        blocks.tolist(), states.tolist(), _grouped(source, target, len(narrow)), _grouped(target, source, len(narrow))
    )
    name, one = distinct(blocks[states, None])
    number = np.zeros(len(narrow), np.int32)
    number[states] = name + 1
    one = np.concatenate([[0], states[one]])
    return Bytes(number[narrow[one]][:, kind], automaton.accepting[one], int(number[automaton.start]))


def columns(after: NDArray[np.int32]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """``[S, C]`` with each column of ``[S, 256]`` once, and the column of each byte."""
    turned = np.ascontiguousarray(after.T)
    kind, first = distinct(turned)
    return np.ascontiguousarray(turned[first].T), kind


def distinct(rows: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """``[n]``: number of each row of ``[n, m]`` among the different ones, in the order in which they come; ``[k]``: their places."""
    raw, size = rows.tobytes(), rows.itemsize * rows.shape[1]
    seen: dict[bytes, int] = {}
    number = np.fromiter(
        (seen.setdefault(raw[place * size : (place + 1) * size], len(seen)) for place in range(len(rows))),
        np.int64, len(rows),
    )  # fmt: skip
    return number, np.unique(number, return_index=True)[1]


def _grouped(keys: NDArray[np.integer[Any]], values: NDArray[np.integer[Any]], count: int) -> list[list[int]]:
    """The values of each of `count` keys, in their order."""
    order = np.argsort(keys, kind="stable")
    flat = values[order].tolist()
    cuts = np.searchsorted(keys[order], np.arange(count + 1)).tolist()
    return [flat[begin:end] for begin, end in pairwise(cuts)]


def _reached(ways: list[list[int]], begin: list[int]) -> NDArray[np.bool_]:
    """``[S]``: what `ways` lead to from some states."""
    found = {*begin}
    todo = [*begin]
    while todo:
        more = {*ways[todo.pop()]} - found
        found |= more
        todo += more
    reached = np.zeros(len(ways), np.bool_)
    reached[[*found]] = True
    return reached


def _refined(blocks: list[int], states: list[int], ways: list[list[int]], before: list[list[int]]) -> NDArray[np.int64]:
    """The coarsest partition, finer than `blocks`, whose blocks' members lead to the same blocks.

    A block's largest part keeps its name: what leads there needs no second look.
    """
    size = [0] * (max(blocks, default=-1) + 1)
    for state in states:
        size[blocks[state]] += 1
    usual: list[tuple[int, ...]] = [()] * len(
        size
    )  # where each block's members lead, but for those about to be looked at
    named = blocks.__getitem__
    dirty = {*states}
    while dirty:
        touched: dict[int, list[int]] = {}
        for state in dirty:
            touched.setdefault(blocks[state], []).append(state)
        moved: list[tuple[int, int]] = []
        for block, members in touched.items():
            parts: dict[tuple[int, ...], list[int]] = {}
            for state in members:
                parts.setdefault(tuple(map(named, ways[state])), []).append(state)
            if len(members) == size[block]:
                usual[block] = max(parts, key=lambda way: len(parts[way]))
            parts.pop(usual[block], None)
            for way, part in parts.items():
                name = len(size)
                usual.append(way)
                size.append(len(part))
                size[block] -= len(part)
                moved += [(state, name) for state in part]
        for state, name in moved:
            blocks[state] = name
        dirty = {earlier for state, _ in moved for earlier in before[state]}
    return np.array(blocks, np.int64)
