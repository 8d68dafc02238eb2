"""Deterministic automata over characters: conditions on a string, all at once.

A condition is a regular tree, to be met or not; lengths are conditions too. interegular's ``crawl`` walks the
product of all, bounded by what it is told to follow, and its ``FSM`` holds what is found. Trees are walked as sets of nodes
here, since an FSM of one condition may be exponentially larger than the product, and interegular's ``star`` and
``isdisjoint`` (0.3.3) are wrong where an FSM comes back to its first state; states are merged here, since its ``reduce`` may
take exponential time.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, TypeAlias

from . import limits
from .deadline import check
from .equivalence import refined
from .symbols import Symbols
from .tree import Cat, Chars, Or, Pattern, Repeat, irregular

if TYPE_CHECKING:
    from interegular.fsm import FSM

#: Nodes that each condition's automaton may be at, and the characters read, as far as they matter.
_State: TypeAlias = tuple[tuple[frozenset[int], ...], int]
#: Nodes in the sets that one condition's automaton remembers while strings are matched.
_REMEMBERED = 50_000
_WHAT = "the automaton of a string's pattern and length"


def automaton(conditions: Sequence[tuple[Pattern, bool]], low: int = 0, high: int | None = None) -> FSM:
    """The strings of `low` to `high` characters in every tree marked True and in none marked False, as :func:`minimal` has it.

    Its alphabet are ranges of code points.

    Raises:
        GrammarError: it is above one of the limits ``STATES``, ``MOVES`` and ``MOVE_NODES``.
    """
    from interegular.fsm import OblivionError, crawl

    most = high + 1 if high is not None else low  # longer strings are all the same
    if most > limits.STATES:
        limits.exceeded("STATES", limits.STATES, f"a length of {most:,} together with a pattern")
    check(_WHAT)
    symbols = Symbols([tree for tree, _ in conditions])
    parts = [_ConditionAutomaton(tree, symbols) for tree, _ in conditions]
    states: list[_State] = []
    numbers: dict[_State, int] = {}
    visited = 0  # nodes

    def number(state: _State) -> int:
        nonlocal visited
        if state not in numbers:
            numbers[state] = len(states)
            states.append(state)
            visited += symbols.count * sum(map(len, state[0]))
            check(_WHAT)
            for limit, bound, size in (
                ("STATES", limits.STATES, len(states)),
                ("MOVES", limits.MOVES, len(states) * symbols.count),
                ("MOVE_NODES", limits.MOVE_NODES, visited),
            ):
                if size > bound:
                    limits.exceeded(limit, bound, _WHAT)
        return numbers[state]

    def follow(index: int, symbol: int) -> int:
        sets, count = states[index]
        reached = tuple(part.move(nodes, symbol) for part, nodes in zip(parts, sets, strict=True))
        fails = any(not nodes and wanted for nodes, (_, wanted) in zip(reached, conditions, strict=True))
        if fails or count == high:
            raise OblivionError
        return number((reached, min(count + 1, most)))

    def final(index: int) -> bool:
        sets, count = states[index]
        pairs = zip(parts, sets, conditions, strict=True)
        return count >= low and all(part.final(nodes) is wanted for part, nodes, (_, wanted) in pairs)

    return minimal(
        crawl(
            symbols.alphabet,
            number((tuple(part.start for part in parts), 0)),
            final,
            follow,
        )
    )


def minimal(machine: FSM) -> FSM:
    """`machine` without states that lead nowhere, those that mean the same merged; its first state, and the result's, is 0.

    Args:
        machine: every state of which is reached.
    """
    from interegular.fsm import FSM

    symbols, count = machine.alphabet.by_transition, len(machine.states)
    dead = count
    rows = [tuple([machine.map[state].get(symbol, dead) for symbol in symbols]) for state in range(count)]
    rows.append((dead,) * len(symbols))
    predecessors: list[list[int]] = [[] for _ in rows]
    for state, row in enumerate(rows):
        for after in {*row}:
            predecessors[after].append(state)
    blocks = refined([int(state in machine.finals) for state in range(count + 1)], range(count + 1), rows, predecessors)
    names: dict[int, int] = {}
    moves: dict[int, dict[int, int]] = {0: {}}
    alive = [state for state in range(count) if blocks[state] != blocks[dead]]
    for state in alive:
        names.setdefault(blocks[state], len(names))
    for state in alive:
        moved = ((symbol, blocks[to]) for symbol, to in machine.map[state].items())
        moves[names[blocks[state]]] = {symbol: names[to] for symbol, to in moved if to in names}
    finals = {names[blocks[state]] for state in machine.finals}
    return FSM(machine.alphabet, set(moves), 0, finals, moves)


class _ConditionAutomaton:
    """Thompson's automaton of one condition, made deterministic on the fly."""

    def __init__(self, tree: Pattern, symbols: Symbols) -> None:
        self.symbols = symbols
        self.silent: list[list[int]] = []
        self.steps: list[tuple[frozenset[int], int] | None] = []
        self.known: dict[tuple[frozenset[int], int], frozenset[int]] = {}
        self.remembered = 0
        first, self.last = self.build(tree)
        self.start = self.close([first])

    def node(self) -> int:
        if len(self.silent) > 4 * limits.COPIES:
            limits.exceeded("COPIES", limits.COPIES, "a pattern, its repetitions written out,", "pattern")
        self.silent.append([])
        self.steps.append(None)
        return len(self.silent) - 1

    def build(self, tree: Pattern) -> tuple[int, int]:
        """First and last node of `tree`."""
        first, last = self.node(), self.node()
        match tree:
            case Chars(ranges):
                self.steps[first] = (self.symbols.of[ranges], last)
            case Cat(parts):
                self.chain(first, parts, last)
            case Or(parts):
                for part in parts:
                    self.chain(first, [part], last)
            case Repeat(part, low, high):
                node = self.chain(first, [part] * low, None)
                if high is None:
                    self.silent[node].append(last)
                    begin, end = self.build(part)
                    self.silent[node].append(begin)
                    self.silent[end] += [begin, last]
                else:
                    for _ in range(high - low):
                        self.silent[node].append(last)
                        node = self.chain(node, [part], None)
                    self.silent[node].append(last)
            case _:
                raise irregular(tree)
        return first, last

    def chain(self, node: int, parts: Sequence[Pattern], last: int | None) -> int:
        for part in parts:
            begin, end = self.build(part)
            self.silent[node].append(begin)
            node = end
        if last is not None:
            self.silent[node].append(last)
        return node

    def close(self, nodes: list[int]) -> frozenset[int]:
        """The closure of `nodes` under empty moves, reduced to nodes that read a character or are final."""
        seen = set(nodes)
        while nodes:
            for node in self.silent[nodes.pop()]:
                if node not in seen:
                    seen.add(node)
                    nodes.append(node)
        return frozenset(node for node in seen if self.steps[node] is not None or node == self.last)

    def move(self, state: frozenset[int], symbol: int) -> frozenset[int]:
        if (state, symbol) not in self.known:
            if self.remembered > _REMEMBERED:  # there may be a new state after every character
                self.known, self.remembered = {}, 0
            reached = [step[1] for node in state if (step := self.steps[node]) is not None and symbol in step[0]]
            self.known[state, symbol] = self.close(reached)
            self.remembered += 1 + len(self.known[state, symbol])
        return self.known[state, symbol]

    def final(self, state: frozenset[int]) -> bool:
        return self.last in state


@lru_cache(maxsize=128)
def _part(tree: Pattern) -> _ConditionAutomaton:
    return _ConditionAutomaton(tree, Symbols([tree]))


def matches(tree: Pattern, text: str) -> bool:
    """Whether `tree` matches the whole of `text`, in time linear in its length."""
    part = _part(tree)
    state = part.start
    for character in text:
        check("matching a pattern", "pattern")
        state = part.move(state, part.symbols.symbol(character))
    return part.final(state)
