"""A byte automaton made small: states that lead nowhere go, those that mean the same become one."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...patterns.equivalence import refined
from .determinise import Bytes


def minimise(automaton: Bytes) -> Bytes:
    """The same language with as few states as possible, in which every state is reached and reaches the end of a text."""
    narrow, kind = columns(automaton.next)
    source, column = np.nonzero(narrow)
    target = narrow[source, column]
    ends = np.flatnonzero(automaton.accepting)
    useful = _reached(_grouped(source, target, len(narrow)), [automaton.start])
    useful &= _reached(_grouped(target, source, len(narrow)), ends.tolist())
    useful_edges = useful[source] & useful[target]
    source, column, target = source[useful_edges], column[useful_edges], target[useful_edges]
    # Where different bytes go on, or the text may end, states are told apart at once.
    live = np.zeros((len(narrow), narrow.shape[1] + 1), np.bool_)
    live[source, column] = True
    live[ends, -1] = True
    states = np.flatnonzero(useful)
    blocks = np.full(len(narrow), -1, np.int64)
    blocks[states] = distinct(live[states])[0]
    successors, before = _grouped(source, target, len(narrow)), _grouped(target, source, len(narrow))
    blocks = np.array(refined(blocks.tolist(), states.tolist(), successors, before), np.int64)
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
    raw: list[bytes] = (
        np.ascontiguousarray(rows).view(np.dtype((np.void, rows.itemsize * rows.shape[1])))[:, 0].tolist()
    )
    numbers = {row: number for number, row in enumerate(dict.fromkeys(raw))}
    number = np.fromiter(map(numbers.__getitem__, raw), np.int64, len(raw))
    return number, np.unique(number, return_index=True)[1]


def _grouped(keys: NDArray[np.integer[Any]], values: NDArray[np.integer[Any]], count: int) -> list[list[int]]:
    """The values of each of `count` keys, in their order."""
    order = np.argsort(keys, kind="stable")
    flat = values[order].tolist()
    cuts = np.searchsorted(keys[order], np.arange(count + 1)).tolist()
    return [flat[begin:end] for begin, end in pairwise(cuts)]


def _reached(successors: list[list[int]], begin: list[int]) -> NDArray[np.bool_]:
    """``[S]``: what `ways` lead to from some states."""
    known = {*begin}
    todo = [*begin]
    while todo:
        more = {*successors[todo.pop()]} - known
        known |= more
        todo += more
    reached = np.zeros(len(successors), np.bool_)
    reached[[*known]] = True
    return reached
