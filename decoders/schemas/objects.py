"""Sets of objects: declared properties in their order, classes of other keys, how many, and what must occur somewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

from . import limits, strings
from .nodes import FALSE, TRUE, Node
from .reach import Emptiness
from .strings import Strings


@dataclass(frozen=True)
class Property:
    """A declared property; if it is not required and of ``FALSE`` it must be absent."""

    name: str
    node: Node
    required: bool = False


@dataclass(frozen=True)
class Keys:
    """Properties that some keyword has evaluated, for ``unevaluatedProperties``."""

    names: frozenset[str] = frozenset()
    classes: tuple[Strings, ...] = ()
    all: bool = False


@dataclass(frozen=True)
class Objects:
    """Objects of `low` to `high` properties.

    Attributes:
        properties: declared ones.
        rest: classes of other keys and what their values are; a key of none cannot occur. Two classes share keys only
            if they agree on the values.
        some: for each, some property that is not declared has such a key and such a value.
        seen: what has been evaluated; no part of the set.
    """

    properties: tuple[Property, ...] = ()
    rest: tuple[tuple[Strings, Node], ...] = ((strings.ALL, TRUE),)
    low: int = 0
    high: int | None = None
    some: tuple[tuple[Strings, Node], ...] = ()
    seen: Keys = Keys()

    @property
    def names(self) -> dict[str, Property]:
        return {prop.name: prop for prop in self.properties}

    def value(self, name: str) -> Node:
        """What the value of a key is that is not declared."""
        return next((node for keys, node in self.rest if keys.holds(name)), FALSE)

    def tidy(self, reach: Emptiness) -> Objects | None:
        """The same set without properties that cannot be there; None if it is empty for all one can tell."""
        declared = list(self.properties)
        rest = []
        for keys, node in self.rest:
            if reach.empty(node):
                continue
            if keys.values is None or keys.formats:
                rest.append((keys, node))
            else:  # a few keys are as good as declared
                known = {prop.name for prop in declared}
                declared += [Property(name, node) for name in sorted(keys.values - known)]
        remaining = []
        for prop in declared:
            if reach.empty(prop.node):
                if prop.required:
                    return None
                if any(keys.holds(prop.name) for keys, _ in rest):
                    remaining.append(Property(prop.name, FALSE))
            else:
                remaining.append(prop)
        needed = sum(prop.required for prop in remaining)
        if self.high is not None and max(needed, self.low) > self.high:
            return None
        if not rest and sum(prop.node != FALSE for prop in remaining) < self.low:
            return None
        some = tuple(dict.fromkeys(self.some))
        for keys, node in some:
            if not any(
                strings.both(keys, other) and not reach.empty(reach.nodes.both(node, value)) for other, value in rest
            ):
                return None
        low = self.low if self.low > needed else 0
        return replace(self, properties=tuple(remaining), rest=tuple(rest), low=low, some=some)


def both(a: Objects, b: Objects, reach: Emptiness) -> list[Objects]:
    """Objects of `a` and of `b`, as alternatives."""
    pieces = []
    order = list(dict.fromkeys((*a.names, *b.names)))
    for left, right in product(_declare(a, order, reach), _declare(b, order, reach)):
        reach.step()
        left_names, right_names = left.names, right.names
        declared = [
            Property(
                n,
                reach.nodes.both(left_names[n].node, right_names[n].node),
                left_names[n].required or right_names[n].required,
            )
            for n in dict.fromkeys((*order, *left_names, *right_names))
        ]
        rest: dict[tuple[Strings, Node], None] = {}
        for (keys, node), (others_keys, other) in product(left.rest, right.rest):
            shared = strings.both(keys, others_keys)
            if shared is not None:
                rest[shared, reach.nodes.both(node, other)] = None
        if len(rest) > limits.ALTERNATIVES:
            limits.exceeded("ALTERNATIVES", limits.ALTERNATIVES, "the number of classes of keys", "patternProperties")
        highs = [x.high for x in (a, b) if x.high is not None]
        seen = Keys(
            a.seen.names | b.seen.names,
            tuple(dict.fromkeys((*a.seen.classes, *b.seen.classes))),
            a.seen.all or b.seen.all,
        )
        joined = Objects(tuple(declared), tuple(rest), max(left.low, right.low), min(highs, default=None),
                         (*left.some, *right.some), seen)  # fmt: skip
        pieces.append(joined.tidy(reach))
    return [piece for piece in pieces if piece is not None]


def others(a: Objects, reach: Emptiness) -> list[Objects]:
    """Objects that are not of `a`."""
    negate = reach.nodes.negate
    left: list[Objects] = []
    for prop in a.properties:
        if prop.required:
            left.append(Objects((Property(prop.name, FALSE),)))
        if prop.node != TRUE:
            left.append(Objects((Property(prop.name, negate(prop.node), True),)))
    undeclared = Strings(excluded=frozenset(a.names)).tidy()
    exceptions = [(keys, negate(node)) for keys, node in a.rest if node != TRUE]
    exceptions += [(keys, TRUE) for keys in _outside([keys for keys, _ in a.rest])]
    for keys, node in exceptions:
        rare = strings.both(keys, undeclared) if undeclared is not None else None
        if rare is not None:
            left += _settle(Objects(some=((rare, node),)), reach)
    if a.low:
        left.append(Objects(high=a.low - 1))
    if a.high is not None:
        left.append(Objects(low=a.high + 1))
    for keys, node in a.some:
        free = [(other, TRUE) for other in strings.others(keys)]
        left.append(Objects(rest=((keys, negate(node)), *free)))
    return [tight for piece in left if (tight := piece.tidy(reach)) is not None]


def evaluate(a: Objects, node: Node, reach: Emptiness) -> Objects | None:
    """`a` with ``unevaluatedProperties`` of `node`: afterwards all properties are evaluated."""
    if a.seen.all:
        return a
    nodes = reach.nodes

    def evaluated(name: str) -> bool:
        return name in a.seen.names or any(keys.holds(name) for keys in a.seen.classes)

    declared = [p if evaluated(p.name) else replace(p, node=nodes.both(p.node, node)) for p in a.properties]
    loose = a.seen.names - set(a.names)
    declared += [Property(name, a.value(name)) for name in sorted(loose)]
    rest: dict[tuple[Strings, Node], None] = {}
    for keys, value in a.rest:
        for known in a.seen.classes:
            if (part := strings.both(keys, known)) is not None:
                rest[part, value] = None
        for gap in _outside(a.seen.classes):
            if (part := strings.both(keys, gap)) is not None:
                rest[part, nodes.both(value, node)] = None
    return replace(a, properties=tuple(declared), rest=tuple(rest), seen=Keys(all=True)).tidy(reach)


def _outside(classes: Sequence[Strings]) -> list[Strings]:
    """Strings of none of `classes`."""
    left = [strings.ALL]
    for keys in classes:
        left = [both for a in left for b in strings.others(keys) if (both := strings.both(a, b)) is not None]
    return left


def _declare(a: Objects, order: Sequence[str], reach: Emptiness) -> list[Objects]:
    """`a` with all names of `order` declared."""
    known = a.names
    fresh = tuple(Property(name, a.value(name)) for name in order if name not in known)
    return _settle(replace(a, properties=(*a.properties, *fresh)), reach) if fresh else [a]


def _settle(a: Objects, reach: Emptiness) -> list[Objects]:
    """`a` as alternatives in which ``some`` is about keys that are not declared."""
    for index, (keys, node) in enumerate(a.some):
        declared = (*a.some[:index], *a.some[index + 1 :])
        hits = sorted(keys.values) if keys.values is not None else [name for name in a.names if keys.holds(name)]
        if not hits:
            continue
        pieces = []
        for name in hits:
            reach.step()
            props = tuple(
                Property(p.name, reach.nodes.both(p.node, node), True) if p.name == name else p for p in a.properties
            )
            if name not in a.names:
                props = (*props, Property(name, reach.nodes.both(a.value(name), node), True))
            pieces += _settle(replace(a, properties=props, some=declared), reach)
        if keys.values is None:
            rare = strings.both(keys, Strings(excluded=frozenset(hits)))
            if rare is not None:
                pieces += _settle(replace(a, some=(*declared, (rare, node))), reach)
        return pieces
    return [a]
