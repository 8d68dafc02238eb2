"""Shapes: sets of JSON values, as a list of sets for each type, with intersection, union and difference."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from . import arrays, limits, numbers, objects, strings
from .arrays import Arrays
from .document import Place
from .nodes import Node, NodeAlgebra
from .numbers import Numbers
from .objects import Objects
from .strings import Strings

T = TypeVar("T", Numbers, Strings, Arrays, Objects)


@dataclass(frozen=True)
class Shapes:
    """A set of JSON values: the union of the sets listed for each type.

    Attributes:
        units: which of "null", "true" and "false" are in the union.
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
    """The values of `shapes`, with every item and property marked as evaluated."""
    return replace(
        shapes,
        arrays=tuple(dict.fromkeys(replace(one, evaluated=arrays.Items(None)) for one in shapes.arrays)),
        objects=tuple(dict.fromkeys(replace(one, evaluated=objects.Keys(all=True)) for one in shapes.objects)),
    )


def intersection(a: Shapes, b: Shapes, algebra: NodeAlgebra) -> Shapes:
    """The values that are in both `a` and `b`."""
    of_types = {
        name: _intersections(getattr(a, name), getattr(b, name), kind, algebra) for name, kind in _TYPES.items()
    }
    return Shapes(a.units & b.units, **of_types)


def union(*several: Shapes) -> Shapes:
    """The values that at least one of the shapes `several` contains."""
    strings = [one for shapes in several for one in shapes.strings]
    texts = [one.values for one in strings if one.values is not None]
    joined = [Strings(values=frozenset[str]().union(*texts))] if texts else []
    patterns = [one for one in strings if one.values is None]
    return Shapes(
        frozenset[str]().union(*(shapes.units for shapes in several)),
        _union((one for shapes in several for one in shapes.numbers), Numbers()),
        _union((*joined, *patterns), Strings()),
        _union((one for shapes in several for one in shapes.arrays), Arrays()),
        _union((one for shapes in several for one in shapes.objects), Objects()),
    )


def difference(a: Shapes, b: Shapes, algebra: NodeAlgebra) -> Shapes:
    """The values of `a` that are not in `b`. Raises GrammarError: they cannot be expressed."""
    of_types = {name: _difference(getattr(a, name), getattr(b, name), kind, algebra) for name, kind in _TYPES.items()}
    return Shapes(a.units - b.units, **of_types)


class SchemaAlgebra(NodeAlgebra):
    """Operations for reading the keywords of a schema: nodes of schemas, and their shapes.

    Attributes:
        dropped: (path, keyword) of keywords that are left out.
        evaluation: whether a keyword depends on what other keywords have evaluated.
    """

    dropped: frozenset[tuple[str, str]]
    evaluation: bool

    @abstractmethod
    def place(self, content: Place | bool) -> Node:
        """The node of a schema."""

    def node(self, place: Place, *keys: str | int) -> Node:
        """The node of the schema under `keys` of `place`."""
        return self.place(place.child(*keys))

    @abstractmethod
    def opposite(self, place: Place) -> Place:
        """`place` with `subtracted` reversed, for a keyword such as ``not`` that excludes the values of a schema. Left-out
        keywords of a subtracted schema allow nothing, other left-out keywords everything.
        """

    @abstractmethod
    def normalise(self, node: Node) -> Shapes:
        """The set of the values that `node` allows."""

    def intersect(self, current: Shapes, node: Node) -> Shapes:
        """The values of `current` that `node` allows."""
        return current if current.empty else intersection(current, self.normalise(node), self)


@dataclass(frozen=True)
class _Type(Generic[T]):
    """A type of JSON values: the set of all its values, and functions on sets of its values that return lists of sets."""

    all_values: T
    intersect: Callable[[T, T, NodeAlgebra], list[T]]
    complement: Callable[[T, NodeAlgebra], list[T]]


def _listed(piece: T | None) -> list[T]:
    return [] if piece is None else [piece]


#: The operations on each attribute of :class:`Shapes` except ``units``.
_TYPES: dict[str, _Type[Any]] = {
    "numbers": _Type(
        Numbers(), lambda a, b, _: _listed(numbers.intersection(a, b)), lambda a, _: numbers.complement(a)
    ),
    "strings": _Type(
        Strings(), lambda a, b, _: _listed(strings.intersection(a, b)), lambda a, _: strings.complement(a)
    ),
    "arrays": _Type(Arrays(), lambda a, b, algebra: _listed(arrays.intersection(a, b, algebra)), arrays.complement),
    "objects": _Type(Objects(), objects.intersection, objects.complement),
}


def _intersections(left: tuple[T, ...], right: tuple[T, ...], kind: _Type[T], algebra: NodeAlgebra) -> tuple[T, ...]:
    if left == (kind.all_values,):
        return right
    if right == (kind.all_values,):
        return left
    algebra.step(len(left) * len(right))
    return _union([piece for a in left for b in right for piece in kind.intersect(a, b, algebra)], kind.all_values)


def _union(pieces: Iterable[T], all_values: T) -> tuple[T, ...]:
    distinct = list(dict.fromkeys(pieces))
    if all_values in distinct:  # other sets are then kept only for their evaluated parts
        nothing_evaluated = getattr(all_values, "evaluated", None)
        distinct = [
            piece for piece in distinct if piece == all_values or getattr(piece, "evaluated", None) != nothing_evaluated
        ]
    numbers = isinstance(all_values, Numbers)
    limit, most = ("VALUES", limits.VALUES) if numbers else ("ALTERNATIVES", limits.ALTERNATIVES)
    if len(distinct) > most:
        limits.exceeded(limit, most, f"{len(distinct)} alternatives of one type at one place")
    return tuple(distinct)


def _difference(left: tuple[T, ...], right: tuple[T, ...], kind: _Type[T], algebra: NodeAlgebra) -> tuple[T, ...]:
    for piece in right:
        if not left or piece == kind.all_values:
            return ()
        remaining: list[T] = []
        for alternative in left:
            algebra.step()
            if alternative == kind.all_values:
                remaining += kind.complement(piece, algebra)
            elif kind.intersect(alternative, piece, algebra):
                for other in kind.complement(piece, algebra):
                    remaining += kind.intersect(alternative, other, algebra)
            else:
                remaining.append(alternative)
        left = _union(remaining, kind.all_values)
    return left
