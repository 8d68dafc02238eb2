"""Writes a grammar of JSON texts from shapes (sets of values by type): rules for places of the text, arrays and objects."""

from __future__ import annotations

from ...errors import GrammarError
from ..patterns.limits import check
from . import notation, number_text
from .array_text import write_array
from .nodes import Node
from .notation import Expr, alt, prune, seq, text
from .object_text import ObjectWriter
from .shapes import Shapes
from .whitespace import Rules

_DECIMALS = "Multiples of a decimal are exact; a validator that divides floats, as jsonschema does, refuses some: 0.7 is 7 times 0.1."
_ALL_PLACES = "Multiples of a decimal that llguidance counts have all of its decimal places or none: 1.50, not 1.5."


class Writer(Rules):
    """Writes a rule for a root node, and for each node that a written rule refers to."""

    def write(self, root: Node) -> dict[str, Expr]:
        """The rules by name, ``start`` first; empty if `root` allows no value."""
        self.rules["start"] = self.root(root)
        while self.todo:
            node, self.depth = self.todo.pop()
            try:
                check("writing the grammar")
                name = self.name_of(node, self.depth)
                self.rule(name, self.alternatives_of(name, self.normaliser.shapes(node)))
            except GrammarError as problem:
                raise (
                    problem if problem.path is not None else self.normaliser.with_location(node, problem)
                ) from problem
        return prune(self.rules)

    def root(self, root: Node) -> Expr:
        """The expression for the whole text, a value that the node `root` allows."""
        return self.place(root)

    def alternatives_of(self, name: str, shapes: Shapes) -> Expr:
        """An expression for the JSON texts of the values in `shapes`. Names of rules for arrays and objects begin with `name`."""
        alternatives = [*self.scalars(shapes), *(self.string(one) for one in shapes.strings)]
        alternatives += [write_array(self, f"{name}a{i}", one) for i, one in enumerate(shapes.arrays)]
        alternatives += [ObjectWriter(self, f"{name}o{i}", one).write() for i, one in enumerate(shapes.objects)]
        return alt(*alternatives)

    def scalars(self, shapes: Shapes, suffix: str = "") -> list[Expr]:
        """Expressions for what `shapes` allows of null, true, false and numbers, each followed by a match of the regex `suffix`."""
        alternatives: list[Expr] = [text(unit + suffix) for unit in ("null", "true", "false") if unit in shapes.units]
        written = [(one, number_text.expression(one)) for one in shapes.numbers]
        plain = "|".join(expression for _, expression in written if expression)
        alternatives += [text(f"(?:{plain}){suffix}" if suffix else plain)] if plain else []
        inlined = [one for one, expression in written if expression is None]
        for one, expression in written:
            if one.step is not None and one.step.denominator > 1:
                self.warning(_DECIMALS)
                if expression is None:
                    self.warning(_ALL_PLACES)
        more = [text(suffix)] if suffix else []
        return alternatives + [seq(notation.inline(number_text.schema(one)), *more) for one in inlined]
