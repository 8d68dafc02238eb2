"""Regular expressions as automata read them: the whole text must match, whatever is not regular is refused.

What is read is the common part of Python's ``re`` and Rust's ``regex``, so that a pattern means here what it means in
``re.fullmatch``; constructs that the two read differently are refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from ..errors import GrammarError, shortened

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
_DIGITS = {"x": 2, "u": 4, "U": 8}
_COUNT = re.compile(r"\{([0-9]+)?(,)?([0-9]+)?\}")
_FLAGS = re.compile(r"\(\?[aiLmsuxRU-]+[:)]")
_NAMED = re.compile(r"\(\?P?<([A-Za-z_]\w*)>")
_BRACED = re.compile(r"\{[^{}]*\}")
_HEX = re.compile(r"[0-9A-Fa-f]+")


def whole_text(pattern: str) -> str:
    """`pattern` without what a match of the whole text makes idle: anchors at its ends, laziness, captures.

    Raises:
        GrammarError: it is no regular expression in the sense of the theory, or not well formed; names what and where.
    """
    return _Reader(pattern).read()


def quoted(text: str) -> str:
    """The pattern of exactly `text`."""
    return "".join(_literal(character) for character in text)


def _literal(character: str) -> str:
    if character < " " or character == "\x7f":
        return f"\\x{ord(character):02x}"
    return "\\" + character if character in r"\.+*?()|[]{}^$#&-~" else character


@dataclass
class _Group:
    """An open group. Anchors are idle at the ends of the text only: a group knows whether it can stand there.

    Attributes:
        begin: where it opens. leading: nothing can stand before it. anchors: where it has anchors.
        fresh: nothing stands before the next item of this alternative. closed: where ``$`` closed this alternative.
        item: what a quantifier would repeat: "" nothing, "atom", "quantified" or "anchor".
    """

    begin: int
    leading: bool
    anchors: list[int] = field(default_factory=list)
    fresh: bool = True
    closed: int | None = None
    ended: int | None = None
    item: str = ""


class _Reader:
    def __init__(self, pattern: str) -> None:
        self.pattern, self.at = pattern, 0
        self.out: list[str] = []
        self.groups = [_Group(0, leading=True)]
        try:
            pattern.encode()
        except UnicodeEncodeError as error:
            raise self.refusal("half of a surrogate pair", "it stands for no character", error.start) from None

    def read(self) -> str:
        while self.at < len(self.pattern):
            begin, character = self.at, self.pattern[self.at]
            if character == "\\":
                self.escape()
            elif character == "[":
                self.atom(self.character_class(), begin)
            elif character == "(":
                self.open()
            elif character == ")":
                self.close()
            elif character == "|":
                self.alternative()
            elif character in "*+?" or (character == "{" and _COUNT.match(self.pattern, begin)):
                self.quantifier()
            elif character in "^$":
                self.at += 1
                self.anchor(begin, end=character == "$")
            else:
                self.at += 1
                self.atom("." if character == "." else _literal(character), begin)
        if len(self.groups) > 1:
            raise self.refusal("(", "it is never closed", self.groups[-1].begin)
        return "".join(self.out)

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
                self.pattern[begin : self.at],
                "the whole text must match anyway, and it stands inside of it: drop it",
                begin,
            )
        group.anchors.append(begin)
        group.item = "anchor"

    def open(self) -> None:
        begin, rest = self.at, self.pattern[self.at : self.at + 4]
        if rest.startswith("(?#"):
            self.at = self.pattern.find(")", begin) + 1
            if not self.at:
                raise self.refusal("(?#", "it is never closed", begin)
            return
        named = _NAMED.match(self.pattern, begin)
        if rest.startswith(("(?=", "(?!", "(?<=", "(?<!")):
            sign = rest if rest[2] == "<" else rest[:3]
            raise self.refusal(sign, f"look-around has no automaton of its own: {_INTERSECT}", begin)
        if rest.startswith("(?P="):
            raise self.refusal("(?P=", "a back-reference is not regular: write the alternatives out", begin)
        if flags := _FLAGS.match(self.pattern, begin):
            raise self.refusal(
                flags[0], "flags are not read: spell both cases, [Aa], or (.|\\n) for any character", begin
            )
        if rest.startswith("(?") and not (named or rest.startswith("(?:")):
            raise self.refusal(rest[:3], "atomic groups, conditions and the like are not read: use (?:…)", begin)
        parent = self.groups[-1]
        leading = parent.leading and parent.fresh
        self.occupy(begin)
        self.groups.append(_Group(begin, leading))
        self.out.append("(?:")
        self.at += len(named[0]) if named else 3 if rest.startswith("(?:") else 1

    def close(self) -> None:
        if len(self.groups) == 1:
            raise self.refusal(")", "no group is open", self.at)
        group = self.groups.pop()
        parent = self.groups[-1]
        ends = [end for end in (group.closed, group.ended) if end is not None]
        parent.closed = ends[0] if ends else None
        parent.anchors += group.anchors
        parent.item = "anchored" if group.anchors else "atom"
        self.out.append(")")
        self.at += 1

    def alternative(self) -> None:
        group = self.groups[-1]
        if group.closed is not None:
            group.ended = group.closed
        group.fresh, group.closed, group.item = True, None, ""
        self.out.append("|")
        self.at += 1

    def quantifier(self) -> None:
        begin, group = self.at, self.groups[-1]
        count = _COUNT.match(self.pattern, begin)
        if count and not (count[1] or count[3]):  # {} and {,} stand for themselves
            self.at += 1
            self.atom(r"\{", begin)
            return
        sign = count[0] if count else self.pattern[begin]
        if group.item in ("", "quantified"):
            what = "nothing stands before it" if not group.item else "what it repeats is already repeated: use (?:…)"
            raise self.refusal(sign, f"{what}; write \\{sign[0]} for the character itself", begin)
        if group.item != "atom":
            raise self.refusal(sign, "it repeats an anchor", begin)
        if count and max(len(count[1] or ""), len(count[3] or "")) > len(str(REPETITIONS)):
            raise self.refusal(shortened(sign, 20), f"the limit is {REPETITIONS:,} repetitions", begin)
        if count and count[1] and count[3] and int(count[1]) > int(count[3]):
            raise self.refusal(sign, "the smaller number comes first", begin)
        self.at += len(sign)
        follows = self.pattern[self.at : self.at + 1]
        if follows == "+":
            raise self.refusal(f"{sign}+", "possessive repetition is not read: leave the second + out", begin)
        if follows == "?":  # lazy or greedy, the same whole texts match
            self.at += 1
        self.out.append(f"{{0,{count[3]}}}" if count and not count[1] else sign)
        group.item = "quantified"

    def escape(self) -> None:
        begin = self.at
        letter = self.pattern[begin + 1 : begin + 2]
        if letter in ("A", "z", "Z"):
            self.at += 2
            self.anchor(begin, end=letter != "A")
            return
        if letter in ("b", "B"):
            raise self.refusal("\\" + letter, f"word boundaries are not read: {_INTERSECT}", begin)
        text = self.escaped()
        classed = _CLASSES.get(text, text)
        self.atom(classed if classed == text or classed[0] == "[" else f"[{classed}]", begin)

    def escaped(self) -> str:
        """An escape that stands for characters, inside a class or outside."""
        begin = self.at
        letter = self.pattern[begin + 1 : begin + 2]
        if not letter:
            raise self.refusal("\\", "nothing follows it", begin)
        if letter.isdigit() or letter == "k":
            what = "write \\x00" if letter == "0" else "a back-reference is not regular: write the alternatives out"
            raise self.refusal("\\" + letter, what, begin)
        self.at += 2
        if not (letter.isascii() and letter.isalpha()):
            return _literal(letter)
        if letter not in _ESCAPES:
            raise self.refusal("\\" + letter, "there is no such escape", begin)
        braces = _BRACED.match(self.pattern, self.at) if letter in "xuUpP" else None
        self.at += len(braces[0]) if braces else _DIGITS.get(letter, int(letter in "pP"))
        text = self.pattern[begin : self.at]
        if letter in _DIGITS:
            digits = text[3:-1] if braces else text[2:]
            if not _HEX.fullmatch(digits) or (len(digits) < _DIGITS[letter] and not braces):
                raise self.refusal(text, "hexadecimal digits are missing", begin)
            if (code := int(digits, 16)) > 0x10FFFF or 0xD800 <= code < 0xE000:
                raise self.refusal(text, "it stands for no character", begin)
        return text

    def character_class(self) -> str:
        begin = self.at
        self.at += 1
        out = ["["]
        if self.pattern.startswith("^", self.at):
            out.append("^")
            self.at += 1
        first = self.at
        while self.at < len(self.pattern):
            character = self.pattern[self.at]
            pair = self.pattern[self.at : self.at + 2]
            if character == "]" and self.at > first:
                self.at += 1
                return "".join(out) + "]"
            if pair in ("&&", "--", "~~"):
                raise self.refusal(
                    pair, f"operations on classes are not read: escape the characters, or {_INTERSECT}", self.at
                )
            out.append(self.member())
        raise self.refusal("[", "it is never closed", begin)

    def member(self) -> str:
        """A character, a range of them, or a class that an escape stands for, inside of a class."""
        begin = self.at
        low = self.single()
        if self.pattern[self.at : self.at + 1] != "-" or self.pattern[self.at + 1 : self.at + 2] in ("", "]", "-"):
            return _CLASSES.get(low, low)
        self.at += 1
        high = self.single()
        first, last, what = _character(low), _character(high), self.pattern[begin : self.at]
        if first is None or last is None:
            raise self.refusal(what, "a range is from one character to another", begin)
        if first > last:
            raise self.refusal(what, "the smaller character comes first", begin)
        return f"{low}-{high}"

    def single(self) -> str:
        character = self.pattern[self.at]
        if self.pattern.startswith("\\b", self.at):  # a backspace, as in Python
            self.at += 2
            return r"\x08"
        if character == "\\":
            return self.escaped()
        if character == "[":
            raise self.refusal("[", "inside a class write \\[; classes in classes are not read", self.at)
        self.at += 1
        return _literal(character)

    def refusal(self, what: str, why: str, at: int) -> GrammarError:
        shown = self.pattern if len(self.pattern) <= 80 else f"…{self.pattern[max(0, at - 30) : at + 40]}…"
        return GrammarError(f"regex {shown!r}: {what!r} at character {at}: {why}", keyword=what)


def _character(item: str) -> str | None:
    """What a literal or an escape stands for; None for a class."""
    if item[0] != "\\" or not item[1].isalpha():
        return item[-1]
    if item[1] in _DIGITS:
        return chr(int(item[2:].strip("{}"), 16))
    return _CONTROLS.get(item[1])
