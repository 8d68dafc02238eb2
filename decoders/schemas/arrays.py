"""Sets of arrays: what stands at each position, how many, how many of a kind, all different or not."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..errors import GrammarError
from .nodes import FALSE, TRUE, Node
from .reach import Emptiness


@dataclass(frozen=True)
class Count:
    """From `low` to `high` items at position `start` or later are of `node`."""

    start: int
    node: Node
    low: int
    high: int | None


@dataclass(frozen=True)
class Items:
    """Items that some keyword has evaluated, for ``unevaluatedItems``: the first so many (None: all), and all of a kind."""

    first: int | None = 0
    kinds: tuple[Node, ...] = ()


@dataclass(frozen=True)
class Arrays:
    """Arrays of `low` to `high` items: the first ones of `prefix`, the others of `rest`.

    Attributes:
        counts: how many items of a kind there are.
        unique: no two items are equal.
        seen: what has been evaluated; no part of the set.
    """

    prefix: tuple[Node, ...] = ()
    rest: Node = TRUE
    low: int = 0
    high: int | None = None
    counts: tuple[Count, ...] = ()
    unique: bool = False
    seen: Items = Items()

    def at(self, position: int) -> Node:
        """What stands at `position`."""
        return self.prefix[position] if position < len(self.prefix) else self.rest

    def tidy(self, reach: Emptiness) -> Arrays | None:
        """The same set without positions that cannot be reached; None if it is empty for all one can tell."""
        high = self.high
        for position, node in enumerate(self.prefix):
            if (high is None or position < high) and reach.empty(node):
                high = position
        if (high is None or high > len(self.prefix)) and reach.empty(self.rest):
            high = len(self.prefix)
        if high is not None and (
            self.low > high or any(count.low > high - count.start for count in self.counts if count.low)
        ):
            return None
        if any(
            (count.high is not None and count.low > count.high) or (count.low and reach.empty(count.node))
            for count in self.counts
        ):
            return None
        counts = tuple(dict.fromkeys(count for count in self.counts if count.low or count.high is not None))
        prefix = self.prefix if high is None else self.prefix[:high]
        rest = FALSE if high is not None and high <= len(prefix) else self.rest
        return replace(
            self, prefix=prefix, rest=rest, high=high, counts=counts, unique=self.unique and high not in (0, 1)
        )


def both(a: Arrays, b: Arrays, reach: Emptiness) -> Arrays | None:
    """Arrays of `a` and of `b`; None if there are none."""
    nodes = reach.nodes
    prefix = tuple(nodes.both(a.at(i), b.at(i)) for i in range(max(len(a.prefix), len(b.prefix))))
    highs = [x.high for x in (a, b) if x.high is not None]
    first = None if a.seen.first is None or b.seen.first is None else max(a.seen.first, b.seen.first)
    seen = Items(first, tuple(dict.fromkeys((*a.seen.kinds, *b.seen.kinds))))
    return Arrays(
        prefix, nodes.both(a.rest, b.rest), max(a.low, b.low), min(highs, default=None), (*a.counts, *b.counts),
        a.unique or b.unique, seen,
    ).tidy(reach)  # fmt: skip


def others(a: Arrays, reach: Emptiness) -> list[Arrays]:
    """Arrays that are not of `a`.

    Raises:
        GrammarError: arrays in which something occurs twice are among them.
    """
    if a.unique:
        raise GrammarError("arrays in which an item occurs twice; strict=False validates them", "uniqueItems")
    negate = reach.nodes.negate
    left = [Arrays(high=a.low - 1)] if a.low else []
    if a.high is not None:
        left.append(Arrays(low=a.high + 1))
    for position, node in enumerate(a.prefix):
        if node != TRUE:
            left.append(Arrays((*[TRUE] * position, negate(node)), low=position + 1))
    if a.rest != TRUE and (a.high is None or a.high > len(a.prefix)):
        left.append(Arrays(counts=(Count(len(a.prefix), negate(a.rest), 1, None),)))
    for count in a.counts:
        if count.low:
            left.append(Arrays(counts=(Count(count.start, count.node, 0, count.low - 1),)))
        if count.high is not None:
            left.append(Arrays(counts=(Count(count.start, count.node, count.high + 1, None),)))
    return [tight for piece in left if (tight := piece.tidy(reach)) is not None]


def evaluate(a: Arrays, node: Node, reach: Emptiness) -> Arrays | None:
    """`a` with ``unevaluatedItems`` of `node`: afterwards all items are evaluated."""
    if a.seen.first is None:
        return a
    nodes = reach.nodes
    allowed = nodes.either(node, *a.seen.kinds)
    size = max(len(a.prefix), a.seen.first)
    prefix = [a.at(i) if i < a.seen.first else nodes.both(a.at(i), allowed) for i in range(size)]
    return replace(a, prefix=tuple(prefix), rest=nodes.both(a.rest, allowed), seen=Items(None)).tidy(reach)
