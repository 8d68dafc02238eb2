"""Keywords that apply schemas to the value itself (``allOf``, ``not``, ``if``, …), as operations on shapes (sets of values)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ...errors import GrammarError
from . import arrays, objects, shapes
from .document import Place
from .nodes import FALSE, TRUE, Node
from .objects import Objects, Property
from .shapes import ALL, NONE, SchemaAlgebra, Shapes


def _parts(algebra: SchemaAlgebra, place: Place, keyword: str) -> list[Node]:
    """The nodes of the schemas that `keyword` lists. Raises GrammarError: the keyword's value is not a list."""
    if not isinstance(place.schema[keyword], list):
        raise GrammarError(f"{keyword} must be a list of schemas, not {place.schema[keyword]!r}", keyword)
    return [algebra.node(place, keyword, index) for index in range(len(place.schema[keyword]))]


def _all_of(algebra: SchemaAlgebra, place: Place, current: Shapes) -> Shapes:
    for part in _parts(algebra, place, "allOf"):
        current = algebra.intersect(current, part)
    return current


def _any_of(algebra: SchemaAlgebra, place: Place, current: Shapes, keyword: str = "anyOf") -> Shapes:
    union = NONE
    for node in _parts(algebra, place, keyword):
        part = algebra.intersect(current, node)
        # If two alternatives hold, both evaluate parts of the value. So the values for which both hold are a separate alternative.
        together = shapes.intersection(union, part, algebra) if algebra.evaluation else NONE
        union = shapes.union(shapes.union(union, part), together)
    return union


def _one_of(algebra: SchemaAlgebra, place: Place, current: Shapes) -> Shapes:
    parts = [algebra.intersect(current, node) for node in _parts(algebra, place, "oneOf")]
    others = parts
    if algebra.dropped:
        others = [algebra.intersect(current, node) for node in _parts(algebra, algebra.opposite(place), "oneOf")]
    union = NONE
    for index, part in enumerate(parts):
        for other in others[:index] + others[index + 1 :]:
            part = shapes.difference(part, other, algebra)
        union = shapes.union(union, part)
    return union


def one_of_as_any_of(algebra: SchemaAlgebra, place: Place, current: Shapes) -> Shapes:
    """The values of `current` that a schema under ``oneOf`` allows, as if the keyword were ``anyOf``; used if ``oneOf`` is left out."""
    return _any_of(algebra, place, current, "oneOf")


def _not(algebra: SchemaAlgebra, place: Place, current: Shapes) -> Shapes:
    excluded = algebra.node(algebra.opposite(place), "not")
    return shapes.difference(current, algebra.normalise(excluded), algebra)


def _if(algebra: SchemaAlgebra, place: Place, current: Shapes) -> Shapes:
    schema = place.schema
    if "then" not in schema and "else" not in schema and not algebra.evaluation:
        return current
    then = algebra.intersect(current, algebra.node(place, "if"))
    if "then" in schema:
        then = algebra.intersect(then, algebra.node(place, "then"))
    condition = algebra.node(algebra.opposite(place), "if")
    otherwise = shapes.difference(current, algebra.normalise(condition), algebra)
    if "else" in schema:
        otherwise = algebra.intersect(otherwise, algebra.node(place, "else"))
    return shapes.union(then, otherwise)


def _dependent(keyword: str) -> Callable[[SchemaAlgebra, Place, Shapes], Shapes]:
    def combine(algebra: SchemaAlgebra, place: Place, current: Shapes) -> Shapes:
        if not isinstance(place.schema[keyword], dict):
            raise GrammarError(f"{keyword} must be an object, not {place.schema[keyword]!r}", keyword)
        for name, needs in place.schema[keyword].items():
            absent = replace(ALL, objects=(Objects((Property(name, FALSE),)),))
            present = Shapes(objects=(Objects((Property(name, TRUE, True),)),))
            with_name = shapes.intersection(current, present, algebra)
            if isinstance(needs, list):
                required = Objects(tuple(Property(need, TRUE, True) for need in needs))
                with_name = shapes.intersection(with_name, Shapes(objects=(required,)), algebra)
            else:
                with_name = algebra.intersect(with_name, algebra.node(place, keyword, name))
            current = shapes.union(shapes.intersection(current, absent, algebra), with_name)
        return current

    return combine


def _unevaluated(keyword: str) -> Callable[[SchemaAlgebra, Place, Shapes], Shapes]:
    def combine(algebra: SchemaAlgebra, place: Place, current: Shapes) -> Shapes:
        node = algebra.node(place, keyword)
        if keyword == "unevaluatedItems":
            arrays_allowed = [arrays.evaluate(shape, node, algebra) for shape in current.arrays]
            return replace(current, arrays=tuple(dict.fromkeys(shape for shape in arrays_allowed if shape is not None)))
        objects_allowed = [objects.evaluate(shape, node, algebra) for shape in current.objects]
        return replace(current, objects=tuple(dict.fromkeys(shape for shape in objects_allowed if shape is not None)))

    return combine


#: The operation of each keyword, in the order of application; each narrows the shapes.
APPLICATORS: dict[str, Callable[[SchemaAlgebra, Place, Shapes], Shapes]] = {
    "allOf": _all_of,
    "anyOf": _any_of,
    "oneOf": _one_of,
    "not": _not,
    "if": _if,
    "dependencies": _dependent("dependencies"),
    "dependentRequired": _dependent("dependentRequired"),
    "dependentSchemas": _dependent("dependentSchemas"),
    "unevaluatedItems": _unevaluated("unevaluatedItems"),
    "unevaluatedProperties": _unevaluated("unevaluatedProperties"),
}
