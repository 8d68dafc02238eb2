"""Sets of arrays. A set has a node (a set of values) for each position, bounds on numbers of items, and may require unique items."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...errors import GrammarError
from .nodes import FALSE, TRUE, Node, NodeAlgebra


@dataclass(frozen=True)
class Count:
    """The condition that `low` to `high` (None: any number) of the items from position `start` on satisfy `node`."""

    start: int
    node: Node
    low: int
    high: int | None


@dataclass(frozen=True)
class Items:
    """The items that keywords have evaluated: all before index `first` (None: all items), and all that satisfy a node of `kinds`."""

    first: int | None = 0
    kinds: tuple[Node, ...] = ()


@dataclass(frozen=True)
class Arrays:
    """A set of arrays of `low` to `high` items. The first items satisfy the nodes of `prefix`, all other items the node `rest`.

    Attributes:
        counts: bounds on the number of items that satisfy a node.
        unique: whether no two items are equal.
        evaluated: the items that keywords have evaluated; this does not change which arrays are in the set.
    """

    prefix: tuple[Node, ...] = ()
    rest: Node = TRUE
    low: int = 0
    high: int | None = None
    counts: tuple[Count, ...] = ()
    unique: bool = False
    evaluated: Items = Items()

    def item_at(self, position: int) -> Node:
        """The node of the item at `position`."""
        return self.prefix[position] if position < len(self.prefix) else self.rest

    def simplified(self, algebra: NodeAlgebra) -> Arrays | None:
        """This set without unreachable positions; None if it is known to be empty."""
        high = self.high
        for position, node in enumerate(self.prefix):
            if (high is None or position < high) and algebra.empty(node):
                high = position
        if (high is None or high > len(self.prefix)) and algebra.empty(self.rest):
            high = len(self.prefix)
        if high is not None and (
            self.low > high or any(count.low > high - count.start for count in self.counts if count.low)
        ):
            return None
        if any(
            (count.high is not None and count.low > count.high) or (count.low and algebra.empty(count.node))
            for count in self.counts
        ):
            return None
        counts = tuple(dict.fromkeys(count for count in self.counts if count.low or count.high is not None))
        prefix = self.prefix if high is None else self.prefix[:high]
        rest = FALSE if high is not None and high <= len(prefix) else self.rest
        return replace(
            self, prefix=prefix, rest=rest, high=high, counts=counts, unique=self.unique and high not in (0, 1)
        )


def intersection(a: Arrays, b: Arrays, algebra: NodeAlgebra) -> Arrays | None:
    """The arrays in both `a` and `b`; None if there are none."""
    nodes = algebra.nodes
    prefix = tuple(nodes.intersection(a.item_at(i), b.item_at(i)) for i in range(max(len(a.prefix), len(b.prefix))))
    highs = [x.high for x in (a, b) if x.high is not None]
    first = (
        None if a.evaluated.first is None or b.evaluated.first is None else max(a.evaluated.first, b.evaluated.first)
    )
    evaluated = Items(first, tuple(dict.fromkeys((*a.evaluated.kinds, *b.evaluated.kinds))))
    return Arrays(
        prefix, nodes.intersection(a.rest, b.rest), max(a.low, b.low), min(highs, default=None), (*a.counts, *b.counts),
        a.unique or b.unique, evaluated,
    ).simplified(algebra)  # fmt: skip


def complement(a: Arrays, algebra: NodeAlgebra) -> list[Arrays]:
    """The arrays that are not in `a`, as a list of sets.

    Raises:
        GrammarError: the complement includes arrays with a repeated item, which cannot be expressed.
    """
    if a.unique:
        raise GrammarError("no grammar can require equal items; strict=False validates it afterwards", "uniqueItems")
    complement_of = algebra.nodes.complement
    alternatives = [Arrays(high=a.low - 1)] if a.low else []
    if a.high is not None:
        alternatives.append(Arrays(low=a.high + 1))
    for position, node in enumerate(a.prefix):
        if node != TRUE:
            alternatives.append(Arrays((*[TRUE] * position, complement_of(node)), low=position + 1))
    if a.rest != TRUE and (a.high is None or a.high > len(a.prefix)):
        alternatives.append(Arrays(counts=(Count(len(a.prefix), complement_of(a.rest), 1, None),)))
    for count in a.counts:
        if count.low:
            alternatives.append(Arrays(counts=(Count(count.start, count.node, 0, count.low - 1),)))
        if count.high is not None:
            alternatives.append(Arrays(counts=(Count(count.start, count.node, count.high + 1, None),)))
    return [simple for piece in alternatives if (simple := piece.simplified(algebra)) is not None]


def evaluate(a: Arrays, node: Node, algebra: NodeAlgebra) -> Arrays | None:
    """The arrays of `a` in which every unevaluated item satisfies `node`. In the result, all items are evaluated."""
    if a.evaluated.first is None:
        return a
    nodes = algebra.nodes
    allowed = nodes.union(node, *a.evaluated.kinds)
    size = max(len(a.prefix), a.evaluated.first)
    prefix = [a.item_at(i) if i < a.evaluated.first else nodes.intersection(a.item_at(i), allowed) for i in range(size)]
    return replace(a, prefix=tuple(prefix), rest=nodes.intersection(a.rest, allowed), evaluated=Items(None)).simplified(
        algebra
    )
