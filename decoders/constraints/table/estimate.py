"""How many states an expression will need, reckoned from its counted repetitions before an automaton is made."""

from __future__ import annotations

import re

from ...errors import GrammarError
from ..patterns.reader import read
from ..patterns.rust import RUST
from ..patterns.tree import Cat, Chars, Class, Or, Pattern, Repeat

#: A count from which on the expression is looked at.
_COUNT = re.compile(r"\{(?:\d*,)?\d{2,}")
#: States that any character of UTF-8 takes: behind each kind of first byte, and of two or three more.
_ANY = 8
#: Characters of two bytes or more take two at least.
_BEYOND_ASCII = 2
_ALMOST_ANY = re.compile(r"\[\^|\\[pPdDwWsS]")


def least_states(regex: str) -> int:
    """About how many states the minimal automaton of `regex` has at least; 0 where nothing is counted.

    Each copy of a counted part has states of its own, unless the expression is ambiguous (``(a{500})?a*``): an estimate, to
    choose a backend by.
    """
    if not _COUNT.search(regex):
        return 0
    try:
        return _states(read(regex, RUST))
    except (GrammarError, RecursionError):  # whoever compiles it says why
        return 0


def _states(pattern: Pattern) -> int:
    """States behind the first one."""
    match pattern:
        case Chars(ranges):
            return (
                _ANY if ranges and ranges[-1][1] > 0xFFFF else _BEYOND_ASCII if ranges and ranges[-1][1] > 0x7F else 1
            )
        case Class(text):
            return _ANY if _ALMOST_ANY.search(text) else 1 if text.isascii() else _BEYOND_ASCII
        case Cat(parts):
            return sum(map(_states, parts))
        case Or(parts):  # they may share their ends; single characters and longer texts share the very last state only
            characters = max((_states(part) for part in parts if isinstance(part, (Chars, Class))), default=1)
            longer = max((_states(part) for part in parts if not isinstance(part, (Chars, Class))), default=1)
            return characters + longer - 1
        case Repeat(part, low, high):
            return _states(part) * max(1, low if high is None else high)
        case _:
            return 0
