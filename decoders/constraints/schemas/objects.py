"""Sets of JSON objects. A set has declared properties in order, classes (sets) of other keys, a bounded number of properties, and
undeclared properties that must exist.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

from . import limits, strings
from .nodes import FALSE, TRUE, Node, NodeAlgebra
from .strings import Strings


@dataclass(frozen=True)
class Property:
    """A declared property. An optional property with the node ``FALSE`` must be absent."""

    name: str
    node: Node
    required: bool = False


@dataclass(frozen=True)
class Keys:
    """The properties that keywords have evaluated: properties with one of `names`, with a key in one of `classes`, or `all`."""

    names: frozenset[str] = frozenset()
    classes: tuple[Strings, ...] = ()
    all: bool = False


@dataclass(frozen=True)
class Objects:
    """A set of objects with between `low` and `high` properties (None: no upper bound).

    Attributes:
        properties: the declared properties.
        rest: classes of undeclared keys, each with the node of their values; keys in none of these classes cannot occur. Classes
            that share keys have the same node.
        exists: each entry requires an undeclared property with a key in the entry's class, which is not enumerated, and a value that
            satisfies its node.
        evaluated: the properties that keywords have evaluated; this does not change which objects are in the set.
    """

    properties: tuple[Property, ...] = ()
    rest: tuple[tuple[Strings, Node], ...] = ((strings.ALL, TRUE),)
    low: int = 0
    high: int | None = None
    exists: tuple[tuple[Strings, Node], ...] = ()
    evaluated: Keys = Keys()

    @property
    def names(self) -> dict[str, Property]:
        return {prop.name: prop for prop in self.properties}

    def value(self, name: str) -> Node:
        """The node that the value of the undeclared key `name` satisfies."""
        return next((node for keys, node in self.rest if keys.contains(name)), FALSE)

    def simplified(self, algebra: NodeAlgebra) -> Objects | None:
        """This set without properties that cannot occur; None if it is known to be empty."""
        declared = list(self.properties)
        rest = []
        for keys, node in self.rest:
            if algebra.empty(node):
                continue
            if keys.values is None:
                rest.append((keys, node))
            else:  # if only a few keys are possible, they are treated as declared
                known = {prop.name for prop in declared}
                declared += [Property(name, node) for name in sorted(keys.values - known)]
        remaining = []
        for prop in declared:
            if algebra.empty(prop.node):
                if prop.required:
                    return None
                if any(keys.contains(prop.name) for keys, _ in rest):
                    remaining.append(Property(prop.name, FALSE))
            else:
                remaining.append(prop)
        needed = sum(prop.required for prop in remaining)
        if self.high is not None and max(needed, self.low) > self.high:
            return None
        if not rest and sum(prop.node != FALSE for prop in remaining) < self.low:
            return None
        exists = tuple(dict.fromkeys(self.exists))
        for keys, node in exists:
            if not any(
                strings.intersection(keys, other) and not algebra.empty(algebra.nodes.intersection(node, value))
                for other, value in rest
            ):
                return None
        low = self.low if self.low > needed else 0
        return replace(self, properties=tuple(remaining), rest=tuple(rest), low=low, exists=exists)


def intersection(a: Objects, b: Objects, algebra: NodeAlgebra) -> list[Objects]:
    """The objects that are in both `a` and `b`, as a list of sets."""
    pieces = []
    order = list(dict.fromkeys((*a.names, *b.names)))
    for left, right in product(_with_declared(a, order, algebra), _with_declared(b, order, algebra)):
        algebra.step()
        left_names, right_names = left.names, right.names
        declared = [
            Property(
                n,
                algebra.nodes.intersection(left_names[n].node, right_names[n].node),
                left_names[n].required or right_names[n].required,
            )
            for n in dict.fromkeys((*order, *left_names, *right_names))
        ]
        rest: dict[tuple[Strings, Node], None] = {}
        for (keys, node), (others_keys, other) in product(left.rest, right.rest):
            shared = strings.intersection(keys, others_keys)
            if shared is not None:
                rest[shared, algebra.nodes.intersection(node, other)] = None
        if len(rest) > limits.ALTERNATIVES:
            limits.exceeded("ALTERNATIVES", limits.ALTERNATIVES, "the number of classes of keys", "patternProperties")
        highs = [x.high for x in (a, b) if x.high is not None]
        evaluated = Keys(
            a.evaluated.names | b.evaluated.names,
            tuple(dict.fromkeys((*a.evaluated.classes, *b.evaluated.classes))),
            a.evaluated.all or b.evaluated.all,
        )
        joined = Objects(tuple(declared), tuple(rest), max(left.low, right.low), min(highs, default=None),
                         (*left.exists, *right.exists), evaluated)  # fmt: skip
        pieces.append(joined.simplified(algebra))
    return [piece for piece in pieces if piece is not None]


def complement(a: Objects, algebra: NodeAlgebra) -> list[Objects]:
    """The objects that are not in `a`, as a list of sets."""
    complement_of = algebra.nodes.complement
    left: list[Objects] = []
    for prop in a.properties:
        if prop.required:
            left.append(Objects((Property(prop.name, FALSE),)))
        if prop.node != TRUE:
            left.append(Objects((Property(prop.name, complement_of(prop.node), True),)))
    undeclared = Strings(excluded=frozenset(a.names)).simplified()
    exceptions = [(keys, complement_of(node)) for keys, node in a.rest if node != TRUE]
    exceptions += [(keys, TRUE) for keys in _complement_of_all([keys for keys, _ in a.rest])]
    for keys, node in exceptions:
        undeclared_keys = strings.intersection(keys, undeclared) if undeclared is not None else None
        if undeclared_keys is not None and undeclared_keys.values is not None:
            left += [Objects((Property(name, node, True),)) for name in sorted(undeclared_keys.values)]
        elif undeclared_keys is not None:
            left.append(Objects(exists=((undeclared_keys, node),)))
    if a.low:
        left.append(Objects(high=a.low - 1))
    if a.high is not None:
        left.append(Objects(low=a.high + 1))
    for keys, node in a.exists:
        free = [(other, TRUE) for other in strings.complement(keys)]
        left.append(Objects(rest=((keys, complement_of(node)), *free)))
    return [simple for piece in left if (simple := piece.simplified(algebra)) is not None]


def evaluate(a: Objects, node: Node, algebra: NodeAlgebra) -> Objects | None:
    """The objects of `a` in which every unevaluated property satisfies `node`. In the result, all properties are evaluated."""
    if a.evaluated.all:
        return a
    nodes = algebra.nodes

    def evaluated(name: str) -> bool:
        return name in a.evaluated.names or any(keys.contains(name) for keys in a.evaluated.classes)

    declared = [p if evaluated(p.name) else replace(p, node=nodes.intersection(p.node, node)) for p in a.properties]
    evaluated_names = a.evaluated.names - set(a.names)
    declared += [Property(name, a.value(name)) for name in sorted(evaluated_names)]
    rest: dict[tuple[Strings, Node], None] = {}
    for keys, value in a.rest:
        for known in a.evaluated.classes:
            if (part := strings.intersection(keys, known)) is not None:
                rest[part, value] = None
        for other_keys in _complement_of_all(a.evaluated.classes):
            if (part := strings.intersection(keys, other_keys)) is not None:
                rest[part, nodes.intersection(value, node)] = None
    return replace(a, properties=tuple(declared), rest=tuple(rest), evaluated=Keys(all=True)).simplified(algebra)


def _complement_of_all(classes: Sequence[Strings]) -> list[Strings]:
    """The strings in none of `classes`, as a list of sets."""
    left = [strings.ALL]
    for keys in classes:
        left = [
            intersection
            for a in left
            for b in strings.complement(keys)
            if (intersection := strings.intersection(a, b)) is not None
        ]
    return left


def _with_declared(a: Objects, order: Sequence[str], algebra: NodeAlgebra) -> list[Objects]:
    """The objects of `a` as a list of sets that declare a property for each name in `order`."""
    known = a.names
    added = tuple(Property(name, a.value(name)) for name in order if name not in known)
    return _resolve_exists(replace(a, properties=(*a.properties, *added)), algebra) if added else [a]


def _resolve_exists(a: Objects, algebra: NodeAlgebra) -> list[Objects]:
    """The objects of `a` as a list of sets in which no entry of ``exists`` has the key of a declared property."""
    for index, (keys, node) in enumerate(a.exists):
        declared = (*a.exists[:index], *a.exists[index + 1 :])
        names_with_key = [name for name in a.names if keys.contains(name)]
        if not names_with_key:
            continue
        pieces = []
        for name in names_with_key:
            algebra.step()
            properties = tuple(
                Property(p.name, algebra.nodes.intersection(p.node, node), True) if p.name == name else p
                for p in a.properties
            )
            pieces += _resolve_exists(replace(a, properties=properties, exists=declared), algebra)
        undeclared_keys = strings.intersection(keys, Strings(excluded=frozenset(names_with_key)))
        if undeclared_keys is not None:
            pieces += _resolve_exists(replace(a, exists=(*declared, (undeclared_keys, node))), algebra)
        return pieces
    return [a]
