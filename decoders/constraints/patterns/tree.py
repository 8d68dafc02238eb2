"""Patterns as trees: the one form in which every dialect is read, and from which every notation is written.

A tree of :class:`Chars`, :class:`Cat`, :class:`Or` and :class:`Repeat` alone is *regular*: it stands for a set of whole strings, and
automata are made of it. The other nodes are what a dialect may say beyond that; a reader of the tree resolves, drops or refuses them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from os.path import commonprefix
from typing import TypeAlias

from . import characters
from .characters import Ranges


@dataclass(frozen=True, slots=True)
class _Node:
    """A part of a pattern.

    Attributes:
        place: index of its first character in the pattern that was read, for messages; equal nodes may differ in it.
    """

    place: int = field(default=0, compare=False, repr=False, kw_only=True)


@dataclass(frozen=True, slots=True)
class Chars(_Node):
    """One character of a set; the empty set matches nothing."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Cat(_Node):
    """One part after the other; no parts are the empty string."""

    parts: tuple[Pattern, ...]


@dataclass(frozen=True, slots=True)
class Or(_Node):
    """One of the parts; at least two."""

    parts: tuple[Pattern, ...]


@dataclass(frozen=True, slots=True)
class Repeat(_Node):
    """`part` from `low` to `high` times, None for any number."""

    part: Pattern
    low: int
    high: int | None


@dataclass(frozen=True, slots=True)
class Class(_Node):
    r"""One character of a class that is named and not enumerated, as Rust writes it: ``\p{L}``, ``[^\p{L}\-]``."""

    text: str


@dataclass(frozen=True, slots=True)
class Anchor(_Node):
    """The string begins here, or ends here if `end`."""

    end: bool


@dataclass(frozen=True, slots=True)
class Look(_Node):
    """Look-ahead: `part` follows here or, if not `positive`, does not."""

    part: Pattern
    positive: bool


@dataclass(frozen=True, slots=True)
class Verbatim(_Node):
    """What only the dialect itself understands, as it is written: options, groups of other kinds."""

    text: str


Pattern: TypeAlias = Chars | Cat | Or | Repeat | Class | Anchor | Look | Verbatim

EMPTY = Cat(())
NOTHING = Chars(())
CHARACTER = Chars(characters.ANY)
ANYTHING = Repeat(CHARACTER, 0, None)


def irregular(node: Pattern) -> TypeError:
    """The error that `node`, which stands for no set of strings by itself, is in a tree that has to be regular."""
    return TypeError(f"a {type(node).__name__} in a tree that has to be regular")


def cat(*parts: Pattern) -> Pattern:
    """The parts, each of which is in the simplest form, one after the other in it; nothing if one of them matches nothing."""
    flat: list[Pattern] = []
    for part in parts:
        if part == NOTHING:
            return NOTHING
        flat += part.parts if isinstance(part, Cat) else [part]
    return flat[0] if len(flat) == 1 else Cat(tuple(flat))


def either(*parts: Pattern) -> Pattern:
    """Any of the parts, each once; :data:`NOTHING` if none matches anything."""
    pieces = (piece for part in parts for piece in (part.parts if isinstance(part, Or) else [part]))
    distinct = tuple(piece for piece in dict.fromkeys(pieces) if piece != NOTHING)
    if not distinct:
        return NOTHING
    return distinct[0] if len(distinct) == 1 else Or(distinct)


def repeat(part: Pattern, low: int, high: int | None) -> Pattern:
    """`part` from `low` to `high` times, in the simplest form."""
    if high == 0 or part == EMPTY or (part == NOTHING and low == 0):
        return EMPTY
    if part == NOTHING:
        return NOTHING
    return part if low == high == 1 else Repeat(part, low, high)


def literal(text: str) -> Pattern:
    """Exactly `text`."""
    return cat(*(Chars(characters.of(c)) for c in text))


def words(texts: Iterable[str]) -> Pattern:
    """Any of `texts`, common beginnings shared."""
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
    """Character sets of the expression with its counted repetitions written out."""
    match pattern:
        case Chars():
            return 1
        case Cat(parts) | Or(parts):
            return sum(map(copies, parts))
        case Repeat(part, low, high):
            return copies(part) * max(1, low, high or 0)
        case _:
            raise irregular(pattern)
