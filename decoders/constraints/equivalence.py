"""States of a deterministic automaton that mean the same, of one over bytes as of one over characters."""

from __future__ import annotations

from collections.abc import Sequence


def classes(states: Sequence[int], rows: Sequence[tuple[int, ...]], accepting: Sequence[bool]) -> dict[int, int]:
    """Class of each of `states`: two have the same if the same texts end from both.

    By refinement of the partition of states that accept and that do not, from the states before those that have just been
    told apart: as a bounded text is told apart character by character, rounds over all states would be quadratic. A
    class's largest part keeps its name.

    Args:
        rows: state after each symbol, of every state; one of `states` again. accepting: whether a text may end, of every state.
    """
    blocks = {state: int(accepting[state]) for state in states}
    before: dict[int, list[int]] = {state: [] for state in states}
    for state in states:
        for after in {*rows[state]}:
            before[after].append(state)
    #: Blocks that follow each block's members, but for those about to be looked at.
    ways: dict[int, tuple[int, ...]] = {}
    size = {1: sum(blocks.values())}
    size[0] = len(states) - size[1]
    dirty = {*states}
    while dirty:
        touched: dict[int, list[int]] = {}
        for state in dirty:
            touched.setdefault(blocks[state], []).append(state)
        moved: list[tuple[int, int]] = []
        for block, members in touched.items():
            parts: dict[tuple[int, ...], list[int]] = {}
            for state in members:
                parts.setdefault(tuple([blocks[after] for after in rows[state]]), []).append(state)
            if len(members) == size[block]:
                ways[block] = max(parts, key=lambda way: len(parts[way]))
            parts.pop(ways[block], None)
            for way, part in parts.items():
                name = len(size)
                ways[name], size[name] = way, len(part)
                size[block] -= len(part)
                moved += [(state, name) for state in part]
        blocks.update(moved)
        dirty = {earlier for state, _ in moved for earlier in before[state]}
    return blocks
