"""Moves the contents of places (rows of a session): copies prefixes of kept texts to new prompts, and puts rows into a new order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from .prefix_cache import KeptText, PrefixIndex
from .session import Session


def take_over(
    session: Session, prompts: Mapping[int, KeptText], held: Sequence[tuple[Session, int, KeptText]]
) -> list[int]:
    """Copies to each prompt's row the keys and values of the longest prefix that the prompt shares with a text in `held`.

    Args:
        prompts: the prompts by row of `session`.
        held: the texts to copy from: a session, the index of a row in that session, and the text in the row.

    Returns:
        per prompt, the number of leading tokens whose keys and values are in its row now.
    """
    index = PrefixIndex([text for *_, text in held])
    reused, moves = [], []
    for row, prompt in prompts.items():
        in_place = session.texts[row].shared_with(prompt)
        longest, place = index.longest(prompt)
        reused.append(min(max(longest, in_place), len(prompt.tokens) - 1))
        if reused[-1] > in_place:
            holder, source_row, _ = held[place]
            moves.append((row, holder.stored.buffers, source_row, reused[-1]))
    own, written = session.stored.buffers, {row for row, *_ in moves}
    # If a source row will be overwritten itself, its contents are saved first.
    sources = [
        (source.of_row(place, count), 0) if source is own and place in written else (source, place)
        for _, source, place, count in moves
    ]
    for row in written:  # before copying: if a copy fails midway, these rows have no reusable text
        session.drop(row)
    for (row, _, _, count), (source, place) in zip(moves, sources, strict=True):
        own.copy_row(row, source, place, count)
    return reused


def exchange(session: Session, one: int, other: int, count: int, other_count: int) -> None:
    """Swaps the contents of two places: `count` slots of place `one`, and `other_count` slots of place `other`."""
    if one == other:
        return
    buffers, tokens = session.stored.buffers, session.stored.tokens
    if count < other_count:
        one, other, count, other_count = other, one, other_count, count
    aside = (buffers.of_row(other, other_count), tokens[other, :other_count].clone()) if other_count else None
    buffers.copy_row(other, buffers, one, count)
    tokens[other, :count] = tokens[one, :count]
    if aside is not None:
        buffers.copy_row(one, aside[0], 0, other_count)
        tokens[one, :other_count] = aside[1]
    session.texts[one], session.texts[other] = session.texts[other], session.texts[one]
    session.used[one], session.used[other] = session.used[other], session.used[one]


def reorder(
    session: Session, sources: Sequence[int], counts: Sequence[int], beside: Mapping[int, int] = MappingProxyType({})
) -> dict[int, int]:
    """Moves the first `counts[i]` slots of place `sources[i]` to place ``i``; a source of -1 moves nothing.

    beside: number of used slots of other places, by place. The contents of these places are kept, but may move.

    Returns:
        for each place in use, the place where its contents are now.
    """
    in_use = {**beside, **{source: count for source, count in zip(sources, counts, strict=True) if source >= 0}}
    where = {place: place for place in in_use}
    for place, source in enumerate(sources):
        if source < 0 or where[source] == place:
            continue
        present = next((s for s, p in where.items() if p == place), None)
        kept = in_use[present] if present is not None else len(session.texts[place].tokens)
        if present is not None:
            where[present] = where[source]
        exchange(session, place, where[source], kept, in_use[source])
        where[source] = place
    return where
