"""Bounds on time and memory. A pattern that exceeds one is refused with the limit's name; nothing is left half done."""

from __future__ import annotations

from typing import NoReturn

from ...errors import GrammarError

#: Characters of a pattern.
PATTERN_CHARACTERS = 20_000
#: Groups within groups.
NESTING = 100
#: States of an automaton over characters.
STATES = 3_000
#: Moves of such an automaton: states times symbols, characters that its patterns tell apart.
MOVES = 400_000
#: Nodes of patterns that are looked at for these moves.
MOVE_NODES = 10_000_000
#: Copies that the counted repetitions of one pattern amount to.
COPIES = 2_000


def exceeded(limit: str, most: int, what: str, keyword: str | None = None) -> NoReturn:
    """Refuses: `what` is above `limit`.

    Raises:
        GrammarError: always.
    """
    raise GrammarError(
        f"{what} exceeds the limit {limit} = {most:,} of {__name__}: simplify the schema, or strict=False, which validates "
        "it afterwards",
        keyword,
    )
