"""From shapes to a grammar of JSON texts: rules for places of the text, arrays and objects."""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import GrammarError
from ..patterns.deadline import check
from ..patterns.writer import slashed
from . import json_text, limits, notation, number_text
from .array_text import write_array
from .nodes import FALSE, Node
from .normaliser import Normaliser
from .notation import NOTHING, Expr, RuleReference, Terminal, Word, alt, text
from .object_text import write_object
from .pruning import prune
from .shapes import Shapes
from .strings import Strings


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


_DECIMALS = "Multiples of a decimal are exact; a validator that divides floats, as jsonschema does, refuses some: 0.7 is 7 times 0.1."
_ALL_PLACES = "Multiples of a decimal have all of its decimal places or none, where they are counted by llguidance: 1.50, not 1.5."
_BREAK = r"(?: |\r?\n[ \t]{0,40})?"
WHITESPACE = {
    "space": Whitespace("", "", ", ?", ": ?"),
    "compact": Whitespace("", "", ",", ":"),
    "flexible": Whitespace(_BREAK, _BREAK, _BREAK + "," + _BREAK, " ?: ?"),
}


class Writer:
    """Writes the rules of every place that can be reached from a node.

    Args:
        closed: objects that declare properties take no others, where the schema says nothing of others.

    Attributes:
        warnings: what has been left out on the way, one sentence each.
    """

    def __init__(self, normaliser: Normaliser, whitespace: Whitespace, closed: bool = False) -> None:
        self.normaliser, self.whitespace, self.closed = normaliser, whitespace, closed
        self.rules: dict[str, Expr] = {}
        self.todo: list[Node] = []
        self.places: set[Node] = set()
        self.warnings: list[str] = []

    def write(self, root: Node) -> dict[str, Expr]:
        """The rules, ``start`` first; none if `root` has no values."""
        self.rules["start"] = self.place(root)
        while self.todo:
            node = self.todo.pop()
            try:
                check("writing the grammar")
                self.rule(f"n{node}", self.alternatives_of(node, self.normaliser.shapes(node)))
            except GrammarError as problem:
                raise (
                    problem if problem.path is not None else self.normaliser.with_location(node, problem)
                ) from problem
        return prune(self.rules)

    def alternatives_of(self, node: Node, shapes: Shapes) -> Expr:
        """The texts of `shapes`, which are those of `node`."""
        alternatives: list[Expr] = [text(unit) for unit in ("null", "true", "false") if unit in shapes.units]
        written = [(one, number_text.expression(one)) for one in shapes.numbers]
        plain = "|".join(expression for _, expression in written if expression)
        alternatives += [text(plain)] if plain else []
        inlined = [one for one, expression in written if expression is None]
        for one, expression in written:
            if one.step is not None and one.step.denominator > 1:
                self.warning(_DECIMALS)
                if expression is None:
                    self.warning(_ALL_PLACES)
        alternatives += [notation.inline(number_text.schema(one)) for one in inlined]
        alternatives += [self.string(one) for one in shapes.strings]
        alternatives += [write_array(self, f"n{node}a{i}", one) for i, one in enumerate(shapes.arrays)]
        alternatives += [write_object(self, f"n{node}o{i}", one) for i, one in enumerate(shapes.objects)]
        return alt(*alternatives)

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

    def reference(self, name: str) -> Expr:
        """A reference to the rule of that name, which may be added later."""
        return RuleReference(name)

    def string(self, strings: Strings, behind: str = "") -> Expr:
        """The texts of `strings` in quotes, followed by what the regular expression `behind` matches."""
        written = strings.written
        if written is None:
            return NOTHING
        simple = _simple(written)
        lark = _lark(written) if simple is None else slashed(simple)
        if lark is None:
            return NOTHING
        tail = f" /{behind}/" if behind else ""
        return Word(Terminal(f"({lark}){tail}" if tail else lark, _Expression(written, simple, behind)))


@dataclass(frozen=True)
class _Expression:
    strings: Strings
    simple: str | None
    behind: str

    def __call__(self) -> str | None:
        expression = _regex(self.strings) if self.simple is None else self.simple
        return (
            None
            if expression is None
            else f"(?:{expression}){self.behind}"
            if "|" in expression
            else expression + self.behind
        )


def _simple(strings: Strings) -> str | None:
    """The regular expression of strings under at most one condition; None for others."""
    if strings.unconstrained:
        return json_text.FREE_STRING
    if strings.values is not None:
        return "|".join(json_text.literal(json_text.quoted(value)) for value in sorted(strings.values))
    if not strings.conditions and not strings.excluded:
        return f'"{json_text.length(strings.low, strings.high)}"'
    ((pattern, good),) = strings.conditions if len(strings.conditions) == 1 else ((None, False),)
    if pattern is not None and good and not strings.excluded and strings.low == 0 and strings.high is None:
        inside = json_text.inside(pattern)
        return None if inside is None else f'"(?:{inside})"'
    return None


def _regex(strings: Strings) -> str | None:
    try:
        expression = json_text.expression(strings.automaton())
    except GrammarError:  # too large for an expression; the grammar has its own way
        return None
    return None if expression is None else f'"(?:{expression})"'


def _lark(strings: Strings) -> str | None:
    """The definition of a terminal; None if nothing can be written."""
    parts = [slashed(f'"{json_text.length(strings.low, strings.high)}"')]
    for pattern, good in sorted(strings.conditions, key=repr):
        inside = json_text.inside(pattern)
        if inside is None and good:
            return None
        if inside is not None:
            parts.append(("" if good else "~") + slashed(f'"(?:{inside})"'))
    if strings.excluded:
        names = "|".join(json_text.literal(json_text.quoted(value)) for value in sorted(strings.excluded))
        parts.append("~" + slashed(names))
    return " & ".join(parts)
