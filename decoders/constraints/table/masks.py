"""Which tokens each state of a byte automaton allows, as packed masks, equal ones once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .lexicon import SHORT, Lexicon
from .plain import room
from .trie import Ints, Trie

#: States whose tokens are collected at a time: a byte per state and token.
CHUNK = 32


@dataclass(frozen=True)
class Masks:
    """Masks of all states.

    Attributes:
        rows: ``[R, W]`` int32; the first is ones, for states that no text comes to, the dead one among them.
        of: ``[S]`` int64, row of each state.
        alive: ``[S]`` bool: tokens lead from here to the end of a text.
    """

    rows: NDArray[np.int32]
    of: NDArray[np.int64]
    alive: NDArray[np.bool_]


def masks(after: Ints, kind: NDArray[np.int64], accepting: NDArray[np.bool_], lexicon: Lexicon) -> Masks:
    """The masks of a trimmed automaton ``[S, C]`` with columns `kind` ``[256]``."""
    if lexicon.single[after.any(0)[kind]].all():
        alive = np.arange(len(after)) > 0  # byte by byte, every state comes to an end
        return _sliced(after, kind, accepting, alive, lexicon)
    alive = _alive(after, kind, accepting, lexicon)
    return _walked(after, kind, accepting, alive, lexicon)


def _sliced(
    after: Ints, kind: NDArray[np.int64], accepting: NDArray[np.bool_], alive: NDArray[np.bool_], lexicon: Lexicon
) -> Masks:
    """Masks where every byte is a token, so that all tokens that do not die are legal.

    A mask is put together from three parts: plain tokens by their number of characters, ready-made; short tokens,
    walked once for all states that as many bytes cannot tell apart; long tokens, which are few. Where the room for plain
    characters is exact, only the other tokens are walked.
    """
    space = room(after, kind, lexicon.longest)
    group = 2 * _alike(after, SHORT) + space.exact
    _, one, member = np.unique(group[1:], return_index=True, return_inverse=True)
    one, member = one + 1, np.r_[0, member]
    short = np.empty((len(one), lexicon.words), np.int32)
    for every in (True, False):
        chosen = np.flatnonzero(space.exact[one] != every)
        for part, allowed in _collected(lexicon.tries[True, every], after, kind, one[chosen], alive, lexicon):
            short[chosen[part]] = allowed
    long = _long(after, kind, space.exact, lexicon)
    ends = _packed(lexicon.stops, lexicon)
    rows = _Rows(lexicon)
    of = np.zeros(len(after), np.int64)
    made: dict[tuple[int, int, bytes, bool], int] = {}
    keys = zip(member.tolist(), space.least.tolist(), accepting.tolist(), strict=True)
    for state, (walk, length, ending) in enumerate(keys):
        if not state:
            continue
        key = walk, length, long.get(state, b""), ending
        if key not in made:
            row = short[walk] | lexicon.plain[length]
            if key[2]:
                row |= _packed(np.frombuffer(key[2], np.int32), lexicon)
            made[key] = rows.add(row | ends if ending else row)
        of[state] = made[key]
    return Masks(rows.all(), of, alive)


def _walked(
    after: Ints, kind: NDArray[np.int64], accepting: NDArray[np.bool_], alive: NDArray[np.bool_], lexicon: Lexicon
) -> Masks:
    """Masks where some bytes have no token of their own: token by token, and only those that lead to living states."""
    starts = np.flatnonzero(alive)
    ends = _packed(lexicon.stops, lexicon)
    rows = _Rows(lexicon)
    of = np.zeros(len(after), np.int64)
    both = [_collected(lexicon.tries[short, True], after, kind, starts, alive, lexicon) for short in (True, False)]
    for (part, short), (_, long) in zip(*both, strict=True):
        for state, row in zip(starts[part].tolist(), short | long, strict=True):
            of[state] = rows.add(row | ends if accepting[state] else row)
    return Masks(rows.all(), of, alive)


class _Rows:
    """Masks, each once; the first is ones."""

    def __init__(self, lexicon: Lexicon) -> None:
        self._rows = [np.full(lexicon.words, -1, np.int32)]
        self._known: dict[bytes, int] = {}

    def add(self, row: NDArray[np.int32]) -> int:
        number = self._known.setdefault(row.tobytes(), len(self._rows))
        if number == len(self._rows):
            self._rows.append(row)
        return number

    def all(self) -> NDArray[np.int32]:
        return np.stack(self._rows)


def _packed(tokens: NDArray[np.int32] | tuple[int, ...], lexicon: Lexicon) -> NDArray[np.int32]:
    """``[W]``: the mask of some tokens."""
    allowed = np.zeros((1, 32 * lexicon.words), np.uint8)
    allowed[0, list(tokens)] = 1
    return lexicon.pack(allowed)[0]


def _collected(
    trie: Trie, after: Ints, kind: NDArray[np.int64], starts: NDArray[np.int64], alive: NDArray[np.bool_],
    lexicon: Lexicon,
) -> Iterator[tuple[slice, NDArray[np.int32]]]:  # fmt: skip
    """Masks of the trie's tokens that lead from `starts` to living states, some of the starts at a time."""
    for begin in range(0, len(starts), CHUNK):
        part = slice(begin, min(begin + CHUNK, len(starts)))
        row, token, state = trie.walk(after, kind, starts[part])
        good = alive[state]
        allowed = np.zeros((part.stop - begin, 32 * lexicon.words), np.uint8)
        allowed[row[good], token[good]] = 1
        yield part, lexicon.pack(allowed)


