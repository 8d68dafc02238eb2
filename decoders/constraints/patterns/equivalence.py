"""Equivalent states of a deterministic automaton, by refinement of partitions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .deadline import check


def refined(
    blocks: Sequence[int],
    states: Iterable[int],
    successors: Sequence[Sequence[int]],
    predecessors: Sequence[Sequence[int]],
) -> list[int]:
    """The coarsest partition, finer than `blocks`, whose blocks' members lead to the same blocks.

    From the states before those that have just been told apart: as a bounded text is told apart character by character, rounds
    over all states would be quadratic. A block's largest part keeps its name: what leads there needs no second look.

    Args:
        blocks: block of each state, -1 for those that do not count.
        states: those that do.
        successors: what each state leads to, symbol by symbol, the same symbols within a block.
        predecessors: what leads to each state.
    """
    blocks = [*blocks]
    size = [0] * (max(blocks, default=-1) + 1)
    changed = {*states}
    for state in changed:
        size[blocks[state]] += 1
    # Where each block's members lead, but for those about to be looked at.
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
