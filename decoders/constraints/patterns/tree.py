"""Patterns as trees, with the same nodes for all dialects; and writing trees in the notation of backends.

A tree of only :class:`Chars`, :class:`Cat`, :class:`Or` and :class:`Repeat` is *regular*: a set of whole strings, for which automata
can be built. The other nodes are for constructs of some dialects; the code that uses a tree resolves, drops or refuses them.

The written text is valid for Rust's ``regex``, llguidance and outlines_core, and for Python's ``re`` if the tree has no :class:`Class`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from os.path import commonprefix
from typing import TypeAlias

from . import characters
from .characters import Ranges


@dataclass(frozen=True, slots=True)
class _Node:
    """A part of a pattern.

    Attributes:
        place: index of its first character in the pattern that was read, for messages; ignored when nodes are compared.
    """

    place: int = field(default=0, compare=False, repr=False, kw_only=True)


@dataclass(frozen=True, slots=True)
class Chars(_Node):
    """One character of a set; the empty set matches nothing."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Cat(_Node):
    """Concatenation: the parts one after the other. Without parts it matches the empty string."""

    parts: tuple[Pattern, ...]


@dataclass(frozen=True, slots=True)
class Or(_Node):
    """Alternation of two or more parts."""

    parts: tuple[Pattern, ...]


@dataclass(frozen=True, slots=True)
class Repeat(_Node):
    """Repetition: `part` from `low` to `high` times (None: any number of times)."""

    part: Pattern
    low: int
    high: int | None


@dataclass(frozen=True, slots=True)
class Class(_Node):
    r"""One character of a class that is kept as text, in Rust's notation: ``\p{L}``, ``[^\p{L}\-]``."""

    text: str


@dataclass(frozen=True, slots=True)
class Anchor(_Node):
    """The condition that the string begins here or, if `end`, ends here."""

    end: bool


@dataclass(frozen=True, slots=True)
class Look(_Node):
    """Look-ahead: `part` follows here or, if not `positive`, does not."""

    part: Pattern
    positive: bool


@dataclass(frozen=True, slots=True)
class Verbatim(_Node):
    """Text that only the dialect itself understands: options, groups of other kinds."""

    text: str


Pattern: TypeAlias = Chars | Cat | Or | Repeat | Class | Anchor | Look | Verbatim

EMPTY = Cat(())
NOTHING = Chars(())
CHARACTER = Chars(characters.ANY)
ANYTHING = Repeat(CHARACTER, 0, None)


def irregular(node: Pattern) -> TypeError:
    """The error for an irregular `node` in a tree that must be regular."""
    return TypeError(f"a {type(node).__name__} in a tree that has to be regular")


def cat(*parts: Pattern) -> Pattern:
    """Simplified concatenation of simplified parts; :data:`NOTHING` if a part is :data:`NOTHING`."""
    flat: list[Pattern] = []
    for part in parts:
        if part == NOTHING:
            return NOTHING
        flat += part.parts if isinstance(part, Cat) else [part]
    return flat[0] if len(flat) == 1 else Cat(tuple(flat))


def either(*parts: Pattern) -> Pattern:
    """Simplified alternation, each part once; :data:`NOTHING` if no part matches anything."""
    pieces = (piece for part in parts for piece in (part.parts if isinstance(part, Or) else [part]))
    distinct = tuple(piece for piece in dict.fromkeys(pieces) if piece != NOTHING)
    if not distinct:
        return NOTHING
    return distinct[0] if len(distinct) == 1 else Or(distinct)


def repeat(part: Pattern, low: int, high: int | None) -> Pattern:
    """Simplified repetition of `part` from `low` to `high` times."""
    if high == 0 or part == EMPTY or (part == NOTHING and low == 0):
        return EMPTY
    if part == NOTHING:
        return NOTHING
    return part if low == high == 1 else Repeat(part, low, high)


def literal(text: str) -> Pattern:
    """The pattern that matches exactly `text`."""
    return cat(*(Chars(characters.of(c)) for c in text))


def words(texts: Iterable[str]) -> Pattern:
    """The pattern that matches any of `texts`, as a prefix tree."""
    groups: dict[str, list[str]] = {}
    for text in sorted(set(texts)):
        groups.setdefault(text[:1], []).append(text)
    alternatives = []
    for group in groups.values():
        if len(group) == 1:
            alternatives.append(literal(group[0]))
            continue
        shared = commonprefix(group)  # noqa: RUF071 -- no files
        alternatives.append(cat(literal(shared), words(text[len(shared) :] for text in group)))
    return either(*alternatives)


def nullable(pattern: Pattern) -> bool:
    """Whether the empty string matches."""
    match pattern:
        case Chars():
            return False
        case Cat(parts):
            return all(map(nullable, parts))
        case Or(parts):
            return any(map(nullable, parts))
        case Repeat(part, low, _):
            return low == 0 or nullable(part)
        case _:
            raise irregular(pattern)


