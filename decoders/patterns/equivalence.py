"""States of a deterministic automaton that mean the same, of one over bytes as of one over characters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def refined(
    blocks: Sequence[int], states: Iterable[int], successors: Sequence[Sequence[int]], before: Sequence[Sequence[int]]
) -> list[int]:
    """The coarsest partition, finer than `blocks`, whose blocks' members lead to the same blocks.

    From the states before those that have just been told apart: as a bounded text is told apart character by character, rounds
    over all states would be quadratic. A block's largest part keeps its name: what leads there needs no second look.

    Args:
        blocks: block of each state, -1 for those that do not count.
        states: those that do.
        successors: what each state leads to, symbol by symbol, the same symbols within a block.
        before: what leads to each state.
    """
    blocks = [*blocks]
    size = [0] * (max(blocks, default=-1) + 1)
    dirty = {*states}
    for state in dirty:
        size[blocks[state]] += 1
    # Where each block's members lead, but for those about to be looked at.
    usual: list[tuple[int, ...]] = [()] * len(size)
    named = blocks.__getitem__
    while dirty:
        touched: dict[int, list[int]] = {}
        for state in dirty:
            touched.setdefault(blocks[state], []).append(state)
        moved: list[tuple[int, int]] = []
        for block, members in touched.items():
            parts: dict[tuple[int, ...], list[int]] = {}
            for state in members:
                parts.setdefault(tuple(map(named, successors[state])), []).append(state)
            if len(members) == size[block]:
                usual[block] = max(parts, key=lambda targets: len(parts[targets]))
            parts.pop(usual[block], None)
            for targets, part in parts.items():
                name = len(size)
                usual.append(targets)
                size.append(len(part))
                size[block] -= len(part)
                moved += [(state, name) for state in part]
        for state, name in moved:
            blocks[state] = name
        dirty = {earlier for state, _ in moved for earlier in before[state]}
    return blocks
