"""The tokens that each state of a byte automaton allows, as packed masks without duplicates."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..patterns.limits import check
from .determinise import distinct
from .lexicon import Ints, Lexicon, TokenPaths
from .strings import StringStates


@dataclass(frozen=True)
class Row:
    """A packed mask. If few of its words are nonzero, only the nonzero words are stored.

    Attributes:
        places: ``[k]``, ascending indices of the nonzero words; None: `words` are all words of the mask.
        words: ``[k]`` int32, the words at `places`.
    """

    places: NDArray[np.unsignedinteger[Any]] | None
    words: NDArray[np.int32]

    @staticmethod
    def of(mask: NDArray[np.int32]) -> Row:
        """The row of a mask ``[W]``."""
        places = np.flatnonzero(mask)
        if 2 * len(places) > len(mask):  # a sparse form would save little
            return Row(None, mask.copy())
        return Row(places.astype(np.uint16 if len(mask) <= 1 << 16 else np.uint32), mask[places])

    @property
    def key(self) -> tuple[bytes, bytes]:
        """The key by which masks are compared: two masks have the same key only if they are equal."""
        return b"" if self.places is None else self.places.tobytes(), self.words.tobytes()

    @property
    def nbytes(self) -> int:
        return self.words.nbytes + (0 if self.places is None else self.places.nbytes)

    def write(self, out: NDArray[np.int32]) -> None:
        """Writes the mask to `out`, ``[W]``, which must be all zeros."""
        out[slice(None) if self.places is None else self.places] = self.words

    def allows(self, token: int) -> bool:
        """Whether the mask allows `token`."""
        place = token >> 5
        if self.places is not None:
            position = int(self.places.searchsorted(place))
            if position == len(self.places) or int(self.places[position]) != place:
                return False
            place = position
        return bool(int(self.words[place]) >> (token & 31) & 1)


class MaskRows:
    """Masks ``[R, W]``.

    Attributes:
        width: ``W``.
        each: the ``R`` masks.
    """

    def __init__(self, width: int, rows: Iterable[Row]) -> None:
        self.width = width
        self.each = tuple(rows)

    def __len__(self) -> int:
        return len(self.each)

    @property
    def nbytes(self) -> int:
        """Memory of all masks, in bytes."""
        return sum(row.nbytes for row in self.each)

    def fill(self, number: int, out: Tensor) -> None:
        """Writes one of the masks to `out`, ``[W]`` int32."""
        self.each[number].write(out.zero_().numpy())

    def all(self) -> Tensor:
        """All masks, ``[R, W]`` int32, a new tensor."""
        masks = np.zeros((len(self.each), self.width), np.int32)
        for row, mask in zip(self.each, masks, strict=True):
            row.write(mask)
        return torch.from_numpy(masks)


#: Depth in bytes of the first partition of states (:class:`EquivalentStates`). Deeper partitions have twice the depth of the last.
FIRST = 4


@dataclass(frozen=True)
class EquivalentStates:
    """A partition of the states of an automaton ``[S, C]``: each sequence of up to `depth` bytes leads from all states of a part
    to the same kind of state: the dead state, a state inside strings of one class (:class:`.strings.StringStates`), or another state.

    Inside a string the legal texts depend only on the state's class. So in all states of a part the same tokens are legal, apart from
    tokens with more than `depth` bytes outside of strings.

    Attributes:
        strings: ``[S]`` int64, class of each state inside strings, -1 for other states.
        part: ``[S]`` int64, number of each state's part.
        final: whether the partition is the same at every greater depth.
    """

    transitions: Ints
    strings: NDArray[np.int64]
    part: NDArray[np.int64]
    depth: int = 0
    final: bool = False

    @staticmethod
    def of(transitions: Ints, strings: NDArray[np.int64]) -> EquivalentStates:
        """The partition at depth 0: the dead state, a part for each class of states inside strings, and a part for all others."""
        part = np.where(strings < 0, strings.max() + 2, strings + 1)
        part[0] = 0
        return EquivalentStates(transitions, strings, part)

    def finer(self) -> EquivalentStates:
        """The partition at twice the depth (:data:`FIRST` after depth 0), or the final partition if it is reached earlier."""
        others = np.flatnonzero(self.strings < 0)[1:]
        transitions, part, known = self.transitions[others], self.part, self.strings.max() + 2
        depth = 2 * self.depth or FIRST
        for _ in range(depth - self.depth):
            before, part = part, part.copy()
            part[others] = known + distinct(before.astype(np.int32)[transitions])[0]
            if part.max() == before.max():
                return EquivalentStates(self.transitions, self.strings, part, depth, final=True)
        return EquivalentStates(self.transitions, self.strings, part, depth)


#: Greatest number of tokens that are read at once, from several states; each needs 16 bytes, and more while it is read.
TOKENS = 1 << 21
#: Number of states in a chunk. The masks of a chunk are packed together; unpacked they take a byte per token.
CHUNK = 32


@dataclass(frozen=True)
class StateMasks:
    """Masks of all states.

    Attributes:
        rows: the ``R`` distinct masks; row 0, for the dead state and unreachable states, allows all tokens.
        of: ``[S]`` int64, row of each state.
        alive: ``[S]`` bool, whether some tokens lead from each state to the end of a text.
        stops: the row that allows stop tokens only.
    """

    rows: MaskRows
    of: NDArray[np.int64]
    alive: NDArray[np.bool_]
    stops: int


def masks(
    transitions: Ints, byte_class: NDArray[np.int64], accepting: NDArray[np.bool_], lexicon: Lexicon
) -> StateMasks:
    """The masks of an automaton ``[S, C]`` with columns `byte_class` ``[256]``; only state 0 is a dead end."""
    automaton = _Automaton(transitions, byte_class, accepting, lexicon)
    used: NDArray[np.bool_] = np.any(transitions > 0, axis=0)
    return automaton.by_classes() if lexicon.single[used[byte_class]].all() else automaton.by_walking()


class _Distinct:
    """Collects distinct masks; the first mask allows all tokens."""

    def __init__(self, lexicon: Lexicon) -> None:
        self.rows = [Row.of(np.full(lexicon.words, -1, np.int32))]
        self._words = lexicon.words
        self._known: dict[tuple[bytes, bytes], int] = {}
        self._ends = lexicon.mask(lexicon.stops)

    def add(self, mask: NDArray[np.int32], ending: bool) -> int:
        """Adds `mask`, plus the stop tokens if `ending`, unless it is known; returns its index."""
        row = Row.of(mask | self._ends if ending else mask)
        mask_number = self._known.setdefault(row.key, len(self.rows))
        if mask_number == len(self.rows):
            self.rows.append(row)
        return mask_number

    def of_states(self, of: NDArray[np.int64], alive: NDArray[np.bool_]) -> StateMasks:
        """The collected masks, with the row of each state in `of`, and the row of the stop tokens."""
        stops = self.add(np.zeros(self._words, np.int32), True)
        return StateMasks(MaskRows(self._words, self.rows), of, alive, stops)


@dataclass(frozen=True)
class _Automaton:
    """The arguments of :func:`masks`: an automaton, and the lexicon with the tokens that it reads."""

    transitions: Ints
    byte_class: NDArray[np.int64]
    accepting: NDArray[np.bool_]
    lexicon: Lexicon

    def by_classes(self) -> StateMasks:
        """The masks if every byte is a token. Then tokens lead from every state but the dead state to the end of a text, so every token
        that does not lead to the dead state is legal.

        The states inside strings fall into few classes of equal masks (:class:`.strings.StringStates`), and each mask is composed once.
        In other states few tokens are legal; the automaton reads these tokens once per group of states that allow the same tokens.
        """
        states = len(self.transitions)
        strings = StringStates.of(self.transitions, self.byte_class, self.lexicon)
        text_masks: list[NDArray[np.int32]] = strings.masks()
        mask_number = strings.class_of.copy()  # index of each state's mask in `text_masks`, which lack stop tokens
        inside = mask_number >= 0
        equivalent = EquivalentStates.of(self.transitions, strings.class_of)
        unresolved = np.flatnonzero(~inside)[1:]
        bytes_read = np.zeros(states, np.int64)
        while len(unresolved):
            equivalent = equivalent.finer()
            # States that have a mask come first, so that they represent their parts of the partition.
            unresolved = unresolved[np.argsort(mask_number[unresolved] < 0, kind="stable")]
            _, first, same = np.unique(equivalent.part[unresolved], return_index=True, return_inverse=True)
            representatives = unresolved[first]
            unwalked = representatives[mask_number[representatives] < 0]
            if len(unwalked):
                for part, read, row in self._walk_states(unwalked, strings):
                    bytes_read[part], mask_number[part] = read, np.arange(len(text_masks), len(text_masks) + len(part))
                    text_masks += [*row]
            shared = equivalent.final | (bytes_read[representatives] <= equivalent.depth)
            mask_number[unresolved[shared[same]]] = mask_number[representatives[same]][shared[same]]
            unresolved = unresolved[~shared[same]]
        rows = _Distinct(self.lexicon)
        of = np.zeros(states, np.int64)
        keys = 2 * mask_number + self.accepting
        for key in np.unique(keys[1:]).tolist():
            of[keys == key] = rows.add(text_masks[key >> 1], bool(key & 1))
        of[0] = 0
        return rows.of_states(of, np.arange(states) > 0)

    def _walk_states(
        self, states: NDArray[np.int64], strings: StringStates
    ) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int32]]]:
        """Yields batches: ``n`` states; for each, the most bytes that a token reads outside of strings; and their masks ``[n, W]``."""
        # Upper bounds: tokens are counted if their first byte is legal.
        most = np.cumsum((self.transitions[states][:, self.byte_class] > 0) @ self.lexicon.beginning)
        for part in np.split(states, np.flatnonzero(np.diff(most // TOKENS)) + 1):
            paths = self._walk(part, strings.class_of >= 0)
            single = paths.token >= 0
            place, reached = strings.below(paths.node[~single], strings.class_of[paths.state[~single]])
            row = np.concatenate([paths.row[single], paths.row[~single][place]])
            token = np.concatenate([paths.token[single], reached])
            for begin in range(0, len(part), CHUNK):
                in_chunk = (row >= begin) & (row < begin + CHUNK)
                chunk = part[begin : begin + CHUNK]
                allowed = self.lexicon.packed(len(chunk), row[in_chunk] - begin, token[in_chunk])
                yield chunk, paths.deep[begin : begin + CHUNK], allowed

    def by_walking(self) -> StateMasks:
        """The masks if some bytes are not tokens: a token is legal only if further tokens can lead from it to the end of a text."""
        alive = self._alive()
        starts = np.flatnonzero(alive)
        rows = _Distinct(self.lexicon)
        of = np.zeros(len(self.transitions), np.int64)
        for begin in range(0, len(starts), CHUNK):
            part = starts[begin : begin + CHUNK]
            paths = self._walk(part)
            alive_ends = alive[paths.state]
            allowed = self.lexicon.packed(len(part), paths.row[alive_ends], paths.token[alive_ends])
            for state, row in zip(part.tolist(), allowed, strict=True):
                of[state] = rows.add(row, bool(self.accepting[state]))
        return rows.of_states(of, alive)

    def _alive(self) -> NDArray[np.bool_]:
        """``[S]``: the states from which tokens lead to the end of a text."""
        edges, states = [], len(self.transitions)
        for begin in range(1, states, CHUNK):
            starts = np.arange(begin, min(begin + CHUNK, states), dtype=np.int32)
            paths = self._walk(starts)
            edges.append(np.unique(starts[paths.row].astype(np.int64) * states + paths.state))
        source, target = np.divmod(np.unique(np.concatenate(edges)), states)
        alive = self.accepting.copy()
        while True:
            reached = alive.copy()
            reached[source[alive[target]]] = True
            if (reached == alive).all():
                return alive
            alive = reached

    def _walk(self, starts: NDArray[np.integer[Any]], strings: NDArray[np.bool_] | None = None) -> TokenPaths:
        check("computing the masks of a table")
        return self.lexicon.trie.walk(self.transitions, self.byte_class, starts, strings)
