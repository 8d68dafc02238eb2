"""Deterministic automata over characters, which check all conditions on a string at once.

A condition is a regular tree (:mod:`.tree`) that the string must match, or must not match; lengths are conditions too. interegular's
``crawl`` builds the product automaton of all conditions as an ``FSM``, within our limits. Three parts of interegular are not
used: FSMs of single conditions, which may be exponentially larger than the product; ``star`` and ``isdisjoint``, which are wrong
(0.3.3) for an FSM that returns to its first state; and ``reduce``, which may take exponential time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, TypeAlias

from . import characters, limits
from .characters import Ranges
from .limits import check
from .tree import Cat, Chars, Or, Pattern, Repeat, irregular

if TYPE_CHECKING:
    from interegular.fsm import FSM, Alphabet


#: A state of the product: a set of nodes for each condition's automaton, and the number of characters read. Numbers
#: beyond all length limits are equivalent, so the number is capped.
_State: TypeAlias = tuple[tuple[frozenset[int], ...], int]
#: Greatest total size, in nodes, of the node sets that one condition's automaton caches while it matches strings.
_REMEMBERED = 50_000
_WHAT = "the automaton of a string's pattern and length"


def automaton(conditions: Sequence[tuple[Pattern, bool]], low: int = 0, high: int | None = None) -> FSM:
    """The :func:`minimal` automaton of strings of `low` to `high` characters that match all trees marked True and none marked False.

    Its alphabet consists of ranges of code points.

    Raises:
        GrammarError: the automaton exceeds a limit of :mod:`.limits`, or takes too long.
    """
    from interegular.fsm import OblivionError, crawl

    most = high + 1 if high is not None else low  # greater counts are equivalent
    if most > limits.STATES:
        limits.exceeded("STATES", limits.STATES, f"a length of {most:,} together with a pattern")
    check(_WHAT)
    symbols = Symbols([tree for tree, _ in conditions])
    parts = [_ConditionAutomaton(tree, symbols) for tree, _ in conditions]
    states: list[_State] = []
    numbers: dict[_State, int] = {}
    move_nodes = 0  # nodes visited to compute the moves of all states

    def number(state: _State) -> int:
        nonlocal move_nodes
        if state not in numbers:
            numbers[state] = len(states)
            states.append(state)
            move_nodes += symbols.count * sum(map(len, state[0]))
            check(_WHAT)
            for limit, bound, size in (
                ("STATES", limits.STATES, len(states)),
                ("MOVES", limits.MOVES, len(states) * symbols.count),
                ("MOVE_NODES", limits.MOVE_NODES, move_nodes),
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

    return minimal(crawl(symbols.alphabet, number((tuple(part.start for part in parts), 0)), final, follow))


def minimal(machine: FSM) -> FSM:
    """`machine` without dead ends and with equivalent states merged. State 0 is the first state of `machine` and of the result.

    Args:
        machine: an automaton without unreachable states.
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
    """Thompson's automaton of one condition. Its deterministic moves are computed on first use."""

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
        """Adds the nodes of `tree`, and returns its first and its last node."""
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
            if self.remembered > _REMEMBERED:  # the cache may grow with every character
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


def refined(
    blocks: Sequence[int],
    states: Iterable[int],
    successors: Sequence[Sequence[int]],
    predecessors: Sequence[Sequence[int]],
) -> list[int]:
    """The block of each state in the coarsest refinement of `blocks` in which all states of a block lead to the same blocks.

    Each round visits only the predecessors of states that were just split off: rounds over all states would be quadratic for texts of
    bounded length. The largest part of a block keeps the block's number, so the predecessors of this part need not be visited.

    Args:
        blocks: block of each state, -1 for states that are ignored.
        states: the states that are not ignored.
        successors: each state's successors by symbol; states of a block have the same symbols.
        predecessors: each state's predecessors.
    """
    blocks = [*blocks]
    size = [0] * (max(blocks, default=-1) + 1)
    changed = {*states}
    for state in changed:
        size[blocks[state]] += 1
    # For each block, the blocks to which its members lead, not counting members that are visited in this round.
    targets_of_block: list[tuple[int, ...]] = [()] * len(size)
    block_of = blocks.__getitem__
    while changed:
        check("an automaton")
        members_of_block: dict[int, list[int]] = {}
        for state in changed:
            members_of_block.setdefault(blocks[state], []).append(state)
        renamed: list[tuple[int, int]] = []
        for block, members in members_of_block.items():
            parts: dict[tuple[int, ...], list[int]] = {}
            for state in members:
                parts.setdefault(tuple(map(block_of, successors[state])), []).append(state)
            if len(members) == size[block]:
                targets_of_block[block] = max(parts, key=lambda targets: len(parts[targets]))
            parts.pop(targets_of_block[block], None)
            for targets, part in parts.items():
                name = len(size)
                targets_of_block.append(targets)
                size.append(len(part))
                size[block] -= len(part)
                renamed += [(state, name) for state in part]
        for state, name in renamed:
            blocks[state] = name
        changed = {earlier for state, _ in renamed for earlier in predecessors[state]}
    return blocks


class Symbols:
    """Numbered classes of characters (symbols). Each character set of the trees contains all characters of a class or none.

    Attributes:
        count: number of symbols; they are numbered from 0.
        of: for each set of characters in the trees, its symbols.
    """

    def __init__(self, trees: Sequence[Pattern]) -> None:
        sets = sorted({chars for tree in trees for chars in _sets(tree)})
        events: dict[int, list[int]] = {0: []}  # code point -> sets that begin or end there
        for index, chars in enumerate(sets):
            for low, high in chars:
                events.setdefault(low, []).append(index)
                events.setdefault(high + 1, []).append(index)
        events.pop(characters.LAST + 1, None)
        self.borders = sorted(events)
        self.owners: list[int] = []  # the symbol of the characters from each border up to the next
        numbers: dict[frozenset[int], int] = {}
        members: set[int] = set()
        for border in self.borders:
            members.symmetric_difference_update(events[border])
            self.owners.append(numbers.setdefault(frozenset(members), len(numbers)))
        self.count = len(numbers)
        inside: list[list[int]] = [[] for _ in sets]
        for members_of, symbol in numbers.items():
            for index in members_of:
                inside[index].append(symbol)
        self.of: dict[Ranges, frozenset[int]] = dict(zip(sets, map(frozenset, inside), strict=True))

    def symbol(self, character: str) -> int:
        return self.owners[bisect_right(self.borders, ord(character)) - 1]

    @property
    def alphabet(self) -> Alphabet:
        """The symbols as interegular's alphabet of ranges of characters."""
        from interegular.fsm import Alphabet  # most schemas have no automata

        afters = [*self.borders[1:], characters.LAST + 1]
        pairs = zip(self.borders, afters, self.owners, strict=True)
        return Alphabet({(low, after - 1): symbol for low, after, symbol in pairs})


def _sets(tree: Pattern) -> set[Ranges]:
    match tree:
        case Chars(ranges):
            return {ranges}
        case Cat(parts) | Or(parts):
            return set().union(*map(_sets, parts))
        case Repeat(part, _, _):
            return _sets(part)
        case _:
            raise irregular(tree)
