"""Bounds on time and memory. A schema that exceeds one is refused with the limit's name; nothing is left half done.

Those of patterns and their automata are in :mod:`decoders.constraints.patterns.limits`.
"""

from __future__ import annotations

from typing import NoReturn

from ..patterns import limits

#: Characters of a schema as JSON text.
SCHEMA_CHARACTERS = 1_000_000
#: Schemas within schemas.
NESTING = 100
#: Alternatives of one type (objects, say) at one place of the text, after allOf, oneOf, not, … are multiplied out.
ALTERNATIVES = 256
#: Steps of multiplying out in all.
STEPS = 150_000
#: Places of the text with a schema of their own.
PLACES = 4_000
#: Depth of brackets in texts with an indent.
INDENTED = 32
#: Rules of the grammar: llguidance numbers them with 16 bits.
RULES = 20_000
#: Symbols of all rules.
SYMBOLS = 60_000
#: Properties that an object declares.
PROPERTIES = 2_000
#: Values of an enumeration.
VALUES = 20_000
#: What ``minLength``, ``minItems``, … ask for; greater bounds from above are none, as no text gets there. Parsers count in 32 bits.
COUNT = 2_000_000_000
#: Multiples of what, decimal point aside.
STEP = 10_000
#: Characters of a regular expression that stands for the whole language; beyond it there is only a grammar.
REGEX_CHARACTERS = 120_000
#: Characters, and symbols once repetitions are written out, of what such an expression amounts to.
REGEX_COPIES = 25_000


def exceeded(limit: str, most: int, what: str, keyword: str | None = None, path: str | None = None) -> NoReturn:
    """As :func:`decoders.constraints.patterns.limits.exceeded`, for a limit of this module."""
    limits.exceeded(limit, most, what, keyword, path, __name__)
