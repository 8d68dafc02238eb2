"""The one reader of regular expressions: a pattern in some dialect becomes a tree.

The reader does not recurse, so groups may be nested as deep as the dialect allows. A group around a single part becomes that part.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from ...errors import shortened
from . import characters, limits
from .classes import ClassReader
from .dialect import Dialect, Problem
from .tree import Anchor, Cat, Chars, Look, Or, Pattern, Repeat, Verbatim

_COUNT = re.compile(r"\{([0-9]*)(,?)([0-9]*)\}")
_MARKS: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
_LOOKS = ("(?<=", "(?<!", "(?=", "(?!")
_COMMENT = "(?#"

#: What stands in front of a quantifier: nothing, a part, a repeated part, an anchor, or a group that contains anchors.
_Last: TypeAlias = Literal["nothing", "part", "repeated", "anchor", "anchored group"]
_UNREPEATABLE: dict[_Last, Problem] = {
    "nothing": "nothing to repeat",
    "repeated": "repeated twice",
    "anchor": "repeated anchor",
    "anchored group": "repeated group with anchors",
}


def read(pattern: str, dialect: Dialect) -> Pattern:
    """The tree of `pattern`. Raises GrammarError: `pattern` is not well formed, or has constructs that the dialect refuses."""
    return _Reader(pattern, dialect).read()


@dataclass
class _Group:
    """An open group, or the pattern as a whole.

    Attributes:
        place: index of its parenthesis in the pattern.
        opening: the text that opens the group, if it is of another kind than ``(?:``.
        alternatives: the complete alternatives.
        parts: parts of the current alternative.
        last: what a quantifier would repeat if it came next.
        anchored: whether the group contains anchors.
    """

    place: int
    opening: str = ""
    alternatives: list[Pattern] = field(default_factory=list)
    parts: list[Pattern] = field(default_factory=list)
    last: _Last = "nothing"
    anchored: bool = False

    def add(self, part: Pattern) -> None:
        self.parts.append(part)
        self.last = "part"

    def end_alternative(self) -> None:
        self.alternatives.append(self.parts[0] if len(self.parts) == 1 else Cat(tuple(self.parts), place=self.place))
        self.parts, self.last = [], "nothing"

    def tree(self) -> Pattern:
        """The group as a tree. Its last alternative must be complete."""
        several = len(self.alternatives) > 1
        return Or(tuple(self.alternatives), place=self.place) if several else self.alternatives[0]


class _Reader(ClassReader):
    """Reads one pattern from left to right."""

    def __init__(self, pattern: str, dialect: Dialect) -> None:
        super().__init__(pattern, dialect)
        self.groups = [_Group(0)]

    @property
    def group(self) -> _Group:
        return self.groups[-1]

    def read(self) -> Pattern:
        while self.place < len(self.pattern):
            begin, character = self.place, self.pattern[self.place]
            if character == "\\":
                self.escape(begin)
            elif character == "[":
                self.group.add(self.character_class(begin))
            elif character == "(":
                self.open(begin)
            elif character in _MARKS or character == "{":
                self.quantifier(begin)
            else:
                self.place += 1
                if character == ")":
                    self.close(begin)
                elif character == "|":
                    self.group.end_alternative()
                elif character in "^$":
                    self.anchor(Anchor(character == "$", place=begin), character)
                elif character == ".":
                    self.group.add(Chars(self.dialect.dot, place=begin))
                else:
                    self.literal(character, begin)
        # If the dialect accepts an unclosed group, the group contains the rest of the pattern.
        while len(self.groups) > 1:
            self.refuse("unclosed group", "(", self.group.place)
            self.close(self.place)
        self.group.end_alternative()
        return self.group.tree()

    def literal(self, character: str, begin: int) -> None:
        self.group.add(Chars(characters.of(character), place=begin))

    def escape(self, begin: int) -> None:
        part = self.escaped(in_class=False)
        if isinstance(part, Anchor):
            self.anchor(part, self.pattern[begin : self.place])
        else:
            self.group.add(part)

    def anchor(self, anchor: Anchor, text: str) -> None:
        self.refuse("anchor", text, anchor.place)
        self.group.add(anchor)
        self.group.last, self.group.anchored = "anchor", True

    # Groups.

    def open(self, begin: int) -> None:
        if not self.peek("(?"):
            self.place += 1
            self.push(_Group(begin))
        elif self.take("(?:"):
            self.push(_Group(begin))
        elif (mark := next((mark for mark in _LOOKS if self.take(mark)), None)) is not None:
            if not (self.dialect.look_aheads and "<" not in mark):
                self.refuse("look-around", mark, begin)
            self.push(_Group(begin, mark))
        elif named := self.dialect.named_group.match(self.pattern, begin):
            self.place = named.end()
            self.push(_Group(begin))
        elif self.dialect.comments and self.take(_COMMENT):
            self.place = self.pattern.find(")", begin) + 1
            if not self.place:
                self.refuse("unclosed comment", _COMMENT, begin)
        else:
            self.open_other(begin)

    def open_other(self, begin: int) -> None:
        for beginning, problem in self.dialect.other_groups:
            if opening := beginning.match(self.pattern, begin):
                self.refuse(problem, opening[0], begin)
                self.place = opening.end()
                if opening[0].endswith(")"):  # options apply up to the end of the group, so its parentheses are kept
                    self.group.opening = self.group.opening or "(?:"
                    self.group.add(Verbatim(opening[0], place=begin))
                    self.group.last = "nothing"
                else:
                    self.push(_Group(begin, opening[0]))
                return
        self.place += 2
        self.push(_Group(begin, "(?"))

    def push(self, group: _Group) -> None:
        if self.dialect.nesting_limited and len(self.groups) >= limits.NESTING:
            limits.exceeded("NESTING", limits.NESTING, "groups within groups of a pattern", "pattern")
        self.groups.append(group)

    def close(self, begin: int) -> None:
        if len(self.groups) == 1:
            self.refuse("unopened group", ")", begin)
        self.group.end_alternative()
        group = self.groups.pop()
        tree = group.tree()
        if group.opening in ("(?=", "(?!") and self.dialect.look_aheads:
            self.group.add(Look(tree, group.opening == "(?=", place=group.place))
            self.group.last = "nothing"
            return
        if group.opening:
            tree = Cat((Verbatim(group.opening), tree, Verbatim(")")), place=group.place)
        self.group.add(tree)
        if group.anchored:
            self.group.last, self.group.anchored = "anchored group", True

    # Repetition.

    def quantifier(self, begin: int) -> None:
        text = self.pattern[begin]
        if text == "{":
            count = _COUNT.match(self.pattern, begin)
            if count is not None and (count[1] or (self.dialect.open_low and count[3])):
                text = count[0]
        last = self.group.last
        lone = self.dialect.lone_counts and text[0] == "{" and last in ("nothing", "anchor")
        if text == "{" or lone:
            self.place += 1
            self.literal("{", begin)
            return
        if last != "part":
            self.refuse(_UNREPEATABLE[last], text, begin)
        self.place += len(text)
        low, high = _MARKS.get(text) or self.bounds(text, begin)
        if not self.take("?") and self.peek("+"):  # laziness does not change which whole texts match
            self.refuse("possessive", f"{text}+", begin)
        if last == "nothing":
            self.group.add(Verbatim(text, place=begin))
        else:
            self.group.parts[-1] = Repeat(self.group.parts[-1], low, high, place=begin)
        self.group.last = "repeated"

    def bounds(self, text: str, begin: int) -> tuple[int, int | None]:
        """The bounds (None: no upper bound) of the quantifier `text` in braces. A bound of too many digits, if accepted, is capped."""
        least, comma, most = text[1:-1].partition(",")
        if max(len(least), len(most)) > self.dialect.most_digits:
            self.refuse("too often", shortened(text, 20), begin)
        low, high = (
            int(digits) if len(digits) <= self.dialect.most_digits else 10**self.dialect.most_digits
            for digits in (least or "0", most or "0")
        )
        if not comma:
            return low, low
        if most and low > high:
            self.refuse("bounds reversed", text, begin)
        return low, high if most else None
