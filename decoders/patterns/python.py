"""Regular expressions as automata read them: the whole text must match, whatever is not regular is refused.

What is read is the common part of Python's ``re`` and Rust's ``regex``, so that a pattern means here what it means in
``re.fullmatch``; constructs that the two read differently are refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NoReturn

from ..errors import GrammarError, shortened
from . import characters
from .reader import CODE_DIGITS, Quantifier, Reader
from .writer import quoted

#: Largest count of a repetition: of a single byte, automata of that many states are still built.
REPETITIONS = 99_999
#: What to write instead of an assertion about the surroundings.
_INTERSECT = (
    "write the texts out, or use decoders.grammar, whose terminals have & (and) and ~ (not): T: /[a-z]+/ & ~/if|else/"
)
_ESCAPES = frozenset("dDwWsSnrtfvaxuUpP")
#: Rust counts combining marks among word characters, and U+001C to U+001F not among white space. Classes nest in Rust.
_CLASSES = {
    r"\w": r"\p{L}\p{N}_", r"\W": r"[^\p{L}\p{N}_]", r"\s": r"\s\x1c-\x1f", r"\S": r"[^\s\x1c-\x1f]",
}  # fmt: skip
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "a": "\a"}
_FLAGS = re.compile(r"\(\?[aiLmsuxRU-]+[:)]")


def whole_text(pattern: str) -> str:
    """`pattern` without what a match of the whole text makes idle: anchors at its ends, laziness, captures.

    Raises:
        GrammarError: it is no regular expression in the sense of the theory, or not well formed; names what and where.
    """
    return _Python(pattern).read()


@dataclass
class _Group:
    """An open group. Anchors are idle at the ends of the text only: a group knows whether it can stand there.

    Attributes:
        begin: where it opens.
        leading: nothing can stand before it.
        anchors: where it has anchors.
        fresh: nothing stands before the next item of this alternative.
        closed: where ``$`` closed this alternative.
        ended: where ``$`` closed an earlier alternative.
        item: what a quantifier would repeat: "" nothing, "atom", "quantified", "anchor" or "anchored", a group with anchors.
    """

    begin: int
    leading: bool
    anchors: list[int] = field(default_factory=list)
    fresh: bool = True
    closed: int | None = None
    ended: int | None = None
    item: str = ""


class _Python(Reader[str]):
    """Writes what it reads, part by part."""

    bound_digits = len(str(REPETITIONS))

    def __init__(self, pattern: str) -> None:
        super().__init__(pattern)
        self.out: list[str] = []
        self.groups = [_Group(0, leading=True)]
        try:
            pattern.encode()
        except UnicodeEncodeError as error:
            raise self.refusal("half of a surrogate pair", "it stands for no character", error.start) from None

    def read(self) -> str:
        self.read_parts()
        if len(self.groups) > 1:
            raise self.refusal("(", "it is never closed", self.groups[-1].begin)
        return "".join(self.out)

    def literal(self, character: str, begin: int) -> None:
        self.atom(quoted(character), begin)

    def dot(self, begin: int) -> None:
        self.atom(".", begin)

    def charset(self, begin: int, negated: bool, members: list[str]) -> None:
        self.atom(f"[{'^' if negated else ''}{''.join(_CLASSES.get(member, member) for member in members)}]", begin)

    def atom(self, text: str, begin: int) -> None:
        self.occupy(begin)
        self.out.append(text)
        self.groups[-1].item = "atom"

    def occupy(self, begin: int) -> None:
        """Something that may match characters stands at `begin`: no ``$`` may have come before it."""
        group = self.groups[-1]
        if group.closed is not None:
            raise self.refusal("$", f"text follows it at character {begin}, so nothing can match", group.closed)
        group.fresh = False

    def anchor(self, begin: int, end: bool) -> None:
        group = self.groups[-1]
        if end:
            group.closed = begin
        elif not (group.leading and group.fresh):
            raise self.refusal(
                self.pattern[begin : self.place],
                "the whole text must match anyway, and it stands inside of it: drop it",
                begin,
            )
        group.anchors.append(begin)
        group.item = "anchor"

    def look(self, mark: str, begin: int) -> None:
        raise self.refusal(mark, f"look-around has no automaton of its own: {_INTERSECT}", begin)

    def special(self, begin: int) -> None:
        if self.take("(?#"):
            self.place = self.pattern.find(")", begin) + 1
            if not self.place:
                raise self.refusal("(?#", "it is never closed", begin)
            return
        if self.peek("(?P="):
            raise self.refusal("(?P=", "a back-reference is not regular: write the alternatives out", begin)
        if flags := _FLAGS.match(self.pattern, begin):
            raise self.refusal(
                flags[0], "flags are not read: spell both cases, [Aa], or (.|\\n) for any character", begin
            )
        raise self.refusal(
            self.pattern[begin : begin + 3], "atomic groups, conditions and the like are not read: use (?:…)", begin
        )

    def group(self, begin: int) -> None:
        parent = self.groups[-1]
        leading = parent.leading and parent.fresh
        self.occupy(begin)
        self.groups.append(_Group(begin, leading))
        self.out.append("(?:")

    def close(self, begin: int) -> None:
        if len(self.groups) == 1:
            raise self.refusal(")", "no group is open", begin)
        group = self.groups.pop()
        parent = self.groups[-1]
        ends = [end for end in (group.closed, group.ended) if end is not None]
        parent.closed = ends[0] if ends else None
        parent.anchors += group.anchors
        parent.item = "anchored" if group.anchors else "atom"
        self.out.append(")")

    def alternative(self, begin: int) -> None:
        group = self.groups[-1]
        if group.closed is not None:
            group.ended = group.closed
        group.fresh, group.closed, group.item = True, None, ""
        self.out.append("|")

    def repeatable(self, text: str, begin: int) -> bool:
        item = self.groups[-1].item
        if item in ("", "quantified"):
            what = "nothing stands before it" if not item else "what it repeats is already repeated: use (?:…)"
            raise self.refusal(text, f"{what}; write \\{text[0]} for the character itself", begin)
        if item != "atom":
            raise self.refusal(text, "it repeats an anchor", begin)
        return True

    def too_often(self, text: str, begin: int) -> None:
        raise self.refusal(shortened(text, 20), f"the limit is {REPETITIONS:,} repetitions", begin)

    def bounds_reversed(self, text: str, begin: int) -> None:
        raise self.refusal(text, "the smaller number comes first", begin)

    def quantify(self, quantifier: Quantifier) -> None:
        text = quantifier.text
        if self.peek("+") and not quantifier.lazy:
            why = "possessive repetition is not read: leave the second + out"
            raise self.refusal(f"{text}+", why, quantifier.begin)
        # Lazy or greedy, the same whole texts match.
        self.out.append(f"{{0,{text[2:]}" if text.startswith("{,") else text)
        self.groups[-1].item = "quantified"

    def escape(self, begin: int) -> None:
        letter = self.pattern[begin + 1 : begin + 2]
        if letter in ("A", "z", "Z"):
            self.place += 2
            self.anchor(begin, end=letter != "A")
            return
        if letter in ("b", "B"):
            raise self.refusal("\\" + letter, f"word boundaries are not read: {_INTERSECT}", begin)
        text = self.escaped()
        members = _CLASSES.get(text, text)
        self.atom(members if members == text or members[0] == "[" else f"[{members}]", begin)

    def escaped(self) -> str:
        """An escape that stands for characters, inside a class or outside."""
        begin = self.place
        letter = self.pattern[begin + 1 : begin + 2]
        if not letter:
            raise self.refusal("\\", "nothing follows it", begin)
        if letter.isdigit() or letter == "k":
            what = "write \\x00" if letter == "0" else "a back-reference is not regular: write the alternatives out"
            raise self.refusal("\\" + letter, what, begin)
        self.place += 2
        if not (letter.isascii() and letter.isalpha()):
            return quoted(letter)
        if letter not in _ESCAPES:
            raise self.refusal("\\" + letter, "there is no such escape", begin)
        if letter in "pP" and self.in_braces() is None:
            self.place += 1
        if letter in CODE_DIGITS:
            code = self.code_point(letter)
            text = self.pattern[begin : self.place]
            if code is None:
                raise self.refusal(text, "hexadecimal digits are missing", begin)
            if code > characters.LAST or characters.contains(characters.SURROGATES, code):
                raise self.refusal(text, "it stands for no character", begin)
        return self.pattern[begin : self.place]

    def single(self) -> str:
        character = self.pattern[self.place]
        if self.take("\\b"):  # a backspace, as in Python
            return r"\x08"
        if character == "\\":
            return self.escaped()
        if character == "[":
            raise self.refusal("[", "inside a class write \\[; classes in classes are not read", self.place)
        self.place += 1
        return quoted(character)

    def member(self, class_begin: int) -> str:
        if (pair := self.pattern[self.place : self.place + 2]) in ("&&", "--", "~~"):
            raise self.refusal(
                pair, f"operations on classes are not read: escape the characters, or {_INTERSECT}", self.place
            )
        return super().member(class_begin)

    def span(self, low: str, high: str, begin: int) -> str:
        first, last, text = _character(low), _character(high), self.pattern[begin : self.place]
        if first is None or last is None:
            raise self.refusal(text, "a range is from one character to another", begin)
        if first > last:
            raise self.refusal(text, "the smaller character comes first", begin)
        return f"{low}-{high}"

    def unclosed_class(self, begin: int) -> NoReturn:
        raise self.refusal("[", "it is never closed", begin)

    def refusal(self, what: str, why: str, at: int) -> GrammarError:
        shown = self.pattern if len(self.pattern) <= 80 else f"…{self.pattern[max(0, at - 30) : at + 40]}…"
        return GrammarError(f"regex {shown!r}: {what!r} at character {at}: {why}", keyword=what)


def _character(item: str) -> str | None:
    """What a literal or an escape stands for; None for a class."""
    if item[0] != "\\" or not item[1].isalpha():
        return item[-1]
    if item[1] in CODE_DIGITS:
        return chr(int(item[2:].strip("{}"), 16))
    return _CONTROLS.get(item[1])
