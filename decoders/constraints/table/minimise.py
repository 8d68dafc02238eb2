"""A byte automaton made small: states that lead nowhere go, those that mean the same become one."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .determinise import Bytes

#: Cycles of more states than this are not compared with other cycles; the automaton is then not minimal, but right.
LARGE_CYCLE = 128


def minimise(automaton: Bytes) -> Bytes:
    """The same language with as few states as can be told; those not reached, or from which no text ends, are left out.

    Backwards through the strongly connected components: a state outside cycles equals another if both accept or both do
    not, and the same classes follow (Revuz 1992: linear where rounds of refinement would need one per character of the
    longest text). States in a cycle are told apart by refinement, and cycles by how they look from each of their states.
    """
    narrow, _ = columns(automaton.next)
    rows = [tuple(row) for row in narrow.tolist()]
    accepting = automaton.accepting.tolist()
    classes = [0] * len(rows)
    known: dict[tuple[object, ...], int] = {(False, *(0,) * narrow.shape[1]): 0}
    count = 1
    for component in _components(rows, automaton.start):
        state = component[0]
        if len(component) == 1 and state not in rows[state]:
            signature = (accepting[state], *(classes[after] for after in rows[state]))
            classes[state] = known.setdefault(signature, count)
            count = max(count, classes[state] + 1)
            continue
        members = set(component)
        outside = {after for state in component for after in rows[state]} - members
        if not any(accepting[state] for state in component) and not any(classes[after] for after in outside):
            continue  # round and round without an end: dead
        blocks = _refined(component, rows, accepting, classes)
        one_of = {block: state for state, block in blocks.items()}
        names: dict[int, int] = {}
        for block, state in one_of.items():
            small = len(one_of) <= LARGE_CYCLE
            look = _look(state, blocks, rows, accepting, classes) if small else ("large", component[0], block)
            names[block] = known.setdefault(look, count)
            count = max(count, names[block] + 1)
        for state in component:
            classes[state] = names[blocks[state]]
        for state in component:  # a state before the cycle may look like one of it
            known.setdefault((accepting[state], *(classes[after] for after in rows[state])), classes[state])
    number = np.array(classes, np.int32)
    one = np.zeros(count, np.int64)
    one[number] = np.arange(len(number))
    one[0] = 0
    return Bytes(number[automaton.next[one]], automaton.accepting[one], int(number[automaton.start]))


def columns(after: NDArray[np.int32]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """``[S, C]`` with each column of ``[S, 256]`` once, and the column of each byte."""
    seen: dict[bytes, int] = {}
    turned = np.ascontiguousarray(after.T)
    kind = np.array([seen.setdefault(row.tobytes(), len(seen)) for row in turned])
    first = np.unique(kind, return_index=True)[1]
    return np.ascontiguousarray(turned[first].T), kind


def _refined(
    component: list[int], rows: list[tuple[int, ...]], accepting: list[bool], classes: list[int]
) -> dict[int, int]:
    """Block of each state of a cycle: the coarsest partition that bytes cannot tell apart.

    Each round looks at the states before those that changed their block; a block's largest part keeps its name.
    """
    blocks = {state: int(accepting[state]) for state in component}
    before: dict[int, list[int]] = {state: [] for state in component}
    for state in component:
        for after in set(rows[state]):
            if after in blocks:
                before[after].append(state)
    signature: dict[int, tuple[int, ...]] = {}  # of the members of a block whose ways have not changed
    size = {1: sum(accepting[state] for state in component)}
    size[0] = len(component) - size[1]
    dirty = set(component)
    while dirty:
        moved: list[tuple[int, int]] = []
        touched: dict[int, list[int]] = {}
        for state in dirty:
            touched.setdefault(blocks[state], []).append(state)
        for block, states in touched.items():
            parts: dict[tuple[int, ...], list[int]] = {}
            for state in states:  # classes outside are negative here, blocks positive
                ways = tuple([blocks[to] if to in blocks else -1 - classes[to] for to in rows[state]])
                parts.setdefault(ways, []).append(state)
            if len(states) == size[block]:
                signature[block] = max(parts, key=lambda ways: len(parts[ways]))
            parts.pop(signature[block], None)
            for ways, members in parts.items():
                name = len(size)
                signature[name], size[name] = ways, len(members)
                size[block] -= len(members)
                moved += [(state, name) for state in members]
        blocks.update(moved)
        dirty = {earlier for state, _ in moved for earlier in before[state]}
    return blocks


def _look(
    state: int, blocks: dict[int, int], rows: list[tuple[int, ...]], accepting: list[bool], classes: list[int]
) -> tuple[object, ...]:
    """How a cycle looks from one of its states, whatever its states are called."""
    order = {blocks[state]: 0}
    todo = [state]
    seen: list[object] = ["cycle"]
    for at in todo:
        seen.append(accepting[at])
        for after in rows[at]:
            if after not in blocks:
                seen.append(-1 - classes[after])
                continue
            if blocks[after] not in order:
                order[blocks[after]] = len(order)
                todo.append(after)
            seen.append(order[blocks[after]])
    return tuple(seen)


def _components(rows: list[tuple[int, ...]], start: int) -> list[list[int]]:
    """Strongly connected components of what `start` leads to, later ones first (Tarjan 1972, without recursion)."""
    ways = [tuple(set(row)) for row in rows]
    index = [-1] * len(rows)
    low = [0] * len(rows)
    left = [False] * len(rows)  # whether a state's component is complete
    left[0] = True
    stack, found, counter = [start], list[list[int]](), 1
    index[start] = 0
    walk = [(start, iter(ways[start]))]
    while walk:
        state, rest = walk[-1]
        for after in rest:
            if left[after]:
                continue
            if index[after] < 0:
                index[after] = low[after] = counter
                counter += 1
                stack.append(after)
                walk.append((after, iter(ways[after])))
                break
            if index[after] < low[state]:
                low[state] = index[after]
        else:
            walk.pop()
            if walk and low[state] < low[walk[-1][0]]:
                low[walk[-1][0]] = low[state]
            if low[state] == index[state]:
                component = [stack.pop()]
                while component[-1] != state:
                    component.append(stack.pop())
                for member in component:
                    left[member] = True
                found.append(component)
    return found
