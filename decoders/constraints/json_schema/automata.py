"""Deterministic automata over characters: conditions on a string, all at once.

A condition is a tree of :mod:`regular`, to be met or not; lengths are conditions too. Characters that no condition tells
apart are one symbol, so Unicode costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from . import characters, limits
from .characters import Ranges
from .regular import Cat, Chars, Or, Repeat, Rx


@dataclass(frozen=True)
class Automaton:
    """States are numbers, the first is 0.

    Attributes:
        symbols: the characters of each symbol. moves: next state of each state and symbol, -1 for none that leads to the
            end. ends: states in which the string may end. Only states on a way from the first to an end are kept; none
            at all: the empty language.
    """

    symbols: tuple[Ranges, ...]
    moves: tuple[tuple[int, ...], ...]
    ends: frozenset[int]

    @property
    def empty(self) -> bool:
        return not self.moves


def automaton(conditions: Sequence[tuple[Rx, bool]], low: int = 0, high: int | None = None) -> Automaton:
    """The strings of `low` to `high` characters in every tree marked True and in none marked False.

    Raises:
        GrammarError: more than ``limits.STATES`` states.
    """
    symbols = _partition([rx for rx, _ in conditions])
    parts = [_Part(rx, symbols) for rx, _ in conditions]
    count_cap = high + 1 if high is not None else low
    if count_cap > limits.STATES:
        limits.exceeded("STATES", limits.STATES, f"a length of {count_cap:,} together with a pattern")
    start = (tuple(part.start for part in parts), 0)
    numbers = {start: 0}
    states, moves = [start], []
    for sets, count in states:
        row = []
        for symbol in range(len(symbols)):
            after = min(count + 1, count_cap)
            reached = tuple(part.move(at, symbol) for part, at in zip(parts, sets, strict=True))
            lost = any(not at and good for at, (_, good) in zip(reached, conditions, strict=True))
            if lost or (high is not None and after > high):
                row.append(-1)
                continue
            if (reached, after) not in numbers:
                numbers[reached, after] = len(states)
                states.append((reached, after))
                if len(states) > limits.STATES:
                    limits.exceeded("STATES", limits.STATES, "the automaton of a string's pattern and length")
            row.append(numbers[reached, after])
        moves.append(row)
    ends = set()
    for number, (sets, count) in enumerate(states):
        judged = zip(parts, sets, conditions, strict=True)
        if count >= low and all(part.final(at) is good for part, at, (_, good) in judged):
            ends.add(number)
    return minimal(symbols, moves, ends)


def _partition(trees: Sequence[Rx]) -> tuple[Ranges, ...]:
    """Characters that all sets in `trees` agree on, together."""
    sets = sorted({chars for rx in trees for chars in _sets(rx)})
    borders = sorted(
        {0} | {edge for chars in sets for low, high in chars for edge in (low, high + 1)} - {characters.LAST + 1}
    )
    events: dict[int, list[int]] = {}  # border -> sets that are entered or left there
    for index, chars in enumerate(sets):
        for low, high in chars:
            events.setdefault(low, []).append(index)
            events.setdefault(high + 1, []).append(index)
    groups: dict[frozenset[int], list[tuple[int, int]]] = {}
    members: set[int] = set()
    for low, after in zip(borders, [*borders[1:], characters.LAST + 1], strict=True):
        members.symmetric_difference_update(events.get(low, ()))
        groups.setdefault(frozenset(members), []).append((low, after - 1))
    return tuple(characters.ranges(pairs) for pairs in groups.values())


def _sets(rx: Rx) -> set[Ranges]:
    match rx:
        case Chars(ranges):
            return {ranges}
        case Cat(parts) | Or(parts):
            return set().union(*map(_sets, parts))
        case Repeat(part, _, _):
            return _sets(part)


class _Part:
    """One condition: Thompson's automaton, made deterministic as far as it is walked."""

    def __init__(self, rx: Rx, symbols: Sequence[Ranges]) -> None:
        self.symbols = symbols
        self.silent: list[list[int]] = []
        self.steps: list[tuple[frozenset[int], int] | None] = []
        self.of_set: dict[Ranges, frozenset[int]] = {}
        self.known: dict[tuple[frozenset[int], int], frozenset[int]] = {}
        first, self.last = self.build(rx)
        self.start = self.close([first])

    def node(self) -> int:
        if len(self.silent) > 4 * limits.COPIES:
            limits.exceeded("COPIES", limits.COPIES, "a pattern, its repetitions written out,", "pattern")
        self.silent.append([])
        self.steps.append(None)
        return len(self.silent) - 1

    def build(self, rx: Rx) -> tuple[int, int]:
        """First and last node of `rx`."""
        first, last = self.node(), self.node()
        match rx:
            case Chars(ranges):
                if ranges not in self.of_set:
                    inside = (i for i, chars in enumerate(self.symbols) if characters.contains(ranges, chars[0][0]))
                    self.of_set[ranges] = frozenset(inside)
                self.steps[first] = (self.of_set[ranges], last)
            case Cat(parts):
                self.chain(first, parts, last)
            case Or(parts):
                for part in parts:
                    self.chain(first, [part], last)
            case Repeat(part, low, high):
                at = self.chain(first, [part] * low, None)
                if high is None:
                    self.silent[at].append(last)
                    begin, end = self.build(part)
                    self.silent[at].append(begin)
                    self.silent[end] += [begin, last]
                else:
                    for _ in range(high - low):
                        self.silent[at].append(last)
                        at = self.chain(at, [part], None)
                    self.silent[at].append(last)
        return first, last

    def chain(self, at: int, parts: Sequence[Rx], last: int | None) -> int:
        for part in parts:
            begin, end = self.build(part)
            self.silent[at].append(begin)
            at = end
        if last is not None:
            self.silent[at].append(last)
        return at

    def close(self, nodes: list[int]) -> frozenset[int]:
        """`nodes` and what is reached without a character; only those that matter later."""
        seen = set(nodes)
        while nodes:
            for node in self.silent[nodes.pop()]:
                if node not in seen:
                    seen.add(node)
                    nodes.append(node)
        return frozenset(node for node in seen if self.steps[node] is not None or node == self.last)

    def move(self, state: frozenset[int], symbol: int) -> frozenset[int]:
        if (state, symbol) not in self.known:
            found = [step[1] for node in state if (step := self.steps[node]) is not None and symbol in step[0]]
            self.known[state, symbol] = self.close(found)
        return self.known[state, symbol]

    def final(self, state: frozenset[int]) -> bool:
        return self.last in state


