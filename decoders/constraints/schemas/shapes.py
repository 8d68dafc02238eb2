"""Shapes: sets of JSON values, as alternatives for each type, with intersection, union and difference."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TypeVar

from . import arrays, limits, numbers, objects, strings
from .algebra import NodeAlgebra
from .arrays import Arrays
from .numbers import Numbers
from .objects import Objects
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


def all_evaluated(shapes: Shapes) -> Shapes:
    """The same values, of which every item and property has been evaluated."""
    return replace(
        shapes,
        arrays=tuple(dict.fromkeys(replace(one, evaluated=arrays.Items(None)) for one in shapes.arrays)),
        objects=tuple(dict.fromkeys(replace(one, evaluated=objects.Keys(all=True)) for one in shapes.objects)),
    )


def intersection(a: Shapes, b: Shapes, algebra: NodeAlgebra) -> Shapes:
    """The values of both `a` and `b`."""
    return Shapes(
        a.units & b.units,
        _intersections(a.numbers, b.numbers, lambda x, y: _listed(numbers.intersection(x, y)), Numbers(), algebra),
        _intersections(a.strings, b.strings, lambda x, y: _listed(strings.intersection(x, y)), Strings(), algebra),
        _intersections(a.arrays, b.arrays, lambda x, y: _listed(arrays.intersection(x, y, algebra)), Arrays(), algebra),
        _intersections(a.objects, b.objects, lambda x, y: objects.intersection(x, y, algebra), Objects(), algebra),
    )


def union(*several: Shapes) -> Shapes:
    """The values of any of `several`."""
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


def difference(a: Shapes, b: Shapes, algebra: NodeAlgebra) -> Shapes:
    """The values of `a` that are not of `b`.

    Raises:
        GrammarError: it cannot be expressed.
    """
    return Shapes(
        a.units - b.units,
        _difference(
            a.numbers,
            b.numbers,
            numbers.complement,
            lambda x, y: _listed(numbers.intersection(x, y)),
            Numbers(),
            algebra,
        ),
        _difference(
            a.strings,
            b.strings,
            strings.complement,
            lambda x, y: _listed(strings.intersection(x, y)),
            Strings(),
            algebra,
        ),
        _difference(
            a.arrays,
            b.arrays,
            lambda x: arrays.complement(x, algebra),
            lambda x, y: _listed(arrays.intersection(x, y, algebra)),
            Arrays(),
            algebra,
        ),
        _difference(
            a.objects,
            b.objects,
            lambda x: objects.complement(x, algebra),
            lambda x, y: objects.intersection(x, y, algebra),
            Objects(),
            algebra,
        ),
    )


def _listed(piece: T | None) -> list[T]:
    return [] if piece is None else [piece]


def _intersections(
    a: Iterable[T], b: Iterable[T], intersect: Callable[[T, T], list[T]], all_values: T, algebra: NodeAlgebra
) -> tuple[T, ...]:
    left, right = tuple(a), tuple(b)
    if left == (all_values,):
        return right
    if right == (all_values,):
        return left
    algebra.step(len(left) * len(right))
    return _union([piece for x in left for y in right for piece in intersect(x, y)], all_values)


def _union(pieces: Iterable[T], all_values: T) -> tuple[T, ...]:
    distinct = list(dict.fromkeys(pieces))
    if all_values in distinct:  # alternatives that have evaluated something still count
        nothing_evaluated = getattr(all_values, "evaluated", None)
        distinct = [
            piece for piece in distinct if piece == all_values or getattr(piece, "evaluated", None) != nothing_evaluated
        ]
    if len(distinct) > (limits.VALUES if isinstance(all_values, Numbers) else limits.ALTERNATIVES):
        limits.exceeded("ALTERNATIVES", limits.ALTERNATIVES, f"{len(distinct)} alternatives of one type at one place")
    return tuple(distinct)


def _difference(
    left: tuple[T, ...], right: tuple[T, ...], complement_of: Callable[[T], list[T]], intersect: Callable[[T, T], list[T]],
    all_values: T, algebra: NodeAlgebra,
) -> tuple[T, ...]:  # fmt: skip
    for piece in right:
        if not left or piece == all_values:
            return ()
        remaining: list[T] = []
        for alternative in left:
            algebra.step()
            if alternative == all_values:
                remaining += complement_of(piece)
            elif intersect(alternative, piece):
                remaining += [rest for other in complement_of(piece) for rest in intersect(alternative, other)]
            else:
                remaining.append(alternative)
        left = _union(remaining, all_values)
    return left
