"""Patterns of JSON Schema (regular expressions of ECMA-262, found anywhere in the string) as trees for whole strings.

Anchors are understood where they mean "the string begins (ends) here"; look-ahead, only right at the beginning of the
pattern, where it says something about the string as a whole. Everything else outside regular languages is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product
from typing import NoReturn, TypeAlias

from ..errors import GrammarError
from . import characters, limits
from .characters import Ranges
from .reader import Quantifier, Reader
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


Pieces: TypeAlias = tuple[Piece, ...]
_START: Pieces = (Piece(False, EMPTY, False),)
_CONTROL = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13, "0": 0}
_CLASSES = {"d": characters.DIGIT, "w": characters.WORD, "s": characters.SPACE}


@lru_cache(maxsize=1024)
def strings(pattern: str) -> tuple[tuple[Rx, bool], ...]:
    """Strings in which `pattern` is found: those in every tree marked True and in none marked False.

    Raises:
        GrammarError: not a regular expression of ECMA-262, or one that is not a regular language here.
    """
    if len(pattern) > limits.PATTERN_CHARACTERS:
        limits.exceeded("PATTERN_CHARACTERS", limits.PATTERN_CHARACTERS, "a pattern", "pattern")
    conditions = _Ecma(pattern).read()
    if any(copies(rx) > limits.COPIES for rx, _ in conditions):
        limits.exceeded(
            "COPIES", limits.COPIES, f"the pattern {pattern[:60]!r}, its repetitions written out,", "pattern"
        )
    return conditions


@dataclass
class _Group:
    """An open group, or the pattern itself.

    Attributes:
        positive: of a look-ahead, whether what is in it must follow; None for other groups.
        alternatives: the readings of the alternatives before this one.
        pieces: the readings of this alternative, but for its last item.
        item: the readings of the last item, which a quantifier would repeat; None after an anchor or a look-ahead.
        repeated: whether a quantifier has repeated it.
        aheads: readings of the look-aheads in this group, and whether they must follow.
        alternated: whether there is more than one alternative.
    """

    positive: bool | None = None
    alternatives: Pieces = ()
    pieces: Pieces = _START
    item: Pieces | None = None
    repeated: bool = False
    aheads: list[tuple[Pieces, bool]] = field(default_factory=list)
    alternated: bool = False

    def append(self, item: Pieces | None) -> None:
        """Puts the last item behind the others; `item` is the last one now."""
        if self.item is not None:
            joined = (_join(a, b) for a, b in product(self.pieces, self.item))
            self.pieces = _merged(both for both in joined if both is not None)
        self.item, self.repeated = item, False

    def end_alternative(self) -> None:
        self.append(None)
        self.alternatives, self.pieces = (*self.alternatives, *self.pieces), _START


class _Ecma(Reader[Ranges]):
    """Makes trees of what it reads."""

    open_low, empty_classes, no_range_before, braced_codes = False, True, ("]",), "u"
    named_group = re.compile(r"\(\?<[^\W\d]\w*>")

    def __init__(self, pattern: str) -> None:
        super().__init__(pattern)
        self.groups = [_Group()]

    def read(self) -> tuple[tuple[Rx, bool], ...]:
        self.read_parts()
        if len(self.groups) > 1:
            raise self.refusal("a ( that is not closed")
        group = self.groups[0]
        pieces = self.ended(group)
        aheads = (
            (either(*(Piece(True, piece.rx, piece.ends).whole for piece in ahead)), positive)
            for ahead, positive in group.aheads
        )
        return ((either(*(piece.whole for piece in pieces)), True), *aheads)

    def refusal(self, why: str) -> GrammarError:
        return GrammarError(
            f"pattern {self.pattern[:80]!r}: {why} (at character {self.place}); a pattern without it, or strict=False, works",
            "pattern",
        )

    def ended(self, group: _Group) -> Pieces:
        """The readings of a group that is complete."""
        group.end_alternative()
        if group.aheads and group.alternated:
            raise self.refusal("look-ahead beside |")
        if group.aheads and len(self.groups) > 1:
            raise self.refusal("look-ahead inside a group")
        return _merged(group.alternatives)

    def literal(self, character: str, begin: int) -> None:
        self.one(characters.of(character))

    def dot(self, begin: int) -> None:
        self.one(characters.DOT)

    def escape(self, begin: int) -> None:
        self.one(self.escaped(in_class=False))

    def charset(self, begin: int, negated: bool, members: list[Ranges]) -> None:
        chars = characters.ranges(pair for member in members for pair in member)
        self.one(characters.complement(chars) if negated else chars)

    def one(self, chars: Ranges) -> None:
        self.groups[-1].append(_one(Chars(chars)))

    def anchor(self, begin: int, end: bool) -> None:
        group = self.groups[-1]
        group.append((Piece(not end, EMPTY, end),))
        group.append(None)

    def group(self, begin: int) -> None:
        self.push(_Group())

    def look(self, mark: str, begin: int) -> None:
        if "<" in mark:
            raise self.refusal("look-behind or a group of an unknown kind")
        self.push(_Group(positive=mark == "(?="))

    def push(self, group: _Group) -> None:
        if len(self.groups) >= limits.NESTING:
            limits.exceeded("NESTING", limits.NESTING, "groups within groups of a pattern", "pattern")
        self.groups.append(group)

    def special(self, begin: int) -> None:
        named = self.peek("(?<")
        raise self.refusal("a group without a name" if named else "look-behind or a group of an unknown kind")

    def close(self, begin: int) -> None:
        if len(self.groups) == 1:
            raise self.refusal("a ) too many")
        group = self.groups[-1]
        pieces = self.ended(group)
        self.groups.pop()
        parent = self.groups[-1]
        if group.positive is None:
            parent.append(pieces)
            return
        parent.append(None)
        if parent.pieces != (Piece(True, EMPTY, False),):
            raise self.refusal("look-ahead that does not stand right after ^ at the beginning")
        parent.aheads.append((pieces, group.positive))

    def alternative(self, begin: int) -> None:
        group = self.groups[-1]
        group.end_alternative()
        group.alternated = True

    def repeatable(self, text: str, begin: int) -> bool:
        group = self.groups[-1]
        if group.repeated:
            raise self.refusal("a repetition of a repetition")
        if group.item is None and text[0] != "{":
            raise self.refusal("nothing to repeat")
        return group.item is not None

    def too_often(self, text: str, begin: int) -> None:
        limits.exceeded("COPIES", limits.COPIES, "a counted repetition", "pattern")

    def bounds_reversed(self, text: str, begin: int) -> None:
        raise self.refusal("a repetition whose bounds are in the wrong order")

    def quantify(self, quantifier: Quantifier) -> None:
        group, low, high = self.groups[-1], quantifier.low, quantifier.high
        if max(low, high or 0) > limits.COPIES:
            limits.exceeded("COPIES", limits.COPIES, "a counted repetition", "pattern")
        pieces = group.item
        assert pieces is not None
        group.repeated = True
        if all(not piece.begins and not piece.ends for piece in pieces):
            group.item = _one(repeat(either(*(piece.rx for piece in pieces)), low, high))
        elif (low, high) == (0, 1):
            group.item = _merged((*pieces, Piece(False, EMPTY, False)))
        elif (low, high) != (1, 1):
            raise self.refusal("an anchor that is repeated")

    def single(self) -> Ranges:
        if self.peek("\\"):
            return self.escaped(in_class=True)
        self.place += 1
        return characters.of(self.pattern[self.place - 1])

    def span(self, low: Ranges, high: Ranges, begin: int) -> Ranges:
        if not (_single(low) and _single(high)):
            return characters.ranges([*low, *high, (0x2D, 0x2D)])  # [\w-.]: the hyphen stands for itself
        if high[0][0] < low[0][0]:
            raise self.refusal("a range in the wrong order")
        return ((low[0][0], high[0][0]),)

    def unclosed_class(self, begin: int) -> NoReturn:
        raise self.refusal("a [ that is not closed")

    def escaped(self, in_class: bool) -> Ranges:
        self.place += 1
        if self.place >= len(self.pattern):
            raise self.refusal("a backslash at the end")
        letter = self.pattern[self.place]
        self.place += 1
        follows = self.pattern[self.place : self.place + 1]
        if letter.lower() in _CLASSES:
            chars = _CLASSES[letter.lower()]
            return characters.complement(chars) if letter.isupper() else chars
        if letter == "b" and in_class:
            return characters.of("\b")
        if letter == "0" and follows.isdigit():
            raise self.refusal("an octal escape")
        if letter in _CONTROL:
            return characters.of(chr(_CONTROL[letter]))
        if letter in "pP" and (name := self.in_braces()) is not None:
            known = characters.category(name)
            if known is None:
                raise self.refusal(f"the property {name!r} (general categories are known)")
            return characters.complement(known) if letter == "P" else known
        if letter == "c" and follows.isalpha():
            self.place += 1
            return characters.of(chr(ord(follows) % 32))
        if letter in "xu":
            return characters.of(chr(self.point(letter)))
        if letter.isalnum():
            raise self.refusal(f"the escape \\{letter}")
        return characters.of(letter)

    def point(self, letter: str) -> int:
        """The code point of an escape, of two escapes where these stand for the halves of one character."""
        point = self.code_point(letter)
        if point is None or point > characters.LAST:
            raise self.refusal(f"a \\{letter} without its digits")
        if 0xD800 <= point < 0xDC00 and self.take("\\u"):
            return 0x10000 + ((point - 0xD800) << 10) + (self.point("u") - 0xDC00)
        return point


def _one(rx: Rx) -> Pieces:
    return (Piece(False, rx, False),)


def _merged(pieces: Iterable[Piece]) -> Pieces:
    """`pieces` with the same anchors as one: at most four are left."""
    kinds: dict[tuple[bool, bool], list[Rx]] = {}
    for piece in pieces:
        kinds.setdefault((piece.begins, piece.ends), []).append(piece.rx)
    return tuple(Piece(begins, either(*parts), ends) for (begins, ends), parts in kinds.items())


def _single(chars: Ranges) -> bool:
    return len(chars) == 1 and chars[0][0] == chars[0][1]


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