def copies(pattern: Pattern) -> int:
    """Number of character sets in `pattern` after its counted repetitions are written out."""
    match pattern:
        case Chars():
            return 1
        case Cat(parts) | Or(parts):
            return sum(map(copies, parts))
        case Repeat(part, low, high):
            return copies(part) * max(1, low, high or 0)
        case _:
            raise irregular(pattern)


#: Matches slashes and newlines, escaped or not. Other escapes match, too, so that an escaped backslash is not read as half an escape.
_SLASHED = re.compile(r"\\?[/\n]|\\.")
_SPECIAL = frozenset(r"\.+*?()|[]{}^$#&-~")
_MARKS = {(0, None): "*", (1, None): "+", (0, 1): "?", (1, 1): ""}
_NOT_NEWLINE = characters.complement(((0x0A, 0x0A),))
_NO_CHARACTER = r"[^\x00-\U0010FFFF]"
#: Matches a class in brackets that can be merged into other brackets, because it is not negated.
_BRACKETED = re.compile(r"\[(?!\^)(.*)\]", re.DOTALL)


def write(pattern: Pattern, anchors: bool = True) -> str:
    """The text of `pattern`, with or without its anchors. Trees may be of any depth."""
    text: list[str] = []
    todo: list[Pattern | str] = [pattern]
    while todo:
        match todo.pop():
            case str() as written:
                text.append(written)
            case Chars(((low, high),)) if low == high:
                shown = low < 0x80 or chr(low).isprintable()
                text.append(_quoted(chr(low)) if shown else code_point(low))
            case Chars(ranges):
                text.append(charset(ranges))
            case Class(written) | Verbatim(written):
                text.append(written)
            case Cat(parts):
                for part in reversed(parts):
                    todo += _enclosed(part) if isinstance(part, Or) else [part]
            case Or(parts):
                for part in reversed(parts[1:]):
                    todo += [part, "|"]
                todo.append(parts[0])
            case Repeat(part, low, high):
                todo.append(times("", low, high))
                todo += [part] if isinstance(part, Chars | Class) else _enclosed(part)
            case Anchor(end):
                text.append(("$" if end else "^") if anchors else "")
            case Look(part, positive):
                todo += [")", part, "(?=" if positive else "(?!"]
    return "".join(text)


def unit(pattern: Pattern) -> str:
    """The text of `pattern` as one unit, which can be repeated."""
    return write(Repeat(pattern, 1, 1))


def _enclosed(part: Pattern) -> list[Pattern | str]:
    return [")", part, "(?:"]


def quoted(text: str) -> str:
    """The pattern of exactly `text`: characters with a meaning in patterns get a backslash, control characters are written as codes."""
    return "".join(map(_quoted, text))


def slashed(pattern: str) -> str:
    """A pattern between slashes, for grammars in Lark's notation: slashes and ends of lines within it are escaped. The empty pattern is
    a group, because two slashes begin a comment.
    """
    return f"/{_SLASHED.sub(_escaped, pattern) or '(?:)'}/"


def _escaped(match: re.Match[str]) -> str:
    character = match[0][-1]
    return "\\" + {"\n": "n"}.get(character, character)


def _quoted(character: str) -> str:
    if character < " " or character == "\x7f":
        return f"\\x{ord(character):02x}"
    return "\\" + character if character in _SPECIAL else character


def code_point(point: int) -> str:
    """The pattern of one character, written in ASCII; it is also valid inside of a class."""
    if 0x20 <= point < 0x7F:
        return _quoted(chr(point))
    return f"\\x{point:02X}" if point < 0x80 else f"\\u{point:04X}" if point < 0x10000 else f"\\U{point:08X}"


def charset(chars: Ranges) -> str:
    """The pattern of one character of `chars`. Surrogates are left out, as UTF-8 has none; if no character is left, nothing matches."""
    if len(chars) == 1 and chars[0][0] == chars[0][1]:
        return code_point(chars[0][0])
    if chars == _NOT_NEWLINE:
        return "."
    others = characters.complement(characters.ranges([*chars, *characters.SURROGATES]))
    if len(others) < len(chars):
        return f"[^{_spans(others)}]" if others else r"[\x00-\U0010FFFF]"
    encodable = characters.common(chars, characters.ENCODABLE)
    return f"[{_spans(encodable)}]" if encodable else _NO_CHARACTER


def joined_class(chars: Ranges, classes: Sequence[str], negated: bool) -> str:
    """The class of the characters in `chars` or in one of `classes`; if `negated`, of the characters in none of these sets."""
    members = "".join(bracketed[1] if (bracketed := _BRACKETED.fullmatch(text)) else text for text in classes)
    return f"[{'^' if negated else ''}{members}{_spans(characters.common(chars, characters.ENCODABLE))}]"


def _spans(chars: Ranges) -> str:
    text = ""
    for low, high in chars:
        hyphen = "-" if high > low + 1 else ""
        text += code_point(low) + (hyphen + code_point(high) if high > low else "")
    return text


def times(text: str, low: int, high: int | None) -> str:
    """The pattern that repeats `text`, which is one unit, from `low` to `high` times."""
    count = f"{{{low}}}" if low == high else f"{{{low},{'' if high is None else high}}}"
    return text + _MARKS.get((low, high), count)