def _long(
    after: Ints, kind: NDArray[np.int64], exact: NDArray[np.bool_], lexicon: Lexicon
) -> dict[int, bytes]:
    """The long tokens of each state that has some, without the plain ones where these are known."""
    found: dict[int, bytes] = {}
    for every in (True, False):
        starts = np.flatnonzero(exact != every)
        starts = starts[starts > 0]
        for begin in range(0, len(starts), 16 * CHUNK):
            part = starts[begin : begin + 16 * CHUNK]
            row, token, _ = lexicon.tries[False, every].walk(after, kind, part)
            order = np.lexsort((token, row))
            row, token = row[order], token[order]
            cuts = np.flatnonzero(np.r_[True, row[1:] != row[:-1]]) if len(row) else row
            for cut, tokens in zip(cuts, np.split(token, cuts[1:]), strict=False):
                found[int(part[row[cut]])] = tokens.tobytes()
    return found


def _alike(after: Ints, steps: int) -> NDArray[np.int64]:
    """``[S]``: the same number for states that no `steps` bytes tell apart, as far as dying is concerned."""
    weights = np.random.default_rng(0).integers(1, 1 << 63, after.shape[1], dtype=np.uint64) | np.uint64(1)
    label = (np.arange(len(after)) > 0).astype(np.int64)
    count = 2
    for _ in range(steps):
        scrambled = (label + 1).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        scrambled ^= scrambled >> np.uint64(29)
        key = (scrambled[after] * weights).sum(1, dtype=np.uint64)
        label = np.unique(key, return_inverse=True)[1].astype(np.int64)
        if int(label.max()) + 1 == count:
            break
        count = int(label.max()) + 1
    return label


def _alive(
    after: Ints, kind: NDArray[np.int64], accepting: NDArray[np.bool_], lexicon: Lexicon
) -> NDArray[np.bool_]:
    """``[S]``: from which states tokens lead to the end of a text; the others may have no legal token at all."""
    edges = []
    for begin in range(1, len(after), CHUNK):
        starts = np.arange(begin, min(begin + CHUNK, len(after)), dtype=np.int32)
        for short in (True, False):
            row, _, state = lexicon.tries[short, True].walk(after, kind, starts)
            edges.append(np.unique(starts[row].astype(np.int64) * len(after) + state))
    source, target = np.divmod(np.unique(np.concatenate(edges)), len(after))
    alive = accepting.copy()
    while True:
        more = alive.copy()
        more[source[alive[target]]] = True
        if (more == alive).all():
            return alive
        alive = more
