"""Minimisation of a byte automaton: states that lead nowhere are removed, equivalent states merged."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..patterns.equivalence import refined
from .determinise import ByteAutomaton


def minimise(automaton: ByteAutomaton) -> ByteAutomaton:
    """The same language with as few states as possible, in which every state is reached and reaches the end of a text."""
    transitions, byte_class = columns(automaton.next)
    source, column = np.nonzero(transitions)
    target = transitions[source, column]
    ends = np.flatnonzero(automaton.accepting)
    useful = _reached(_grouped(source, target, len(transitions)), [automaton.start])
    useful &= _reached(_grouped(target, source, len(transitions)), ends.tolist())
    useful_edges = useful[source] & useful[target]
    source, column, target = source[useful_edges], column[useful_edges], target[useful_edges]
    # Where different bytes go on, or the text may end, states are told apart at once.
    live = np.zeros((len(transitions), transitions.shape[1] + 1), np.bool_)
    live[source, column] = True
    live[ends, -1] = True
    states = np.flatnonzero(useful)
    blocks = np.full(len(transitions), -1, np.int64)
    blocks[states] = distinct(live[states])[0]
    successors = _grouped(source, target, len(transitions))
    predecessors = _grouped(target, source, len(transitions))
    blocks = np.array(refined(blocks.tolist(), states.tolist(), successors, predecessors), np.int64)
    block_number, representatives = distinct(blocks[states, None])
    number = np.zeros(len(transitions), np.int32)
    number[states] = block_number + 1
    representatives = np.concatenate([[0], states[representatives]])
    return ByteAutomaton(
        number[transitions[representatives]][:, byte_class],
        automaton.accepting[representatives],
        int(number[automaton.start]),
    )


def columns(transitions: NDArray[np.int32]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """``[S, C]`` with each column of ``[S, 256]`` once, and the column of each byte."""
    transposed = np.ascontiguousarray(transitions.T)
    byte_class, first = distinct(transposed)
    return np.ascontiguousarray(transposed[first].T), byte_class


def distinct(rows: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """``[n]``: number of each row of ``[n, m]`` among the different ones, in the order in which they come; ``[k]``: their places."""
    keys: list[bytes] = (
        np.ascontiguousarray(rows).view(np.dtype((np.void, rows.itemsize * rows.shape[1])))[:, 0].tolist()
    )
    numbers = {row: number for number, row in enumerate(dict.fromkeys(keys))}
    number = np.fromiter(map(numbers.__getitem__, keys), np.int64, len(keys))
    return number, np.unique(number, return_index=True)[1]


def _grouped(keys: NDArray[np.integer[Any]], values: NDArray[np.integer[Any]], count: int) -> list[list[int]]:
    """The values of each of `count` keys, in their order."""
    order = np.argsort(keys, kind="stable")
    flat = values[order].tolist()
    bounds = np.searchsorted(keys[order], np.arange(count + 1)).tolist()
    return [flat[start:end] for start, end in pairwise(bounds)]


def _reached(successors: list[list[int]], start: list[int]) -> NDArray[np.bool_]:
    """``[S]``: the states that `successors` lead to from `start`."""
    reached_states = {*start}
    todo = [*start]
    while todo:
        new = {*successors[todo.pop()]} - reached_states
        reached_states |= new
        todo += new
    reached = np.zeros(len(successors), np.bool_)
    reached[[*reached_states]] = True
    return reached
