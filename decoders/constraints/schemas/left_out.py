"""What ``strict=False`` leaves out of a language: which keyword, and what is left without it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from os.path import commonprefix
from typing import TYPE_CHECKING

from ...errors import GrammarError
from . import keywords
from .shapes import NONE, Shapes

if TYPE_CHECKING:
    from .normaliser import Normaliser

_OF_OBJECTS = ("dependencies", "dependentRequired", "dependentSchemas", "unevaluatedProperties")
#: Keywords that evaluate items or properties, as ``unevaluatedItems`` and ``unevaluatedProperties`` understand it.
EVALUATING = frozenset((
    "prefixItems", "items", "additionalItems", "contains", "properties", "patternProperties", "additionalProperties", "allOf",
    "anyOf", "oneOf", "if", "dependentSchemas", "unevaluatedItems", "unevaluatedProperties",
))  # fmt: skip
#: Keywords that bring about what another one is about, through ``not`` and the like, those first that are left out at least cost.
CAUSES = {
    "minProperties": ("maxProperties", "dependentRequired", "dependentSchemas", "dependencies"),
    "contains": ("maxContains", "items", "additionalItems", "unevaluatedItems"),
    "not": ("additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames", "oneOf", "if"),
    "maxProperties": ("minProperties",),
    "minimum": ("maximum", "exclusiveMinimum", "exclusiveMaximum", "const", "enum"),
}
#: What to leave out where nobody knows what a schema is too much for, those first that are seldom needed.
COARSE = (
    "not", "if", "oneOf", "contains", "unevaluatedItems", "unevaluatedProperties", "dependentSchemas", "dependentRequired",
    "dependencies", "anyOf", "allOf", "patternProperties", "propertyNames", "const", "enum",
)  # fmt: skip


def without(shapes: Shapes, left_out: Iterable[str]) -> Shapes:
    """The values of `shapes` that are of no type of which a keyword of `left_out` says something."""
    for keyword in left_out:
        if keyword in keywords.NUMBERS:
            shapes = replace(shapes, numbers=())
        elif keyword in keywords.STRINGS:
            shapes = replace(shapes, strings=())
        elif keyword in keywords.ARRAYS or keyword == "unevaluatedItems":
            shapes = replace(shapes, arrays=())
        elif keyword in keywords.OBJECTS or keyword in _OF_OBJECTS:
            shapes = replace(shapes, objects=())
        else:
            return NONE
    return shapes


def droppable(normaliser: Normaliser, problem: GrammarError) -> tuple[str, str] | None:
    """(path, keyword) of what may be left out for `problem`: its cause, or else a keyword with schemas near it; None for nothing."""
    path, keyword = problem.path or "", problem.keyword or ""
    places = [content for kind, content in normaliser.nodes.terms if kind == "schema"]
    for place in places:
        if (path, keyword) not in normaliser.dropped and normaliser.reads(place, keyword):
            paths = [place.path]
            if keyword == "patternProperties" and isinstance(place.schema[keyword], dict):
                paths += [place.path_of(keyword, text) for text in place.schema[keyword]]
            if path in paths:
                return path, keyword
    places.sort(key=lambda place: len(commonprefix([place.path, path])), reverse=True)  # noqa: RUF071 -- no files
    return next(((place.path, name) for place in places for name in COARSE if normaliser.reads(place, name)), None)
