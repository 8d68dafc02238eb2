"""Bounds on size and on time. A pattern that exceeds one is refused with the limit's name.

Time is CPU time of the thread, so that what is refused does not depend on the load of the machine. Loops whose length is not
known in advance call :func:`check`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
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


def exceeded(
    limit: str, most: int, what: str, keyword: str | None = None, path: str | None = None, module: str = __name__
) -> NoReturn:
    """Refuses: `what` is above `limit` of `module`. path: ``$`` for what the schema as a whole is too large for.

    Raises:
        GrammarError: always.
    """
    remedy = "" if path == "$" else ", or strict=False, which validates it afterwards"
    raise GrammarError(
        f"{what} exceeds the limit {limit} = {most:,} of {module}: simplify the schema{remedy}", keyword, path
    )


#: Default seconds for compiling one grammar.
SECONDS = 2.0
_COMPILING = (
    "the setting constraint_seconds: simplify it, raise the setting or, for schemas, take strict=False, which validates it "
    "afterwards"
)


class _Deadline:
    """The deadline of some work, no later than that of the work around it."""

    def __init__(self, seconds: float, limit: str, outer: _Deadline | None) -> None:
        ends = time.thread_time() + seconds
        self.ends: float = ends if outer is None else min(ends, outer.ends)
        self.seconds: float = seconds if outer is None else outer.seconds
        self.limit: str = limit if outer is None else outer.limit
        self.outer = outer


_current: ContextVar[_Deadline | None] = ContextVar("deadline", default=None)


@contextmanager
def deadline(seconds: float | None = None, limit: str = _COMPILING) -> Iterator[None]:
    """Bounds the work inside to `seconds`, and to what an outer deadline leaves.

    Args:
        seconds: None: :data:`SECONDS`, unless there is an outer deadline.
        limit: what messages say of the bound.
    """
    outer = _current.get()
    if seconds is None and outer is not None:
        yield
        return
    token = _current.set(_Deadline(SECONDS if seconds is None else seconds, limit, outer))
    try:
        yield
    finally:
        _current.reset(token)


def left() -> float:
    """Seconds that are left; infinite without a deadline."""
    current = _current.get()
    return float("inf") if current is None else current.ends - time.thread_time()


def spend(seconds: float) -> None:
    """Counts time that was spent elsewhere, in another process."""
    current = _current.get()
    while current is not None:
        current.ends -= seconds
        current = current.outer


def check(what: str, keyword: str | None = None) -> None:
    """Refuses to go on with `what` if time is up.

    Raises:
        GrammarError: it is.
    """
    current = _current.get()
    if current is not None and time.thread_time() > current.ends:
        raise GrammarError(f"{what} takes longer than {current.seconds:g} s, {current.limit}", keyword)
