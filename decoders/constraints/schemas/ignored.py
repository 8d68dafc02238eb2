"""Warnings of names that look like keywords, or are those of another draft, and of formats that are not known: none has an effect."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator

from . import formats, keywords
from .document import Place
from .drafts import known

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
    """Warnings about the schemas at `places`, one sentence each."""
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
