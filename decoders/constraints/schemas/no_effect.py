"""Keywords without effect: those that ``strict=False`` leaves out of a language, and names that are no keywords at all."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from . import formats, keywords
from .document import Place, known
from .shapes import NONE, Shapes

if TYPE_CHECKING:
    pass


_OF_OBJECTS = ("dependencies", "dependentRequired", "dependentSchemas", "unevaluatedProperties")
#: Keywords that evaluate items or properties, as ``unevaluatedItems`` and ``unevaluatedProperties`` understand it.
EVALUATING = frozenset((
    "prefixItems", "items", "additionalItems", "contains", "properties", "patternProperties", "additionalProperties", "allOf",
    "anyOf", "oneOf", "if", "dependentSchemas", "unevaluatedItems", "unevaluatedProperties",
))  # fmt: skip
#: Keywords that cause a problem that is reported of another one, through ``not`` and the like; those come first that are least missed.
CAUSES = {
    "minProperties": ("maxProperties", "dependentRequired", "dependentSchemas", "dependencies"),
    "contains": ("maxContains", "items", "additionalItems", "unevaluatedItems"),
    "not": ("additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames", "oneOf", "if"),
    "maxProperties": ("minProperties",),
    "minimum": ("maximum", "exclusiveMinimum", "exclusiveMaximum", "const", "enum"),
}
#: What to leave out where the cause of a problem is not known; those come first that are least needed.
COARSE = (
    "not", "if", "oneOf", "contains", "unevaluatedItems", "unevaluatedProperties", "dependentSchemas", "dependentRequired",
    "dependencies", "anyOf", "allOf", "patternProperties", "propertyNames", "const", "enum",
)  # fmt: skip


def without(shapes: Shapes, left_out: Iterable[str]) -> Shapes:
    """The values of `shapes` without the types that keywords of `left_out` are about."""
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


#: Keywords that say which values are valid.
_ASSERTIONS = (
    *keywords.NUMBERS, *keywords.STRINGS, *keywords.ARRAYS, *keywords.OBJECTS, "type", "const", "enum", "allOf", "anyOf",
    "oneOf", "not", "if", "then", "else", "dependencies", "dependentRequired", "dependentSchemas", "unevaluatedItems",
    "unevaluatedProperties", "$ref", "$dynamicRef", "$recursiveRef",
)  # fmt: skip
#: Others, those of OpenAPI among them.
_ANNOTATION_KEYWORDS = frozenset((
    "$anchor", "$comment", "$defs", "$dynamicAnchor", "$id", "$recursiveAnchor", "$schema", "$vocabulary", "contentEncoding",
    "contentMediaType", "contentSchema", "default", "definitions", "deprecated", "description", "discriminator", "example",
    "examples", "externalDocs", "id", "nullable", "readOnly", "title", "writeOnly", "xml",
))  # fmt: skip
#: Formats of OpenAPI and Pydantic that describe the use of a string and restrict nothing.
_ANNOTATION_FORMATS = ("binary", "byte", "password", "path", "file-path", "directory-path")
#: Similarity from which a name is taken for a misspelt keyword (:func:`difflib.get_close_matches`).
_SIMILARITY = 0.8
#: Names that are compared with keywords, a tenth of a millisecond each; further ones are passed over.
_MOST_COMPARED = 500


def ignored(places: Iterable[Place]) -> Iterator[str]:
    """Warnings of names without effect in the schemas at `places`, one sentence each."""
    compared = 0
    for place in places:
        for name in place.schema:
            if not known(name, place.year):
                yield f"{place.path}: {name!r} is a keyword of another draft and says nothing."
            if (
                name in _ANNOTATION_KEYWORDS
                or name in _ASSERTIONS
                or name.startswith("x-")
                or compared == _MOST_COMPARED
            ):
                continue
            compared += 1
            for similar in difflib.get_close_matches(name, _ASSERTIONS, 1, _SIMILARITY):
                yield f"{place.path}: {name!r} is no keyword and says nothing; {similar!r} is one."
        format_name, types = place.schema.get("format"), place.schema.get("type", "string")
        allows_strings = isinstance(types, str | list) and "string" in types
        if (
            allows_strings
            and isinstance(format_name, str)
            and format_name not in (*formats.FORMATS, *_ANNOTATION_FORMATS)
        ):
            yield f"{place.path}: the format {format_name!r} is not known and says nothing."
