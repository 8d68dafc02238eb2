"""Patterns of Rust's ``regex``, which Pydantic's types have, as patterns of ECMA-262."""

from __future__ import annotations

import re

from ...errors import GrammarError

#: What Rust writes in another way than ECMA-262.
_IN_ECMA = {r"\A": "^", r"\z": "$", "(?P<": "(?<"}
_WRITTEN = re.compile(r"\\.|\(\?P<", re.DOTALL)
#: Escapes, classes and, as the group, what ECMA-262 reads as something else: word boundaries, counts without a lower bound or of
#: an anchor, brackets in classes, and operations between classes.
_CONSTRUCTS = re.compile(
    r"(\\[<>]|\{,|(?:\^|\$|\\[Az])\{|\[\^?\]|\[(?:\\.|[^\\\]\[])*?(?:\[|&&|--|~~))|\\.|\[(?:\\.|[^\\\]])*\]", re.DOTALL
)


def in_ecma(pattern: str) -> str:
    """Rust's `pattern` as a pattern of ECMA-262 that matches the same texts or fewer. What only Rust reads stays.

    Raises:
        GrammarError: `pattern` has a construct with another meaning in ECMA-262.
    """
    for part in _CONSTRUCTS.finditer(pattern):
        if part[1]:
            raise GrammarError(
                f"pattern {pattern[:80]!r}: {part[1]!r} (at character {part.start()}) means something else in a JSON schema",
                "pattern",
            )
    return _WRITTEN.sub(lambda part: _IN_ECMA.get(part[0], part[0]), pattern)
