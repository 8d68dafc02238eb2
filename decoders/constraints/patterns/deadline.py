"""A bound on the time of work whose size nobody can tell in advance: what loops asks while it works whether time is up.

Time is that of the thread on the processor, so that what is refused does not depend on what else the machine does.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from ...errors import GrammarError

#: Seconds for compiling one grammar, where nobody says otherwise.
SECONDS = 2.0
_COMPILING = (
    "the setting constraint_seconds: simplify it, raise the setting or, for schemas, take strict=False, which validates it "
    "afterwards"
)


class _Deadline:
    """The time of some work, within that of other work."""

    def __init__(self, seconds: float, limit: str, outer: _Deadline | None) -> None:
        ends = time.thread_time() + seconds
        self.ends: float = ends if outer is None else min(ends, outer.ends)
        self.seconds: float = seconds if outer is None else outer.seconds
        self.limit: str = limit if outer is None else outer.limit
        self.outer = outer


_current: ContextVar[_Deadline | None] = ContextVar("deadline", default=None)


@contextmanager
def deadline(seconds: float | None = None, limit: str = _COMPILING) -> Iterator[None]:
    """Bounds what is done inside to `seconds`, and to what is left where it is bounded already.

    Args:
        seconds: None: :data:`SECONDS`, if it is not bounded yet.
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
    """Seconds that are left; infinite where nothing bounds them."""
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
