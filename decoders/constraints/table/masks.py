"""Which tokens each state of a byte automaton allows, as packed masks, equal ones once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .lexicon import Lexicon
from .plain import room
from .trie import Ints

#: States whose tokens are collected at a time: a byte per state and token.
CHUNK = 32


@dataclass(frozen=True)
class Masks:
    """Masks of all states.

    Attributes:
        rows: ``[R, W]`` int32; the first is ones, for states that no text comes to, the dead one among them.
        of: ``[S]`` int64, row of each state.
        alive: ``[S]`` bool: tokens lead from here to the end of a text.
        stops: the row of the stop tokens alone.
    """

    rows: NDArray[np.int32]
    of: NDArray[np.int64]
    alive: NDArray[np.bool_]
    stops: int


def masks(after: Ints, kind: NDArray[np.int64], accepting: NDArray[np.bool_], lexicon: Lexicon) -> Masks:
    """The masks of a trimmed automaton ``[S, C]`` with columns `kind` ``[256]``."""
    used: NDArray[np.bool_] = np.any(after > 0, axis=0)
    if lexicon.single[used[kind]].all():
        alive = np.arange(len(after)) > 0  # byte by byte, every state comes to an end
        return _sliced(after, kind, accepting, alive, lexicon)
    alive = _alive(after, kind, accepting, lexicon)
    return _walked(after, kind, accepting, alive, lexicon)


def _sliced(
    after: Ints, kind: NDArray[np.int64], accepting: NDArray[np.bool_], alive: NDArray[np.bool_], lexicon: Lexicon
) -> Masks:
    """Masks where every byte is a token, so that all tokens that do not die are legal.

    Where the room for plain characters is exact (in strings), a mask is put together: the plain tokens by their length,
    and those whose rest is legal after their plain characters. Elsewhere few tokens are legal, and all are walked, once
    for all states that no token tells apart.
    """
    space = room(after, kind, lexicon.longest)
    exact = np.flatnonzero(space.exact & alive)
    legal, sets = _rests(after, kind, space.reached(exact), lexicon)
    texts = Texts(space.least.tolist(), space.next.tolist(), legal, sets, lexicon)
    rows = _Rows(lexicon)
    of = np.zeros(len(after), np.int64)
    inside: dict[tuple[bool, tuple[Run, ...]], int] = {}
    for state in exact.tolist():
        here = bool(accepting[state]), texts.runs(state, lexicon.longest)
        if here not in inside:
            row = lexicon.plain[space.least[state]] | lexicon.mask(texts.others(here[1]))
            inside[here] = rows.add(row, here[0])
        of[state] = inside[here]
    made: dict[tuple[bool, bytes, tuple[tuple[int, tuple[Run, ...]], ...]], int] = {}
    pieces: dict[tuple[int, tuple[Run, ...]], NDArray[np.int64]] = {}
    others = np.flatnonzero(~space.exact & alive)
    for begin in range(0, len(others), CHUNK):
        part = others[begin : begin + CHUNK]
        place, node, at, token = lexicon.trie.walk(after, kind, part, space.exact)
        order = np.lexsort((node, place))
        cuts = np.searchsorted(place[order], np.arange(len(part) + 1))
        for index, start in enumerate(part.tolist()):
            mine = order[cuts[index] : cuts[index + 1]]
            single = token[mine] >= 0
            direct, halted = token[mine[single]], mine[~single]
            halts = tuple(map(texts.below, node[halted].tolist(), at[halted].tolist()))
            key = bool(accepting[start]), direct.tobytes(), halts
            if key not in made:
                pieces |= {halt: texts.tokens(*halt) for halt in halts if halt not in pieces}
                tokens = np.concatenate([direct.astype(np.int64), *(pieces[halt] for halt in halts)])
                made[key] = rows.add(lexicon.mask(tokens), key[0])
            of[start] = made[key]
    stops = rows.add(np.zeros(lexicon.words, np.int32), True)
    return Masks(rows.all(), of, alive, stops)


def _rests(
    after: Ints, kind: NDArray[np.int64], states: NDArray[np.int64], lexicon: Lexicon
) -> tuple[dict[int, int], list[NDArray[np.int32]]]:
    """Which set of rests is legal in each state, and the sets."""
    known: dict[bytes, int] = {b"": 0}
    sets = [np.zeros(0, np.int32)]
    legal = dict.fromkeys(states.tolist(), 0)
    for begin in range(0, len(states), 16 * CHUNK):
        part = states[begin : begin + 16 * CHUNK]
        row, _, _, rest = lexicon.ends.walk(after, kind, part)
        order = np.lexsort((rest, row))
        row, rest = row[order], rest[order]
        cuts = np.searchsorted(row, np.arange(len(part) + 1))
        for place, state in enumerate(part.tolist()):
            some = rest[cuts[place] : cuts[place + 1]]
            legal[state] = known.setdefault(some.tobytes(), len(sets))
            if legal[state] == len(sets):
                sets.append(some)
    return legal, sets


#: Which rests are legal after how many plain characters: (number of the set, from, to), `to` included.
Run = tuple[int, int, int]


@dataclass(frozen=True)
class Texts:
    """What is legal where plain characters are, as far as there is room.

    Attributes:
        least, next: room of each state, and the state after a plain character. legal: number of the set of rests that
        may come next, in states whose room is exact and those behind them. sets: the sets.
    """

    least: list[int]
    next: list[int]
    legal: dict[int, int]
    sets: list[NDArray[np.int32]]
    lexicon: Lexicon

    def runs(self, state: int, longest: int) -> tuple[Run, ...]:
        """The sets of rests along up to `longest` plain characters."""
        left = min(self.least[state], longest)
        runs: list[Run] = []
        begin = length = 0
        while length < left:
            following = self.next[state]
            if following == state:
                break
            if self.legal[following] != self.legal[state]:
                runs.append((self.legal[state], begin, length))
                begin = length + 1
            state, length = following, length + 1
        return (*runs, (self.legal[state], begin, left))

    def others(self, runs: tuple[Run, ...]) -> NDArray[np.int64]:
        """The tokens, not those of plain characters alone, whose rest is legal after the plain characters they have."""
        order, begins = self.lexicon.by_rest
        found = []
        for chosen, begin, end in runs:
            some = self.sets[chosen]
            count = begins[some + 1] - begins[some]
            offset = np.cumsum(count) - count
            place = order[np.arange(count.sum()) + np.repeat(begins[some] - offset, count)]
            length = self.lexicon.length[place]
            found.append(self.lexicon.tokens[place[(length >= begin) & (length <= end)]])
        return np.concatenate(found)

    def below(self, node: int, state: int) -> tuple[int, tuple[Run, ...]]:
        """A node of the trie where `state` is, and its runs as long as tokens go on below."""
        trie = self.lexicon.trie
        longest = int(self.lexicon.length[trie.low[node] : trie.high[node]].max()) - int(trie.characters[node])
        return node, self.runs(state, longest)

    def tokens(self, node: int, runs: tuple[Run, ...]) -> NDArray[np.int64]:
        """The legal tokens below a node of the trie."""
        trie = self.lexicon.trie
        part = slice(trie.low[node], trie.high[node])
        length = self.lexicon.length[part] - trie.characters[node]
        rest = self.lexicon.rest[part]
        good = (rest == 0) & (length <= runs[-1][2])
        for chosen, begin, end in runs:
            allowed = np.zeros(len(self.lexicon.rests), np.bool_)
            allowed[self.sets[chosen]] = True
            good |= allowed[rest] & (length >= begin) & (length <= end)
        return self.lexicon.tokens[part][good]


def _walked(
    after: Ints, kind: NDArray[np.int64], accepting: NDArray[np.bool_], alive: NDArray[np.bool_], lexicon: Lexicon
) -> Masks:
    """Masks where some bytes have no token of their own: token by token, and only those that lead to living states."""
    starts = np.flatnonzero(alive)
    rows = _Rows(lexicon)
    of = np.zeros(len(after), np.int64)
    for part, allowed in _collected(after, kind, starts, alive, lexicon):
        for state, row in zip(starts[part].tolist(), allowed, strict=True):
            of[state] = rows.add(row, bool(accepting[state]))
    stops = rows.add(np.zeros(lexicon.words, np.int32), True)
    return Masks(rows.all(), of, alive, stops)


class _Rows:
    """Masks, each once; the first is ones."""

    def __init__(self, lexicon: Lexicon) -> None:
        self._rows = [np.full(lexicon.words, -1, np.int32)]
        self._known: dict[bytes, int] = {}
        self._ends = lexicon.mask(lexicon.stops)

    def add(self, row: NDArray[np.int32], ending: bool) -> int:
        row = row | self._ends if ending else row
        number = self._known.setdefault(row.tobytes(), len(self._rows))
        if number == len(self._rows):
            self._rows.append(row)
        return number

    def all(self) -> NDArray[np.int32]:
        return np.stack(self._rows)


def _collected(
    after: Ints, kind: NDArray[np.int64], starts: NDArray[np.int64], alive: NDArray[np.bool_], lexicon: Lexicon
) -> Iterator[tuple[slice, NDArray[np.int32]]]:
    """Masks of the tokens that lead from `starts` to living states, some of the starts at a time."""
    for begin in range(0, len(starts), CHUNK):
        part = slice(begin, min(begin + CHUNK, len(starts)))
        row, _, state, token = lexicon.trie.walk(after, kind, starts[part])
        good = alive[state]
        allowed = np.zeros((part.stop - begin, 32 * lexicon.words), np.uint8)
        allowed[row[good], token[good]] = 1
        yield part, lexicon.pack(allowed)


def _alive(after: Ints, kind: NDArray[np.int64], accepting: NDArray[np.bool_], lexicon: Lexicon) -> NDArray[np.bool_]:
    """``[S]``: from which states tokens lead to the end of a text; the others may have no legal token at all."""
    edges = []
    for begin in range(1, len(after), CHUNK):
        starts = np.arange(begin, min(begin + CHUNK, len(after)), dtype=np.int32)
        row, _, state, _ = lexicon.trie.walk(after, kind, starts)
        edges.append(np.unique(starts[row].astype(np.int64) * len(after) + state))
    source, target = np.divmod(np.unique(np.concatenate(edges)), len(after))
    alive = accepting.copy()
    while True:
        more = alive.copy()
        more[source[alive[target]]] = True
        if (more == alive).all():
            return alive
        alive = more
