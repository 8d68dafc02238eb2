"""What sets of arrays and objects have to know of the expressions inside them."""

from __future__ import annotations

from abc import ABC, abstractmethod

from .nodes import Node, Nodes


class NodeAlgebra(ABC):
    """The expressions, which of them are known to be empty, and a count of the work.

    Attributes:
        nodes: the table of expressions.
    """

    nodes: Nodes

    @abstractmethod
    def empty(self, node: Node) -> bool:
        """Whether `node` has no values, as far as a look of bounded depth tells; False where it does not."""

    @abstractmethod
    def step(self, count: int = 1) -> None:
        """Counts work against the limit.

        Raises:
            GrammarError: too much of it.
        """
