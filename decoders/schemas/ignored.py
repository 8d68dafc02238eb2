"""What a schema says to no effect, though somebody may have meant something by it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator

from . import formats, keywords
from .document import Place

#: Keywords that say which values are valid.
_ASSERTIONS = (
    *keywords.NUMBERS, *keywords.STRINGS, *keywords.ARRAYS, *keywords.OBJECTS, "type", "const", "enum", "allOf", "anyOf",
    "oneOf", "not", "if", "then", "else", "dependencies", "dependentRequired", "dependentSchemas", "unevaluatedItems",
    "unevaluatedProperties", "minContains", "maxContains", "$ref", "$dynamicRef", "$recursiveRef",
)  # fmt: skip
#: Others, those of OpenAPI among them.
_OTHERS = frozenset((
    "$anchor", "$comment", "$defs", "$dynamicAnchor", "$id", "$recursiveAnchor", "$schema", "$vocabulary", "contentEncoding",
    "contentMediaType", "contentSchema", "default", "definitions", "deprecated", "description", "discriminator", "example",
    "examples", "externalDocs", "id", "nullable", "readOnly", "title", "writeOnly", "xml",
))  # fmt: skip
#: Formats that say what strings are for, not which ones there are: of OpenAPI and Pydantic.
_USES = ("binary", "byte", "password", "path", "file-path", "directory-path")
#: How alike a keyword and a name are that was meant to be one.
_ALIKE = 0.8
#: Names that are compared with keywords, a tenth of a millisecond each; others are taken for what somebody means them to be.
_MOST = 500


def ignored(places: Iterable[Place]) -> Iterator[str]:
    """Remarks on the schemas at `places`: names that look like keywords, and formats that are not known."""
    compared = 0
    for place in places:
        for name in place.schema:
            if name in _OTHERS or name in _ASSERTIONS or name.startswith("x-") or compared == _MOST:
                continue
            compared += 1
            for near in difflib.get_close_matches(name, _ASSERTIONS, 1, _ALIKE):
                yield f"{place.path}: {name!r} is no keyword and says nothing; {near!r} is one."
        named, kinds = place.schema.get("format"), place.schema.get("type", "string")
        of_strings = isinstance(kinds, str | list) and "string" in kinds
        if of_strings and isinstance(named, str) and named not in (*formats.FORMATS, *_USES):
            yield f"{place.path}: the format {named!r} is not known and says nothing."
