"""Regular expressions over characters as trees; a tree stands for whole strings."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from . import characters
from .characters import Ranges


@dataclass(frozen=True)
class Chars:
    """One character of a set; the empty set matches nothing."""

    ranges: Ranges


@dataclass(frozen=True)
class Cat:
    """One part after the other; no parts are the empty string."""

    parts: tuple[Rx, ...]


@dataclass(frozen=True)
class Or:
    """One of the parts; at least two."""

    parts: tuple[Rx, ...]


@dataclass(frozen=True)
class Repeat:
    """`part` from `low` to `high` times, None for any number."""

    part: Rx
    low: int
    high: int | None


Rx: TypeAlias = Chars | Cat | Or | Repeat

EMPTY = Cat(())
NOTHING = Chars(())
CHARACTER = Chars(characters.ANY)
ANYTHING = Repeat(CHARACTER, 0, None)


def cat(*parts: Rx) -> Rx:
    flat: list[Rx] = []
    for part in parts:
        flat += part.parts if isinstance(part, Cat) else [part]
    if NOTHING in flat:
        return NOTHING
    return flat[0] if len(flat) == 1 else Cat(tuple(flat))


def either(*parts: Rx) -> Rx:
    flat: list[Rx] = []
    for part in parts:
        for piece in part.parts if isinstance(part, Or) else [part]:
            if piece != NOTHING and piece not in flat:
                flat.append(piece)
    if not flat:
        return NOTHING
    return flat[0] if len(flat) == 1 else Or(tuple(flat))


def repeat(part: Rx, low: int, high: int | None) -> Rx:
    if high == 0 or part == EMPTY or (part == NOTHING and low == 0):
        return EMPTY
    if part == NOTHING:
        return NOTHING
    return part if low == high == 1 else Repeat(part, low, high)


def literal(text: str) -> Rx:
    return cat(*(Chars(characters.of(c)) for c in text))


def words(texts: Iterable[str]) -> Rx:
    """Any of `texts`, common beginnings shared."""
    groups: dict[str, list[str]] = {}
    for text in sorted(set(texts)):
        groups.setdefault(text[:1], []).append(text)
    alternatives = []
    for group in groups.values():
        if len(group) == 1:
            alternatives.append(literal(group[0]))
            continue
        first, last = group[0], group[-1]  # in order: what these two share, all share
        shared = next(
            (i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last))
        )
        alternatives.append(cat(literal(first[:shared]), words(text[shared:] for text in group)))
    return either(*alternatives)


def nullable(rx: Rx) -> bool:
    """Whether the empty string matches."""
    match rx:
        case Chars():
            return False
        case Cat(parts):
            return all(map(nullable, parts))
        case Or(parts):
            return any(map(nullable, parts))
        case Repeat(part, low, _):
            return low == 0 or nullable(part)


def copies(rx: Rx) -> int:
    """Characters sets of the expression with its counted repetitions written out."""
    match rx:
        case Chars():
            return 1
        case Cat(parts) | Or(parts):
            return sum(map(copies, parts))
        case Repeat(part, low, high):
            return copies(part) * max(1, low, high or 0)
