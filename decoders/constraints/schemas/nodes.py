"""Boolean expressions over schemas (nodes), each identified by a number: equal expressions have equal numbers.

A node stands for a set of JSON values: the values that a schema allows, a single value, or "all", "any" or "not" of other nodes.
A node refers to a schema and does not contain it, so schemas may be recursive through ``$ref``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable
from typing import Any, TypeAlias

from . import limits

Node: TypeAlias = int

#: The nodes that allow no value, and every value.
FALSE: Node = 0
TRUE: Node = 1


class Nodes:
    """The table of expressions: ``terms[node]`` is ("false",), ("true",), ("schema", content), ("value", content),
    ("not", node), ("all", nodes) or ("any", nodes).
    """

    def __init__(self) -> None:
        self.terms: list[tuple[str, Any]] = [("false", None), ("true", None)]
        self._known: dict[Hashable, Node] = {}

    def leaf(self, kind: str, key: Hashable, content: Any) -> Node:
        """The node of a schema or value; equal keys give the same node."""
        return self._intern((kind, key), (kind, content))

    def complement(self, node: Node) -> Node:
        if node in (TRUE, FALSE):
            return TRUE if node == FALSE else FALSE
        kind, content = self.terms[node]
        if kind == "not":
            positive: Node = content
            return positive
        if kind in ("all", "any"):
            parts = [self.complement(part) for part in content]
            return self.intersection(*parts) if kind == "any" else self.union(*parts)
        return self._intern(("not", node), ("not", node))

    def intersection(self, *nodes: Node) -> Node:
        """The node of the values that all of `nodes` allow."""
        return self._join("all", nodes, TRUE, FALSE)

    def union(self, *nodes: Node) -> Node:
        """The node of the values that any of `nodes` allows."""
        return self._join("any", nodes, FALSE, TRUE)

    def _join(self, kind: str, nodes: Iterable[Node], nothing: Node, absorbing: Node) -> Node:
        parts: set[Node] = set()
        for node in nodes:
            parts |= set(self.terms[node][1]) if self.terms[node][0] == kind else {node}
        parts.discard(nothing)
        if absorbing in parts or any(self.terms[part][0] == "not" and self.terms[part][1] in parts for part in parts):
            return absorbing
        if len(parts) <= 1:
            return parts.pop() if parts else nothing
        ordered = tuple(sorted(parts))
        return self._intern((kind, ordered), (kind, ordered))

    def _intern(self, key: Hashable, term: tuple[str, Any]) -> Node:
        if key not in self._known:
            if len(self.terms) > 20 * limits.PLACES:
                limits.exceeded(
                    "PLACES", limits.PLACES, "what the schema says about places of the text, multiplied out,"
                )
            self._known[key] = len(self.terms)
            self.terms.append(term)
        return self._known[key]


class NodeAlgebra(ABC):
    """Operations on nodes that :mod:`.arrays` and :mod:`.objects` need for the values inside arrays and objects.

    Attributes:
        nodes: the table of expressions.
    """

    nodes: Nodes

    @abstractmethod
    def empty(self, node: Node) -> bool:
        """Whether `node` certainly allows no value; False also if only a deeper search would show that it allows none."""

    @abstractmethod
    def step(self, count: int = 1) -> None:
        """Adds `count` steps to the work done so far. Raises GrammarError: more than ``limits.STEPS`` steps, or time is up."""
