"""Expressions of Rust's ``regex`` that become a part of a longer one: what would mean something else there."""

from __future__ import annotations

import re

from ..errors import GrammarError
from .reader import Reader

_OPTION_X = re.compile(r"\(\?[a-zA-Z-]*x")
_CLASS_BEGIN = re.compile(r"\[\^?\]?")


def check_part(regex: str) -> None:
    """Whether `regex` can stand between other parts, all of a text. Whether it is well formed is for Rust to say.

    Raises:
        GrammarError: a parenthesis closes what `regex` has not opened, or there is an anchor or the option ``x``.
    """
    _Rust(regex).read_parts()


def unread(regex: str, reason: str) -> str:
    """The message that automata do not express something of `regex`."""
    return f"{shown(regex)} is not a regular expression that is read here: {reason}"


def shown(regex: str) -> str:
    """`regex` for a message."""
    return repr(regex) if len(regex) <= 80 else f"{regex[:60]!r}… ({len(regex)} characters)"


class _Rust(Reader[None]):
    """Classes may be nested; flags, and everything else that is inside of parentheses, is passed over."""

    depth = 0

    def escape(self, begin: int) -> None:
        letter = self.pattern[begin + 1 : begin + 2]
        if letter and letter in "AzZbB<>":
            what = "anchors" if letter in "AzZ" else "word boundaries"
            raise GrammarError(unread(self.pattern, f"no automaton has {what}, \\{letter} at {begin}"))
        self.place += 2

    def character_class(self, begin: int) -> None:
        depth = 0
        while self.place < len(self.pattern):
            if opened := _CLASS_BEGIN.match(self.pattern, self.place):
                depth += 1
                self.place = opened.end()  # a bracket that comes first stands for itself
                continue
            depth -= self.peek("]")
            self.place += 2 if self.peek("\\") else 1
            if not depth:
                return

    def anchor(self, begin: int, end: bool) -> None:
        reason = f"{self.pattern[begin]} at {begin}: no anchors, the whole text must match anyway"
        raise GrammarError(unread(self.pattern, reason))

    def group(self, begin: int) -> None:
        self.depth += 1

    def look(self, mark: str, begin: int) -> None:
        self.depth += 1

    def special(self, begin: int) -> None:
        if option := _OPTION_X.match(self.pattern, begin):
            raise GrammarError(unread(self.pattern, f"{option[0]!r} at {begin}: the option x"))
        self.place += 2
        self.depth += 1

    def close(self, begin: int) -> None:
        self.depth -= 1
        if self.depth < 0:
            raise GrammarError(f"{shown(self.pattern)} is no regular expression: unopened group, ')' at {begin}")