def minimal(symbols: tuple[Ranges, ...], moves: list[list[int]], ends: set[int]) -> Automaton:
    """Without states that lead nowhere, states that agree on everything merged (Moore 1956)."""
    back: dict[int, list[int]] = {}
    for state, row in enumerate(moves):
        for to in row:
            back.setdefault(to, []).append(state)
    alive, walk = set(ends), list(ends)
    while walk:
        for state in back.get(walk.pop(), ()):
            if state not in alive:
                alive.add(state)
                walk.append(state)
    if 0 not in alive:
        return Automaton(symbols, (), frozenset())
    group = [-1 if state not in alive else int(state in ends) for state in range(len(moves))]
    count = 0
    while True:
        keys: dict[tuple[int, ...], int] = {}
        fresh = list(group)
        for state in range(len(moves)):
            if group[state] >= 0:
                key = (group[state], *(group[to] if to >= 0 else -1 for to in moves[state]))
                fresh[state] = keys.setdefault(key, len(keys))
        group = fresh
        if len(keys) == count:
            break
        count = len(keys)
    example = {group[state]: state for state in reversed(range(len(moves))) if group[state] >= 0}
    # State 0 is met first, hence group 0.
    rows = tuple(tuple(group[to] if to >= 0 else -1 for to in moves[example[g]]) for g in range(count))
    return Automaton(symbols, rows, frozenset(group[state] for state in ends))


@lru_cache(maxsize=1024)
def _reader(rx: Rx) -> _Part:
    return _Part(rx, _partition([rx]))


def matches(rx: Rx, text: str) -> bool:
    """Whether `text` as a whole is of `rx`; in linear time."""
    part = _reader(rx)
    state = part.start
    for character in text:
        point = ord(character)
        symbol = next(i for i, chars in enumerate(part.symbols) if characters.contains(chars, point))
        state = part.move(state, symbol)
    return part.final(state)
