"""Which tokens each state of a byte automaton allows, as packed masks, equal ones once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .equivalent import EquivalentStates
from .lexicon import Lexicon
from .rows import MaskRows, Row
from .strings import StringStates
from .trie import Ints

#: Tokens that a walk from several states may meet: 16 bytes each, and some more on the way.
TOKENS = 1 << 21
#: StateMasks that are packed at a time: a byte per token.
CHUNK = 32


@dataclass(frozen=True)
class StateMasks:
    """Masks of all states.

    Attributes:
        rows: ``R`` masks, all different; the first is ones, for states that no text comes to, the dead one among them.
        of: ``[S]`` int64, row of each state.
        alive: ``[S]`` bool: tokens lead from here to the end of a text.
        stops: the row of the stop tokens alone.
    """

    rows: MaskRows
    of: NDArray[np.int64]
    alive: NDArray[np.bool_]
    stops: int


def masks(after: Ints, kind: NDArray[np.int64], accepting: NDArray[np.bool_], lexicon: Lexicon) -> StateMasks:
    """The masks of a trimmed automaton ``[S, C]`` with columns `kind` ``[256]``."""
    used: NDArray[np.bool_] = np.any(after > 0, axis=0)
    if lexicon.single[used[kind]].all():
        return _sliced(after, kind, accepting, lexicon)
    alive = _alive(after, kind, accepting, lexicon)
    return _walked(after, kind, accepting, alive, lexicon)


def _sliced(after: Ints, kind: NDArray[np.int64], accepting: NDArray[np.bool_], lexicon: Lexicon) -> StateMasks:
    """Masks where every byte is a token, so that every state comes to an end and all tokens that do not die are legal.

    Inside strings, masks are put together by class. Elsewhere few tokens are legal: they are walked, from one state for
    all that cannot be told apart by as many bytes as that takes.
    """
    strings = StringStates.of(after, kind, lexicon)
    bare: list[NDArray[np.int32]] = strings.masks()
    number = strings.class_of.copy()  # of each state's mask among the bare ones, which have no stop tokens yet
    inside = number >= 0
    equivalent = EquivalentStates.of(after, strings.class_of)
    open = np.flatnonzero(~inside)[1:]
    deep = np.zeros(len(after), np.int64)
    while len(open):
        equivalent = equivalent.finer()
        # Where a state of a class has been walked already, it stands for the class.
        open = open[np.argsort(number[open] < 0, kind="stable")]
        _, first, same = np.unique(equivalent.part[open], return_index=True, return_inverse=True)
        ones = open[first]
        new = ones[number[ones] < 0]
        if len(new):
            for part, read, row in _walks(after, kind, new, strings):
                deep[part], number[part] = read, np.arange(len(bare), len(bare) + len(part))
                bare += [*row]
        shared = equivalent.final | (deep[ones] <= equivalent.depth)
        number[open[shared[same]]] = number[ones[same]][shared[same]]
        open = open[~shared[same]]
    rows = _Distinct(lexicon)
    of = np.zeros(len(after), np.int64)
    pairs = 2 * number + accepting
    for pair in np.unique(pairs[1:]).tolist():
        of[pairs == pair] = rows.add(bare[pair >> 1], bool(pair & 1))
    of[0] = 0
    stops = rows.add(np.zeros(lexicon.words, np.int32), True)
    return StateMasks(MaskRows(lexicon.words, rows.rows), of, np.arange(len(after)) > 0, stops)


def _walks(
    after: Ints, kind: NDArray[np.int64], states: NDArray[np.int64], strings: StringStates
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int32]]]:
    """Some of `states` at a time, how many bytes were read from each outside of strings, and their masks ``[n, W]``."""
    lexicon = strings.lexicon
    # Tokens that begin with a byte that is legal: no walk meets more.
    most = np.cumsum((after[states][:, kind] > 0) @ lexicon.beginning)
    for part in np.split(states, np.flatnonzero(np.diff(most // TOKENS)) + 1):
        paths = lexicon.trie.walk(after, kind, part, strings.class_of >= 0)
        single = paths.token >= 0
        place, more = strings.below(paths.node[~single], strings.class_of[paths.state[~single]])
        row = np.concatenate([paths.row[single], paths.row[~single][place]])
        token = np.concatenate([paths.token[single], more])
        for begin in range(0, len(part), CHUNK):
            some = (row >= begin) & (row < begin + CHUNK)
            allowed = np.zeros((min(CHUNK, len(part) - begin), 32 * lexicon.words), np.uint8)
            allowed[row[some] - begin, token[some]] = 1
            yield part[begin : begin + CHUNK], paths.deep[begin : begin + CHUNK], lexicon.pack(allowed)


def _walked(
    after: Ints, kind: NDArray[np.int64], accepting: NDArray[np.bool_], alive: NDArray[np.bool_], lexicon: Lexicon
) -> StateMasks:
    """Masks where some bytes have no token of their own: token by token, and only those that lead to living states."""
    starts = np.flatnonzero(alive)
    rows = _Distinct(lexicon)
    of = np.zeros(len(after), np.int64)
    for part, allowed in _collected(after, kind, starts, alive, lexicon):
        for state, row in zip(starts[part].tolist(), allowed, strict=True):
            of[state] = rows.add(row, bool(accepting[state]))
    stops = rows.add(np.zeros(lexicon.words, np.int32), True)
    return StateMasks(MaskRows(lexicon.words, rows.rows), of, alive, stops)


class _Distinct:
    """Masks, each once; the first is ones."""

    def __init__(self, lexicon: Lexicon) -> None:
        self.rows = [Row.of(np.full(lexicon.words, -1, np.int32))]
        self._known: dict[tuple[bytes, bytes], int] = {}
        self._ends = lexicon.mask(lexicon.stops)

    def add(self, mask: NDArray[np.int32], ending: bool) -> int:
        """The number of `mask`, with the stop tokens if the text may end."""
        row = Row.of(mask | self._ends if ending else mask)
        number = self._known.setdefault(row.key, len(self.rows))
        if number == len(self.rows):
            self.rows.append(row)
        return number


def _collected(
    after: Ints, kind: NDArray[np.int64], starts: NDArray[np.int64], alive: NDArray[np.bool_], lexicon: Lexicon
) -> Iterator[tuple[slice, NDArray[np.int32]]]:
    """Masks of the tokens that lead from `starts` to living states, some of the starts at a time."""
    for begin in range(0, len(starts), CHUNK):
        part = slice(begin, min(begin + CHUNK, len(starts)))
        paths = lexicon.trie.walk(after, kind, starts[part])
        good = alive[paths.state]
        allowed = np.zeros((part.stop - begin, 32 * lexicon.words), np.uint8)
        allowed[paths.row[good], paths.token[good]] = 1
        yield part, lexicon.pack(allowed)


def _alive(after: Ints, kind: NDArray[np.int64], accepting: NDArray[np.bool_], lexicon: Lexicon) -> NDArray[np.bool_]:
    """``[S]``: from which states tokens lead to the end of a text; the others may have no legal token at all."""
    steps = []
    for begin in range(1, len(after), CHUNK):
        starts = np.arange(begin, min(begin + CHUNK, len(after)), dtype=np.int32)
        paths = lexicon.trie.walk(after, kind, starts)
        steps.append(np.unique(starts[paths.row].astype(np.int64) * len(after) + paths.state))
    source, target = np.divmod(np.unique(np.concatenate(steps)), len(after))
    alive = accepting.copy()
    while True:
        more = alive.copy()
        more[source[alive[target]]] = True
        if (more == alive).all():
            return alive
        alive = more
