"""What stands at a place of a text: for each type of JSON, alternatives. The algebra of these."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from . import arrays, limits, numbers, objects, strings
from .arrays import Arrays
from .numbers import Numbers
from .objects import Objects
from .reach import Emptiness
from .strings import Strings

T = TypeVar("T", Numbers, Strings, Arrays, Objects)


@dataclass(frozen=True)
class Shapes:
    """The union of all alternatives of all types.

    Attributes:
        units: of "null", "true", "false".
    """

    units: frozenset[str] = frozenset()
    numbers: tuple[Numbers, ...] = ()
    strings: tuple[Strings, ...] = ()
    arrays: tuple[Arrays, ...] = ()
    objects: tuple[Objects, ...] = ()

    @property
    def empty(self) -> bool:
        return self == NONE


NONE = Shapes()
ALL = Shapes(frozenset(["null", "true", "false"]), (Numbers(),), (Strings(),), (Arrays(),), (Objects(),))


def both(a: Shapes, b: Shapes, reach: Emptiness) -> Shapes:
    """What is of `a` and of `b`."""
    return Shapes(
        a.units & b.units,
        _pairs(a.numbers, b.numbers, lambda x, y: _one(numbers.both(x, y)), Numbers(), reach),
        _pairs(a.strings, b.strings, lambda x, y: _one(strings.both(x, y)), Strings(), reach),
        _pairs(a.arrays, b.arrays, lambda x, y: _one(arrays.both(x, y, reach)), Arrays(), reach),
        _pairs(a.objects, b.objects, lambda x, y: objects.both(x, y, reach), Objects(), reach),
    )


def either(*several: Shapes) -> Shapes:
    """What is of any of `several`."""
    strings = [one for shapes in several for one in shapes.strings]
    texts = [one.values for one in strings if one.values is not None and not one.formats]
    joined = [Strings(values=frozenset[str]().union(*texts))] if texts else []
    patterns = [one for one in strings if one.values is None or one.formats]
    return Shapes(
        frozenset[str]().union(*(shapes.units for shapes in several)),
        _union((one for shapes in several for one in shapes.numbers), Numbers()),
        _union((*joined, *patterns), Strings()),
        _union((one for shapes in several for one in shapes.arrays), Arrays()),
        _union((one for shapes in several for one in shapes.objects), Objects()),
    )


def minus(a: Shapes, b: Shapes, reach: Emptiness) -> Shapes:
    """What is of `a` and not of `b`.

    Raises:
        GrammarError: it cannot be expressed.
    """
    return Shapes(
        a.units - b.units,
        _less(a.numbers, b.numbers, numbers.others, lambda x, y: _one(numbers.both(x, y)), Numbers(), reach),
        _less(a.strings, b.strings, strings.others, lambda x, y: _one(strings.both(x, y)), Strings(), reach),
        _less(
            a.arrays,
            b.arrays,
            lambda x: arrays.others(x, reach),
            lambda x, y: _one(arrays.both(x, y, reach)),
            Arrays(),
            reach,
        ),
        _less(
            a.objects,
            b.objects,
            lambda x: objects.others(x, reach),
            lambda x, y: objects.both(x, y, reach),
            Objects(),
            reach,
        ),
    )


def _one(piece: T | None) -> list[T]:
    return [] if piece is None else [piece]


def _pairs(
    a: Iterable[T], b: Iterable[T], meet: Callable[[T, T], list[T]], every: T, reach: Emptiness
) -> tuple[T, ...]:
    left, right = tuple(a), tuple(b)
    if left == (every,):
        return right
    if right == (every,):
        return left
    reach.step(len(left) * len(right))
    return _union([piece for x in left for y in right for piece in meet(x, y)], every)


def _union(pieces: Iterable[T], every: T) -> tuple[T, ...]:
    distinct = list(dict.fromkeys(pieces))
    if every in distinct:  # alternatives that have evaluated something still count
        plain = getattr(every, "seen", None)
        distinct = [piece for piece in distinct if piece == every or getattr(piece, "seen", None) != plain]
    if len(distinct) > (limits.VALUES if isinstance(every, Numbers) else limits.ALTERNATIVES):
        limits.exceeded("ALTERNATIVES", limits.ALTERNATIVES, f"{len(distinct)} alternatives of one type at one place")
    return tuple(distinct)


def _less(
    left: tuple[T, ...], right: tuple[T, ...], negate: Callable[[T], list[T]], meet: Callable[[T, T], list[T]], every: T,
    reach: Emptiness,
) -> tuple[T, ...]:  # fmt: skip
    for piece in right:
        if not left or piece == every:
            return ()
        remaining: list[T] = []
        for alternative in left:
            reach.step()
            if alternative == every:
                remaining += negate(piece)
            elif meet(alternative, piece):
                remaining += [rest for other in negate(piece) for rest in meet(alternative, other)]
            else:
                remaining.append(alternative)
        left = _union(remaining, every)
    return left
