"""Patterns of JSON Schema (regular expressions of ECMA-262, found anywhere in the string) as trees for whole strings.

Anchors are understood where they mean "the string begins (ends) here"; look-ahead, only right at the beginning of the
pattern, where it says something about the string as a whole. Everything else outside regular languages is refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import TypeAlias

from ..errors import GrammarError
from . import characters, limits
from .characters import Ranges
from .tree import ANYTHING, EMPTY, NOTHING, Chars, Rx, cat, copies, either, nullable, repeat


@dataclass(frozen=True)
class Piece:
    """A reading of a part of a pattern: what it matches, and whether that begins or ends the string."""

    begins: bool
    rx: Rx
    ends: bool

    @property
    def whole(self) -> Rx:
        """The strings in which it is found."""
        return cat(*([] if self.begins else [ANYTHING]), self.rx, *([] if self.ends else [ANYTHING]))


@dataclass(frozen=True)
class _Ahead:
    """A look-ahead: what must (not) follow here."""

    pieces: Pieces
    positive: bool


Pieces: TypeAlias = tuple[Piece, ...]
_CONTROL = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13, "0": 0}
_CLASSES = {"d": characters.DIGIT, "w": characters.WORD, "s": characters.SPACE}


@lru_cache(maxsize=1024)
def strings(pattern: str) -> tuple[tuple[Rx, bool], ...]:
    """Strings in which `pattern` is found: those in every tree marked True and in none marked False.

    Raises:
        GrammarError: not a regular expression of ECMA-262, or one that is not a regular language here.
    """
    if len(pattern) > 20_000:
        limits.exceeded("pattern length", 20_000, "a pattern", "pattern")
    reader = _Reader(pattern)
    found = reader.read()
    if any(copies(rx) > limits.COPIES for rx, _ in found):
        limits.exceeded(
            "COPIES", limits.COPIES, f"the pattern {pattern[:60]!r}, its repetitions written out,", "pattern"
        )
    return found


class _Reader:
    def __init__(self, pattern: str) -> None:
        self.pattern, self.at, self.depth = pattern, 0, 0

    def read(self) -> tuple[tuple[Rx, bool], ...]:
        conditions: list[tuple[Rx, bool]] = []
        pieces = self.alternatives(conditions)
        if self.at < len(self.pattern):
            raise self.refuse("a ) too many")
        return ((either(*(piece.whole for piece in pieces)), True), *conditions)

    def refuse(self, why: str) -> GrammarError:
        return GrammarError(
            f"pattern {self.pattern[:80]!r}: {why} (at character {self.at}); a pattern without it, or strict=False, works",
            "pattern",
        )

    def peek(self, text: str) -> bool:
        return self.pattern.startswith(text, self.at)

    def take(self, text: str) -> bool:
        if self.peek(text):
            self.at += len(text)
            return True
        return False

    def alternatives(self, conditions: list[tuple[Rx, bool]] | None = None) -> Pieces:
        """Up to the closing bracket. `conditions`: where look-ahead at the beginning goes, None where there is none."""
        self.depth += 1
        if self.depth > limits.NESTING:
            limits.exceeded("NESTING", limits.NESTING, "groups within groups of a pattern", "pattern")
        pieces, aheads = self.sequence()
        while self.take("|"):
            more, others = self.sequence()
            pieces, aheads = (*pieces, *more), [*aheads, *others]
            if aheads:
                raise self.refuse("look-ahead beside |")
        if aheads and conditions is None:
            raise self.refuse("look-ahead inside a group")
        for ahead in aheads:
            found = either(*(Piece(True, piece.rx, piece.ends).whole for piece in ahead.pieces))
            assert conditions is not None
            conditions.append((found, ahead.positive))
        self.depth -= 1
        return _merged(pieces)

    def sequence(self) -> tuple[Pieces, list[_Ahead]]:
        pieces: Pieces = (Piece(False, EMPTY, False),)
        aheads: list[_Ahead] = []
        while self.at < len(self.pattern) and not self.peek("|") and not self.peek(")"):
            item = self.item()
            if isinstance(item, _Ahead):
                if pieces != (Piece(True, EMPTY, False),):
                    raise self.refuse("look-ahead that does not stand right after ^ at the beginning")
                aheads.append(item)
                continue
            joined = [both for a, b in product(pieces, item) if (both := _join(a, b)) is not None]
            pieces = _merged(joined)
        return pieces, aheads

    def item(self) -> Pieces | _Ahead:
        if self.take("^"):
            return (Piece(True, EMPTY, False),)
        if self.take("$"):
            return (Piece(False, EMPTY, True),)
        for text, positive in (("(?=", True), ("(?!", False)):
            if self.take(text):
                return _Ahead(self.group(), positive)
        return self.quantified(self.atom())

    def group(self) -> Pieces:
        pieces = self.alternatives()
        if not self.take(")"):
            raise self.refuse("a ( that is not closed")
        return pieces

    def atom(self) -> Pieces:
        if self.take("("):
            if self.take("?:"):
                return self.group()
            if self.take("?"):
                if not self.take("<") or self.peek("=") or self.peek("!"):
                    raise self.refuse("look-behind or a group of an unknown kind")
                end = self.pattern.find(">", self.at)
                if end < 0 or not self.pattern[self.at : end].isidentifier():
                    raise self.refuse("a group without a name")
                self.at = end + 1
            return self.group()
        if self.take("["):
            return _one(Chars(self.char_class()))
        if self.take("."):
            return _one(Chars(characters.DOT))
        if self.take("\\"):
            return _one(Chars(self.escape(in_class=False)))
        if self.pattern[self.at] in "*+?":
            raise self.refuse("nothing to repeat")
        self.at += 1
        return _one(Chars(characters.of(self.pattern[self.at - 1])))

    def quantified(self, pieces: Pieces) -> Pieces:
        bounds = self.quantifier()
        if bounds is None:
            return pieces
        low, high = bounds
        self.take("?")  # lazy or not: the same strings
        if self.at < len(self.pattern) and (self.pattern[self.at] in "*+?" or self.braces(self.at)):
            raise self.refuse("a repetition of a repetition")
        if all(not piece.begins and not piece.ends for piece in pieces):
            return _one(repeat(either(*(piece.rx for piece in pieces)), low, high))
        if (low, high) == (1, 1):
            return pieces
        if (low, high) == (0, 1):
            return _merged((*pieces, Piece(False, EMPTY, False)))
        raise self.refuse("an anchor that is repeated")

    def quantifier(self) -> tuple[int, int | None] | None:
        for text, bounds in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self.take(text):
                return bounds
        end = self.braces(self.at)
        if not end:
            return None
        low, _, high = self.pattern[self.at + 1 : end - 1].partition(",")
        bounded = (int(low), (int(high) if high else None) if "," in self.pattern[self.at : end] else int(low))
        self.at = end
        if bounded[1] is not None and bounded[1] < bounded[0]:
            raise self.refuse("a repetition whose bounds are in the wrong order")
        if max(bounded[0], bounded[1] or 0) > limits.COPIES:
            limits.exceeded("COPIES", limits.COPIES, "a counted repetition", "pattern")
        return bounded

    def braces(self, at: int) -> int:
        """End of ``{n}``, ``{n,}`` or ``{n,m}`` at `at`; 0 if there is none: a brace stands for itself then."""
        if not self.pattern.startswith("{", at):
            return 0
        end = self.pattern.find("}", at)
        low, comma, high = self.pattern[at + 1 : max(end, at)].partition(",")
        good = end > 0 and _number(low) and (not high or (bool(comma) and _number(high)))
        return end + 1 if good else 0

    def char_class(self) -> Ranges:
        negated = self.take("^")
        found: list[tuple[int, int]] = []
        while not self.take("]"):
            low = self.class_atom()
            if self.peek("-") and not self.peek("-]"):
                self.at += 1
                high = self.class_atom()
                if _single(low) and _single(high):
                    if high[0][0] < low[0][0]:
                        raise self.refuse("a range in the wrong order")
                    found.append((low[0][0], high[0][0]))
                    continue
                found += [*high, (0x2D, 0x2D)]  # [\w-.]: the hyphen stands for itself
            found += low
        chars = characters.ranges(found)
        return characters.complement(chars) if negated else chars

    def class_atom(self) -> Ranges:
        if self.at >= len(self.pattern):
            raise self.refuse("a [ that is not closed")
        if self.take("\\"):
            return self.escape(in_class=True)
        self.at += 1
        return characters.of(self.pattern[self.at - 1])

    def escape(self, in_class: bool) -> Ranges:
        if self.at >= len(self.pattern):
            raise self.refuse("a backslash at the end")
        letter = self.pattern[self.at]
        self.at += 1
        if letter.lower() in _CLASSES:
            chars = _CLASSES[letter.lower()]
            return characters.complement(chars) if letter.isupper() else chars
        if letter == "b" and in_class:
            return characters.of("\b")
        if letter == "0" and self.pattern[self.at : self.at + 1].isdigit():
            raise self.refuse("an octal escape")
        if letter in _CONTROL:
            return characters.of(chr(_CONTROL[letter]))
        if letter in "pP" and self.take("{"):
            end = self.pattern.find("}", self.at)
            name = self.pattern[self.at : max(end, self.at)]
            found = characters.category(name)
            if found is None:
                raise self.refuse(f"the property {name!r} (general categories are known)")
            self.at = end + 1
            return characters.complement(found) if letter == "P" else found
        if letter == "c" and self.pattern[self.at : self.at + 1].isalpha():
            self.at += 1
            return characters.of(chr(ord(self.pattern[self.at - 1]) % 32))
        if letter in "xu":
            return characters.of(chr(self.code_point(letter)))
        if letter.isalnum():
            raise self.refuse(f"the escape \\{letter}")
        return characters.of(letter)

    def code_point(self, letter: str) -> int:
        if letter == "u" and self.take("{"):
            end = self.pattern.find("}", self.at)
            digits, self.at = self.pattern[self.at : max(end, self.at)], end + 1
        else:
            size = 2 if letter == "x" else 4
            digits = self.pattern[self.at : self.at + size].ljust(size)
            self.at += size
        if not digits or any(c not in "0123456789abcdefABCDEF" for c in digits) or int(digits, 16) > characters.LAST:
            raise self.refuse(f"a \\{letter} without its digits")
        point = int(digits, 16)
        if 0xD800 <= point < 0xDC00 and self.take("\\u"):  # a pair that stands for one character
            return 0x10000 + ((point - 0xD800) << 10) + (self.code_point("u") - 0xDC00)
        return point


def _one(rx: Rx) -> Pieces:
    return (Piece(False, rx, False),)


def _merged(pieces: Iterable[Piece]) -> Pieces:
    """`pieces` with the same anchors as one: at most four are left."""
    kinds: dict[tuple[bool, bool], list[Rx]] = {}
    for piece in pieces:
        kinds.setdefault((piece.begins, piece.ends), []).append(piece.rx)
    return tuple(Piece(begins, either(*found), ends) for (begins, ends), found in kinds.items())


def _single(chars: Ranges) -> bool:
    return len(chars) == 1 and chars[0][0] == chars[0][1]


def _number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 9


def _join(a: Piece, b: Piece) -> Piece | None:
    """`b` right after `a`; None if an anchor between them makes that impossible."""
    left, right = a.rx, b.rx
    if b.begins:
        if not nullable(left):
            return None
        left = EMPTY
    if a.ends:
        if not nullable(right):
            return None
        right = EMPTY
    rx = cat(left, right)
    return None if rx == NOTHING else Piece(a.begins or b.begins, rx, a.ends or b.ends)
