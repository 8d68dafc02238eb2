"""Bounds on time and memory. A schema that exceeds a limit raises an error that names the limit; no partial result is left.

The limits of patterns and their automata are in :mod:`decoders.constraints.patterns.limits`.
"""

from __future__ import annotations

from typing import NoReturn

from ..patterns import limits

#: Greatest number of characters of a schema as JSON text.
SCHEMA_CHARACTERS = 1_000_000
#: Greatest depth of nested schemas.
NESTING = 100
#: Greatest number of alternatives of one type, such as objects, at one place of the text after allOf, oneOf, not, … are multiplied out.
ALTERNATIVES = 256
#: Greatest number of steps for multiplying out the whole schema.
STEPS = 150_000
#: Greatest number of places of the text that have different schemas.
PLACES = 4_000
#: Greatest depth of brackets in texts with an indent.
INDENTED = 32
#: Greatest number of rules of the grammar: llguidance numbers rules with 16 bits.
RULES = 20_000
#: Greatest number of symbols in all rules.
SYMBOLS = 60_000
#: Greatest number of properties that an object declares.
PROPERTIES = 2_000
#: Greatest number of values of an enumeration.
VALUES = 20_000
#: Greatest value of ``minLength``, ``minItems``, …; a greater upper bound is ignored, since no text reaches it. Parsers count in 32
#: bits.
COUNT = 2_000_000_000
#: Greatest numerator of ``multipleOf``, written as a reduced fraction.
STEP = 10_000
#: Greatest number of characters of a regular expression for the whole language; a larger language has only a grammar.
REGEX_CHARACTERS = 120_000
#: Greatest estimated number of characters of a regular expression for the whole language after its repetitions are expanded.
REGEX_COPIES = 25_000


def exceeded(limit: str, most: int, what: str, keyword: str | None = None, path: str | None = None) -> NoReturn:
    """Like :func:`decoders.constraints.patterns.limits.exceeded`, for a limit of this module."""
    limits.exceeded(limit, most, what, keyword, path, __name__)
