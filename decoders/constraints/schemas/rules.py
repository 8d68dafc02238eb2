"""The rules of a grammar while they are written: which there are, and for which places of the text some are still to come."""

from __future__ import annotations

from dataclasses import dataclass

from ..patterns.limits import check
from . import limits
from .nodes import FALSE, Node
from .normaliser import Normaliser
from .notation import NOTHING, Expr, RuleReference


@dataclass(frozen=True)
class Whitespace:
    """White space that may stand in a text, as regular expressions; bounded everywhere.

    Attributes:
        opened: after an opening bracket.
        closing: before a closing one, if anything is inside.
        comma: the sign and what may follow it.
        colon: likewise.
    """

    opened: str
    closing: str
    comma: str
    colon: str


_BREAK = r"(?: |\r?\n[ \t]{0,40})?"
WHITESPACE = {
    "space": Whitespace("", "", ", ?", ": ?"),
    "compact": Whitespace("", "", ",", ":"),
    "flexible": Whitespace(_BREAK, _BREAK, _BREAK + "," + _BREAK, " ?: ?"),
}


class Rules:
    """The rules written so far.

    Args:
        closed: objects that declare properties take no others, where the schema says nothing of others.

    Attributes:
        rules: by their names.
        todo: places of the text that a rule refers to and that have none yet.
        warnings: what has been left out on the way, one sentence each.
    """

    def __init__(self, normaliser: Normaliser, whitespace: Whitespace, closed: bool = False) -> None:
        self.normaliser, self.whitespace, self.closed = normaliser, whitespace, closed
        self.rules: dict[str, Expr] = {}
        self.todo: list[Node] = []
        self.places: set[Node] = set()
        self.warnings: list[str] = []

    def place(self, node: Node) -> Expr:
        """The texts of `node`."""
        if node == FALSE:
            return NOTHING
        if node not in self.places:
            self.places.add(node)
            self.todo.append(node)
            if len(self.places) > limits.PLACES:
                limits.exceeded("PLACES", limits.PLACES, "places of the text with a schema of their own", path="$")
        return RuleReference(f"n{node}")

    def rule(self, name: str, expr: Expr) -> Expr:
        """Adds a rule, and returns a reference to it."""
        self.rules[name] = expr
        check("writing the grammar")
        if len(self.rules) > limits.RULES:
            limits.exceeded("RULES", limits.RULES, "the grammar", path="$")
        return RuleReference(name)

    def warning(self, text: str) -> None:
        """Adds to :attr:`warnings`."""
        if text not in self.warnings:
            self.warnings.append(text)
