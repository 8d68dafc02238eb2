"""One reader of regular expressions for all dialects: it finds the parts of a pattern, and calls a method for each.

A dialect is a subclass. Its methods say what a part means, and refuse what the dialect does not read; its class attributes
say where the notations differ. Nothing here recurs: groups may be nested as deep as the dialect allows.
"""

from __future__ import annotations

import re
from abc import ABC
from dataclasses import dataclass
from typing import ClassVar, Generic, NoReturn, TypeVar

Set = TypeVar("Set")

_COUNT = re.compile(r"\{([0-9]*)(,?)([0-9]*)\}")
_MARKS = {"*": (0, None), "+": (1, None), "?": (0, 1)}
_BRACED = re.compile(r"\{([^{}]*)\}")
_HEXADECIMAL = re.compile(r"[0-9A-Fa-f]+")
_LOOKS = ("(?<=", "(?<!", "(?=", "(?!")
#: Digits of a code point without braces.
CODE_DIGITS = {"x": 2, "u": 4, "U": 8}


@dataclass(frozen=True)
class Quantifier:
    """How often something is repeated.

    Attributes:
        begin: its place in the pattern.
        text: as it is written, without the mark of laziness.
        low: at least so often.
        high: at most so often; None for any number.
        lazy: whether as few as possible come first.
    """

    begin: int
    text: str
    low: int
    high: int | None
    lazy: bool


