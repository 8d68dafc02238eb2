"""Bounds on size and on time. A pattern that exceeds a bound raises an error that names the bound.

Time is CPU time of the thread, so that errors do not depend on the machine's load. Loops of unknown length call :func:`check`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NoReturn

from ...errors import GrammarError

#: Greatest number of characters of a pattern.
PATTERN_CHARACTERS = 20_000
#: Greatest depth of groups within groups.
NESTING = 100
#: Greatest number of states of an automaton over characters.
STATES = 3_000
#: Greatest number of moves of an automaton over characters: states times symbols (classes of characters).
MOVES = 400_000
#: Greatest number of pattern nodes visited to compute the moves of an automaton.
MOVE_NODES = 10_000_000
#: Greatest number of character sets of one pattern after its counted repetitions are expanded.
COPIES = 2_000


#: For each limit, what to write instead.
INSTEAD = {
    "PATTERN_CHARACTERS": "take classes of characters and repetitions",
    "NESTING": "move inner parts to the outside, or to definitions that are referred to",
    "STATES": "leave out the length or the pattern, or take a smaller bound on the length",
    "MOVES": "take wider classes of characters, or a shorter length",
    "MOVE_NODES": "take fewer alternatives in the pattern",
    "COPIES": "repeat with * or +, and bound the length with maxLength",
    "SCHEMA_CHARACTERS": "give the part that the text is to follow, with what it shares in $defs",
    "ALTERNATIVES": "list whole alternatives in one anyOf, and fewer of them",
    "STEPS": "nest fewer allOf, oneOf and not",
    "PLACES": "let places share a schema by $ref",
    "RULES": "let places share a schema by $ref",
    "SYMBOLS": "let places share a schema by $ref",
    "PROPERTIES": "describe similar properties by additionalProperties or patternProperties",
    "VALUES": "give a pattern that the values share",
    "COUNT": "ask for fewer",
    "STEP": "take a step with fewer digits",
}


def exceeded(
    limit: str, most: int, what: str, keyword: str | None = None, path: str | None = None, module: str = __name__
) -> NoReturn:
    """Raises the error that `what` exceeds `limit` of `module`. most: the limit's value. path: ``$`` if `what` is the whole schema.

    Raises:
        GrammarError: always.
    """
    remedy = "" if path == "$" else "; in a schema, strict=False validates it afterwards instead"
    raise GrammarError(
        f"{what} exceeds the limit {limit} = {most:,} of {module}: {INSTEAD.get(limit, 'take a smaller one')}{remedy}",
        keyword,
        path,
    )


#: Default limit of CPU seconds for compiling one grammar.
SECONDS = 2.0
_COMPILING = (
    "the setting constraint_seconds: make this part simpler, raise the setting or, for schemas, take strict=False, which validates it "
    "afterwards"
)


class _Deadline:
    """The CPU time at which the work in a :func:`deadline` context must end; no later than the deadline of an outer context."""

    def __init__(self, seconds: float, limit: str, outer: _Deadline | None) -> None:
        ends = time.thread_time() + seconds
        self.ends: float = ends if outer is None else min(ends, outer.ends)
        self.seconds: float = seconds if outer is None else outer.seconds
        self.limit: str = limit if outer is None else outer.limit
        self.outer = outer


_current: ContextVar[_Deadline | None] = ContextVar("deadline", default=None)


@contextmanager
def deadline(seconds: float | None = None, limit: str = _COMPILING) -> Iterator[None]:
    """Bounds the work inside the context to `seconds`, and to what is left of an outer deadline.

    Args:
        seconds: the bound; None means the outer deadline, or :data:`SECONDS` if there is no outer deadline.
        limit: the bound's name in error messages, and what to do about it.
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
    """Seconds left until the current deadline; infinite without a deadline."""
    current = _current.get()
    return float("inf") if current is None else current.ends - time.thread_time()


def spend(seconds: float) -> None:
    """Subtracts `seconds`, which a child process has spent, from the time left until the current deadline and all outer ones."""
    current = _current.get()
    while current is not None:
        current.ends -= seconds
        current = current.outer


#: The beginning of a child process's program: ``bounded(seconds)`` silently ends the process after `seconds` of processor time.
BOUNDED = """
import time
try:
    from _signal import ITIMER_PROF, setitimer
    def bounded(seconds): setitimer(ITIMER_PROF, seconds)
except ImportError:
    def bounded(seconds): pass
"""
#: The parent kills the child after ``PATIENCE`` times the child's seconds, because on a busy machine a child waits for a processor.
PATIENCE = 30


def check(what: str, keyword: str | None = None) -> None:
    """Checks the current deadline. Raises GrammarError: the time for `what` is up."""
    current = _current.get()
    if current is not None and time.thread_time() > current.ends:
        raise GrammarError(f"{what} takes longer than {current.seconds:g} s, {current.limit}", keyword)
