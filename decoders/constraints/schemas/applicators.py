"""Keywords that apply schemas to the value itself (``allOf``, ``not``, ``if``, …), as operations on shapes (sets of values)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from ...errors import GrammarError
from . import arrays, objects, shapes
from .document import Place
from .nodes import FALSE, TRUE, Node
from .objects import Objects, Property
from .shapes import ALL, NONE, Shapes

if TYPE_CHECKING:
    from .normaliser import Normaliser


def _parts(normaliser: Normaliser, place: Place, keyword: str) -> list[Node]:
    """The nodes of the schemas that `keyword` lists. Raises GrammarError: the keyword's value is no list."""
    if not isinstance(place.schema[keyword], list):
        raise GrammarError(f"{keyword} is a list of schemas, not {place.schema[keyword]!r}", keyword)
    return [normaliser.node(place, keyword, index) for index in range(len(place.schema[keyword]))]


def _all_of(normaliser: Normaliser, place: Place, current: Shapes) -> Shapes:
    for part in _parts(normaliser, place, "allOf"):
        current = normaliser.intersect(current, part)
    return current


def _any_of(normaliser: Normaliser, place: Place, current: Shapes, keyword: str = "anyOf") -> Shapes:
    union = NONE
    for node in _parts(normaliser, place, keyword):
        part = normaliser.intersect(current, node)
        # If two alternatives hold, both evaluate parts of the value. So the values for which both hold are a separate alternative.
        together = shapes.intersection(union, part, normaliser) if normaliser.evaluation else NONE
        union = shapes.union(shapes.union(union, part), together)
    return union


def _one_of(normaliser: Normaliser, place: Place, current: Shapes) -> Shapes:
    parts = [normaliser.intersect(current, node) for node in _parts(normaliser, place, "oneOf")]
    others = parts
    if normaliser.dropped:
        others = [
            normaliser.intersect(current, node) for node in _parts(normaliser, normaliser.opposite(place), "oneOf")
        ]
    union = NONE
    for index, part in enumerate(parts):
        for other in others[:index] + others[index + 1 :]:
            part = shapes.difference(part, other, normaliser)
        union = shapes.union(union, part)
    return union


def one_of_as_any_of(normaliser: Normaliser, place: Place, current: Shapes) -> Shapes:
    """The values of `current` that a schema under ``oneOf`` allows, as if the keyword were ``anyOf``; used if ``oneOf`` is left out."""
    return _any_of(normaliser, place, current, "oneOf")


def _not(normaliser: Normaliser, place: Place, current: Shapes) -> Shapes:
    excluded = normaliser.node(normaliser.opposite(place), "not")
    return shapes.difference(current, normaliser.normalise(excluded), normaliser)


def _if(normaliser: Normaliser, place: Place, current: Shapes) -> Shapes:
    schema = place.schema
    if "then" not in schema and "else" not in schema and not normaliser.evaluation:
        return current
    then = normaliser.intersect(current, normaliser.node(place, "if"))
    if "then" in schema:
        then = normaliser.intersect(then, normaliser.node(place, "then"))
    condition = normaliser.node(normaliser.opposite(place), "if")
    otherwise = shapes.difference(current, normaliser.normalise(condition), normaliser)
    if "else" in schema:
        otherwise = normaliser.intersect(otherwise, normaliser.node(place, "else"))
    return shapes.union(then, otherwise)


def _dependent(keyword: str) -> Callable[[Normaliser, Place, Shapes], Shapes]:
    def combine(normaliser: Normaliser, place: Place, current: Shapes) -> Shapes:
        if not isinstance(place.schema[keyword], dict):
            raise GrammarError(f"{keyword} is an object, not {place.schema[keyword]!r}", keyword)
        for name, needs in place.schema[keyword].items():
            absent = replace(ALL, objects=(Objects((Property(name, FALSE),)),))
            present = Shapes(objects=(Objects((Property(name, TRUE, True),)),))
            with_name = shapes.intersection(current, present, normaliser)
            if isinstance(needs, list):
                required = Objects(tuple(Property(need, TRUE, True) for need in needs))
                with_name = shapes.intersection(with_name, Shapes(objects=(required,)), normaliser)
            else:
                with_name = normaliser.intersect(with_name, normaliser.node(place, keyword, name))
            current = shapes.union(shapes.intersection(current, absent, normaliser), with_name)
        return current

    return combine


def _unevaluated(keyword: str) -> Callable[[Normaliser, Place, Shapes], Shapes]:
    def combine(normaliser: Normaliser, place: Place, current: Shapes) -> Shapes:
        node = normaliser.node(place, keyword)
        if keyword == "unevaluatedItems":
            arrays_allowed = [arrays.evaluate(shape, node, normaliser) for shape in current.arrays]
            return replace(current, arrays=tuple(dict.fromkeys(shape for shape in arrays_allowed if shape is not None)))
        objects_allowed = [objects.evaluate(shape, node, normaliser) for shape in current.objects]
        return replace(current, objects=tuple(dict.fromkeys(shape for shape in objects_allowed if shape is not None)))

    return combine


#: The operation of each keyword, in the order of application; each narrows the shapes.
APPLICATORS: dict[str, Callable[[Normaliser, Place, Shapes], Shapes]] = {
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
