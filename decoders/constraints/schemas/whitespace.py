"""White space in JSON texts; and the rules of a grammar under construction, with the places of the text that still lack a rule."""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import GrammarError
from ..patterns.limits import check
from . import limits, string_text
from .nodes import FALSE, Node
from .normaliser import Normaliser
from .notation import NOTHING, Expr, RuleReference
from .strings import Strings


@dataclass(frozen=True)
class Whitespace:
    """White space within a text, as regular expressions; bounded everywhere.

    Attributes:
        opened: after an opening bracket.
        closing: before a closing bracket, if anything is inside.
        comma: the comma with the space after it.
        colon: the colon with the space after it.
        empty: between empty brackets.
    """

    opened: str
    closing: str
    comma: str
    colon: str
    empty: str = ""

    @staticmethod
    def indented(depth: int, indent: int) -> Whitespace:
        """White space in the brackets at `depth` (0: outermost) of texts with a line per member, as ``json.dumps`` writes them."""
        inside, outside = ("\\n" + " " * (indent * each) for each in (depth + 1, depth))
        return Whitespace(inside, outside, "," + inside, ": ")


#: Greatest number of blanks per level.
MOST_INDENT = 16
_BREAK = r"(?: |\r?\n[ \t]{0,40})?"
WHITESPACE = {
    "space": Whitespace("", "", ", ?", ": ?"),
    "compact": Whitespace("", "", ",", ":"),
    "flexible": Whitespace(_BREAK, _BREAK, _BREAK + "," + _BREAK, " ?: ?", _BREAK),
}


class Rules:
    """The rules of a grammar that a writer has added so far.

    Args:
        whitespace: the white space of the texts; or the number of blanks per level, for texts with a line per member.
        closed: whether undeclared properties are forbidden in objects whose schema declares properties and says nothing about others.

    Attributes:
        rules: the rules, by their names.
        todo: nodes that a rule refers to and that have no rule yet, each with its depth of brackets.
        depth: number of brackets around the current place, if white space depends on it, else 0.
        warnings: how the texts differ from the schema, one sentence each.
    """

    def __init__(self, normaliser: Normaliser, whitespace: Whitespace | int, closed: bool = False) -> None:
        self.normaliser, self.closed, self._whitespace = normaliser, closed, whitespace
        self.rules: dict[str, Expr] = {}
        self.todo: list[tuple[Node, int]] = []
        self.places: set[tuple[Node, int]] = set()
        self.depth = -1 if isinstance(whitespace, int) else 0
        self.warnings: list[str] = []

    @property
    def whitespace(self) -> Whitespace:
        """White space at the current depth."""
        given = self._whitespace
        return Whitespace.indented(self.depth, given) if isinstance(given, int) else given

    def place(self, node: Node) -> Expr:
        """A reference to the rule for the texts of `node`; the rule itself is written later."""
        if node == FALSE:
            return NOTHING
        depth = self.depth + 1 if isinstance(self._whitespace, int) else 0
        if depth > limits.INDENTED:
            raise GrammarError(
                f"indent: values may nest more than {limits.INDENTED} deep here, and every depth needs its own rules: bound the "
                'depth (a closed schema without references to itself), or leave indent out and take whitespace="flexible"'
            )
        if (node, depth) not in self.places:
            self.places.add((node, depth))
            self.todo.append((node, depth))
            if len(self.places) > limits.PLACES:
                limits.exceeded("PLACES", limits.PLACES, "places of the text with their own schema", path="$")
        return RuleReference(self.name_of(node, depth))

    @staticmethod
    def name_of(node: Node, depth: int) -> str:
        """The name of the rule for `node` at `depth`. The names of rules for parts of this rule begin with the same name."""
        return f"n{node}" + (f"d{depth}" if depth else "")

    def rule(self, name: str, expr: Expr) -> Expr:
        """Adds a rule, and returns a reference to it."""
        self.rules[name] = expr
        check("writing the grammar")
        if len(self.rules) > limits.RULES:
            limits.exceeded("RULES", limits.RULES, "the grammar", path="$")
        return RuleReference(name)

    def key(self, name: str) -> str:
        """A regular expression for a member's quoted name."""
        return string_text.literal(string_text.quoted(name))

    def string(self, strings: Strings, suffix: str = "") -> Expr:
        """An expression for the texts of `strings`, each followed by a match of the regular expression `suffix`."""
        return string_text.write_string(strings, suffix)

    def warning(self, text: str) -> None:
        """Adds `text` to :attr:`warnings`, if it is new."""
        if text not in self.warnings:
            self.warnings.append(text)
