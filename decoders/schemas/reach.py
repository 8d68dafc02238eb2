"""What the algebra of arrays and objects has to know about what is inside them."""

from __future__ import annotations

from abc import ABC, abstractmethod

from .nodes import Node, Nodes


class Emptiness(ABC):
    """The expressions, and which of them are known to be empty."""

    nodes: Nodes

    @abstractmethod
    def empty(self, node: Node) -> bool:
        """Whether nothing is of `node`, as far as a short look tells; False where it does not."""

    @abstractmethod
    def step(self, count: int = 1) -> None:
        """Counts work against the limit.

        Raises:
            GrammarError: too much of it.
        """
