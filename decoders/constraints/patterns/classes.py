"""Reading sets of characters: classes in brackets, and escapes."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from . import characters
from .characters import Ranges
from .dialect import Dialect, Problem, Set
from .tree import Anchor, Chars, Class, joined_class

_BRACED = re.compile(r"\{([^{}]*)\}")
_HEXADECIMAL = re.compile(r"[0-9A-Fa-f]+")
_LOW_SURROGATE = re.compile(r"\\u([dD][c-fC-F][0-9A-Fa-f]{2})")
_CLASS_BEGIN = re.compile(r"\[\^?\]?")
#: Operations between classes. ``||`` (union) is used for the first class only, with the empty set as left operand.
_OPERATIONS: dict[str, Callable[[Ranges, Ranges], Ranges]] = {
    "||": lambda a, b: characters.ranges([*a, *b]),
    "&&": characters.common,
    "--": lambda a, b: characters.common(a, characters.complement(b)),
    "~~": lambda a, b: characters.common(characters.ranges([*a, *b]), characters.complement(characters.common(a, b))),
}
_POSIX_CLASSES: dict[str, Ranges] = {
    "alnum": ((0x30, 0x39), (0x41, 0x5A), (0x61, 0x7A)), "alpha": ((0x41, 0x5A), (0x61, 0x7A)), "ascii": ((0, 0x7F),),
    "blank": ((9, 9), (0x20, 0x20)), "cntrl": ((0, 0x1F), (0x7F, 0x7F)), "digit": characters.DIGIT, "graph": ((0x21, 0x7E),),
    "lower": ((0x61, 0x7A),), "print": ((0x20, 0x7E),), "punct": ((0x21, 0x2F), (0x3A, 0x40), (0x5B, 0x60), (0x7B, 0x7E)),
    "space": ((9, 0xD), (0x20, 0x20)), "upper": ((0x41, 0x5A),), "word": characters.WORD,
    "xdigit": ((0x30, 0x39), (0x41, 0x46), (0x61, 0x66)),
}  # fmt: skip
_POSIX = re.compile(rf"\[:(\^?)({'|'.join(_POSIX_CLASSES)}):\]")
#: For each letter of an escape, the number of digits of a code point without braces.
_CODE_DIGITS = {"x": 2, "u": 4, "U": 8}


class ClassReader:
    """The part of the reader (:mod:`.reader`) that reads sets of characters.

    Attributes:
        pattern: the pattern's text.
        place: index of the next character.
        dialect: the pattern's dialect.
    """

    def __init__(self, pattern: str, dialect: Dialect) -> None:
        self.pattern, self.place, self.dialect = pattern, 0, dialect

    def refuse(self, problem: Problem, what: str, place: int) -> None:
        """Raises the error for `what` at `place`, if the dialect refuses this kind of `problem`."""
        message = self.dialect.messages.get(problem)
        if message is not None:
            raise self.dialect.error(self.pattern, problem, what, message.format(what=what), place)

    def peek(self, text: str) -> bool:
        """Whether `text` comes next."""
        return self.pattern.startswith(text, self.place)

    def take(self, text: str) -> bool:
        """Reads `text` if it comes next; returns whether it did."""
        if self.peek(text):
            self.place += len(text)
            return True
        return False

    def in_braces(self) -> str | None:
        """Reads braces and returns their content; None if no braces come next."""
        braces = _BRACED.match(self.pattern, self.place)
        if braces is None:
            return None
        self.place = braces.end()
        return braces[1]

    # Classes.

    def character_class(self, begin: int) -> Set:
        """Reads a class in brackets at `begin`."""
        if self.dialect.nested_classes:
            return self.nested_class(begin)
        if self.dialect.class_algebra:
            return self.computed_class(begin)
        self.place = begin + 1
        negated = self.take("^")
        first = self.place
        members: list[Set] = []
        while not (self.peek("]") and (self.place > first or self.dialect.empty_classes)):
            members.append(self.member(begin))
        self.place += 1
        ranges = characters.ranges(pair for member in members if isinstance(member, Chars) for pair in member.ranges)
        named = [member.text for member in members if isinstance(member, Class)]
        if named:
            return Class(joined_class(ranges, named, negated), place=begin)
        return Chars(characters.complement(ranges) if negated else ranges, place=begin)

    def nested_class(self, begin: int) -> Class:
        """Reads a class that may contain classes; returns its text unchanged."""
        depth = 0
        while self.place < len(self.pattern):
            if opened := _CLASS_BEGIN.match(self.pattern, self.place):
                depth += 1
                self.place = opened.end()  # a bracket that comes first stands for itself
                continue
            depth -= self.peek("]")
            self.place += 2 if self.peek("\\") else 1
            if not depth:
                break
        if depth:
            self.refuse("unclosed class", "[", begin)
        return Class(self.pattern[begin : self.place], place=begin)

    def computed_class(self, begin: int) -> Chars:
        """Reads a class that may contain classes and operations; as in Rust, all operations have the same precedence."""
        self.place = begin + 1
        negated = self.take("^")
        union: list[tuple[int, int]] = []
        while self.take("-"):  # hyphens at the beginning stand for themselves, and so does a bracket
            union.append((0x2D, 0x2D))
        if not union and self.take("]"):
            union.append((0x5D, 0x5D))
        left: Ranges = ()
        operation = "||"
        while not self.take("]"):
            following = next((sign for sign in ("&&", "--", "~~") if self.take(sign)), None)
            if following is not None:
                left = _OPERATIONS[operation](left, characters.ranges(union))
                union, operation = [], following
            elif named := _POSIX.match(self.pattern, self.place):
                self.place = named.end()
                ranges = _POSIX_CLASSES[named[2]]
                union += characters.complement(ranges) if named[1] else ranges
            elif self.peek("["):
                union += self.computed_class(self.place).ranges
            else:
                union += _ranges(self.member(begin))
        ranges = _OPERATIONS[operation](left, characters.ranges(union))
        return Chars(characters.complement(ranges) if negated else ranges, place=begin)

    def member(self, class_begin: int) -> Set:
        """Reads a character or a range in the class that begins at `class_begin`."""
        begin = self.place
        for operation in self.dialect.class_operations:
            if self.peek(operation):
                self.refuse("class operation", operation, begin)
        low = self.single(class_begin)
        if not self.peek("-") or self.pattern[self.place + 1 : self.place + 2] in self.dialect.no_range_before:
            return low
        self.place += 1
        high = self.single(class_begin)
        text = self.pattern[begin : self.place]
        first, last = _point(low), _point(high)
        if first is None or last is None:
            self.refuse("range of classes", text, begin)  # in other dialects the hyphen stands for itself
            return Chars(characters.ranges([*_ranges(low), *_ranges(high), (0x2D, 0x2D)]), place=begin)
        if first > last:
            self.refuse("range reversed", text, begin)
        return Chars(((first, last),), place=begin)

    def single(self, class_begin: int) -> Set:
        """Reads a character, or an escape, in the class that begins at `class_begin`."""
        begin = self.place
        if begin >= len(self.pattern):
            self.refuse("unclosed class", "[", class_begin)
        if self.peek("\\"):
            escaped = self.escaped(in_class=True)
            assert not isinstance(escaped, Anchor), "no dialect has anchors in classes"
            return escaped
        if self.peek("["):
            self.refuse("class in a class", "[", begin)
        self.place += 1
        return Chars(characters.of(self.pattern[begin]), place=begin)

    # Escapes.

    def escaped(self, in_class: bool) -> Set | Anchor:
        """Reads an escape; returns the characters or the anchor that it stands for."""
        begin, dialect = self.place, self.dialect
        letter = self.pattern[begin + 1 : begin + 2]
        if not letter:
            self.refuse("backslash at the end", "\\", begin)
        self.place += 2
        special = dialect.escapes_in_class if in_class else dialect.escapes_outside
        meaning = special.get(letter, dialect.escapes.get(letter))
        follows = self.pattern[self.place : self.place + 1]
        if letter == "0" and follows.isdigit():
            self.refuse("octal escape", "\\0", begin)
        if isinstance(meaning, str):
            self.refuse(meaning, "\\" + letter, begin)
        elif isinstance(meaning, Anchor):
            return Anchor(meaning.end, place=begin)
        elif isinstance(meaning, Chars):
            return Chars(meaning.ranges, place=begin)
        elif meaning is not None:
            return Class(meaning.text, place=begin)
        if letter and letter in "pP" and (named := self.property(letter, begin)) is not None:
            return named
        if letter and letter in dialect.codes:
            return self.code_point(letter, begin)
        if dialect.control_letters and letter == "c" and follows.isalpha():
            self.place += 1
            return Chars(characters.of(chr(ord(follows) % 32)), place=begin)
        if dialect.is_reserved(letter):
            self.refuse("unknown escape", "\\" + letter, begin)
            return Class(self.pattern[begin : self.place], place=begin)
        return Chars(characters.of(letter), place=begin)

    def property(self, letter: str, begin: int) -> Set | None:
        """Reads the name of a property of Unicode and returns its characters; None if there is no name, or it is unknown."""
        name = self.in_braces()
        if name is None and self.dialect.short_properties:
            name = self.pattern[self.place : self.place + 1]
            self.place += 1
        if name is None:
            return None
        named = self.dialect.named_property(name, letter == "P")
        if named is None:
            self.refuse("unknown property", name, begin)
            return None
        return replace(named, place=begin)

    def code_point(self, letter: str, begin: int) -> Set:
        """Reads the digits of an escape; returns the character with this code point, or the escape verbatim if it is invalid."""
        point = self.digits(letter)
        if self.dialect.surrogate_pairs and point is not None and 0xD800 <= point < 0xDC00:
            low = _LOW_SURROGATE.match(self.pattern, self.place)
            if low is not None:
                self.place = low.end()
                point = 0x10000 + ((point - 0xD800) << 10) + (int(low[1], 16) - 0xDC00)
        text = self.pattern[begin : self.place]
        if point is None:
            self.refuse("no digits", text, begin)
        elif point > characters.LAST or (
            characters.contains(characters.SURROGATES, point) and not self.dialect.surrogate_pairs
        ):
            self.refuse("no character", text, begin)
        else:
            return Chars(((point, point),), place=begin)
        return Class(text, place=begin)

    def digits(self, letter: str) -> int | None:
        digits = self.in_braces() if letter in self.dialect.codes_in_braces else None
        if digits is None:
            count = _CODE_DIGITS[letter]
            digits = self.pattern[self.place : self.place + count]
            self.place += len(digits)
            if len(digits) < count:
                return None
        return int(digits, 16) if _HEXADECIMAL.fullmatch(digits) else None


def _point(one: Set) -> int | None:
    """The code point of the only character in `one`; None if `one` is not a single character."""
    if isinstance(one, Chars) and len(one.ranges) == 1 and one.ranges[0][0] == one.ranges[0][1]:
        return one.ranges[0][0]
    return None


def _ranges(one: Set) -> Ranges:
    return one.ranges if isinstance(one, Chars) else ()