class Reader(ABC, Generic[Set]):
    """A dialect reading one pattern. ``Set`` is what it makes of a set of characters.

    Attributes:
        pattern: what is read.
        place: where it is read next.
    """

    #: Whether ``{,n}`` is a quantifier.
    open_low: ClassVar[bool] = True
    #: Most digits of a bound.
    bound_digits: ClassVar[int] = 8
    #: Whether a bracket closes a class right behind its beginning; otherwise it stands for itself there.
    empty_classes: ClassVar[bool] = False
    #: What a hyphen in a class stands for itself before; "" is the end of the pattern.
    no_range_before: ClassVar[tuple[str, ...]] = ("", "]", "-")
    #: Letters of escapes whose code point may stand in braces.
    braced_codes: ClassVar[str] = "xuU"
    #: The beginning of a group with a name.
    named_group: ClassVar[re.Pattern[str]] = re.compile(r"\(\?P?<([A-Za-z_]\w*)>")

    def __init__(self, pattern: str) -> None:
        self.pattern, self.place = pattern, 0

    # What a dialect says of the parts of a pattern, in the order of the text.

    def literal(self, character: str, begin: int) -> None:
        """A character that stands for itself."""

    def dot(self, begin: int) -> None:
        """``.``"""

    def escape(self, begin: int) -> None:
        """A backslash at `begin`, outside of classes; nothing of it has been read."""
        self.place += 2

    def charset(self, begin: int, negated: bool, members: list[Set]) -> None:
        """A class in brackets."""

    def anchor(self, begin: int, end: bool) -> None:
        """``^``, or ``$`` if `end`."""

    def group(self, begin: int) -> None:
        """A group is opened, with or without a name."""

    def look(self, mark: str, begin: int) -> None:
        """Look-around is opened by `mark`."""

    def special(self, begin: int) -> None:
        """``(?`` and what is none of the above; nothing of it has been read."""
        self.place += 2

    def close(self, begin: int) -> None:
        """A group is closed."""

    def alternative(self, begin: int) -> None:
        """``|``"""

    def repeatable(self, text: str, begin: int) -> bool:
        """Whether the quantifier `text` has something to repeat; otherwise its first character stands for itself."""
        return True

    def quantify(self, quantifier: Quantifier) -> None:
        """The last part is repeated."""

    def too_often(self, text: str, begin: int) -> None:
        """The quantifier `text` has a bound of too many digits."""

    def bounds_reversed(self, text: str, begin: int) -> None:
        """The quantifier `text` has its larger bound first."""

    # Of classes, for dialects that do not override :meth:`character_class`.

    def single(self) -> Set:
        """A character, or an escape, in a class. Not at the end of the pattern."""
        raise NotImplementedError

    def span(self, low: Set, high: Set, begin: int) -> Set:
        """From one to the other."""
        raise NotImplementedError

    def unclosed_class(self, begin: int) -> NoReturn:
        """A class is never closed."""
        raise NotImplementedError

    # What finds them.

    def peek(self, text: str) -> bool:
        """Whether `text` comes next."""
        return self.pattern.startswith(text, self.place)

    def take(self, text: str) -> bool:
        """Reads `text`, if it comes next."""
        if self.peek(text):
            self.place += len(text)
            return True
        return False

    def read_parts(self) -> None:
        """Reads the pattern to its end."""
        while self.place < len(self.pattern):
            begin, character = self.place, self.pattern[self.place]
            if character == "\\":
                self.escape(begin)
            elif character == "[":
                self.character_class(begin)
            elif character == "(":
                self._open(begin)
            elif character in "*+?{":
                self._quantifier(begin)
            else:
                self.place += 1
                if character == ")":
                    self.close(begin)
                elif character == "|":
                    self.alternative(begin)
                elif character in "^$":
                    self.anchor(begin, end=character == "$")
                elif character == ".":
                    self.dot(begin)
                else:
                    self.literal(character, begin)

    def character_class(self, begin: int) -> None:
        """A class in brackets at `begin`."""
        self.place = begin + 1
        negated = self.take("^")
        first = self.place
        members: list[Set] = []
        while not (self.peek("]") and (self.place > first or self.empty_classes)):
            members.append(self.member(begin))
        self.place += 1
        self.charset(begin, negated, members)

    def member(self, class_begin: int) -> Set:
        """A character or a range in the class that begins at `class_begin`."""
        begin = self.place
        low = self._single(class_begin)
        if not self.peek("-") or self.pattern[self.place + 1 : self.place + 2] in self.no_range_before:
            return low
        self.place += 1
        return self.span(low, self._single(class_begin), begin)

    def _single(self, class_begin: int) -> Set:
        if self.place >= len(self.pattern):
            self.unclosed_class(class_begin)
        return self.single()

    def _open(self, begin: int) -> None:
        if not self.peek("(?"):
            self.place += 1
            self.group(begin)
        elif self.take("(?:"):
            self.group(begin)
        elif (mark := next((mark for mark in _LOOKS if self.take(mark)), None)) is not None:
            self.look(mark, begin)
        elif named := self.named_group.match(self.pattern, begin):
            self.place = named.end()
            self.group(begin)
        else:
            self.special(begin)

    def _quantifier(self, begin: int) -> None:
        text = self.pattern[begin]
        bounds: tuple[int, int | None] | None = _MARKS.get(text)
        if text == "{":
            count = _COUNT.match(self.pattern, begin)
            if count is not None and (count[1] or (self.open_low and count[3])):
                text = count[0]
        if text == "{" or not self.repeatable(text, begin):
            self.place += 1
            self.literal(text[0], begin)
            return
        self.place += len(text)
        if bounds is None:
            low, comma, high = text[1:-1].partition(",")
            if max(len(low), len(high)) > self.bound_digits:
                self.too_often(text, begin)
                return
            bounds = int(low or 0), int(high) if high else None if comma else int(low)
            if bounds[1] is not None and bounds[0] > bounds[1]:
                self.bounds_reversed(text, begin)
        self.quantify(Quantifier(begin, text, *bounds, lazy=self.take("?")))

    def in_braces(self) -> str | None:
        """Reads braces and what is in them, which is returned; None if none come next."""
        braces = _BRACED.match(self.pattern, self.place)
        if braces is None:
            return None
        self.place = braces.end()
        return braces[1]

    def code_point(self, letter: str) -> int | None:
        """Reads the code point of an escape behind its `letter`; None if its digits are missing."""
        digits = self.in_braces() if letter in self.braced_codes else None
        if digits is None:
            count = CODE_DIGITS[letter]
            digits = self.pattern[self.place : self.place + count]
            self.place += count
            if len(digits) < count:
                return None
        return int(digits, 16) if _HEXADECIMAL.fullmatch(digits) else None
