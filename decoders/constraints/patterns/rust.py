"""The dialect of Rust's ``regex``: checking that an expression can be part of a longer one, and translation to ECMA-262."""

from __future__ import annotations

import re

from ...errors import GrammarError
from . import characters
from .dialect import Dialect, Problem, property_in_rust
from .reader import read


def _error(pattern: str, problem: Problem, what: str, reason: str, place: int) -> GrammarError:
    return GrammarError(not_read(pattern, f"{reason}, {what} at {place}"))


RUST = Dialect(
    # Rust itself checks the rest: constructs without a reason here are kept verbatim.
    messages={
        "unclosed group": "a group is never closed",
        "unopened group": "no group is open",
        "unclosed class": "a class is never closed",
        "nothing to repeat": "nothing to repeat",
        "anchor": "no automaton has anchors (the whole text must match anyway)",
        "word boundary": "no automaton has word boundaries",
        "look-around": "no automaton has look-around",
        "back-reference": "no automaton has back-references",
        "atomic group": "no automaton has atomic groups",
        "option x": "the option x would read what follows it differently",
    },
    error=_error,
    dot=characters.complement(characters.of("\n")),
    escapes_outside={
        **dict.fromkeys("AzZ", "anchor"),
        **dict.fromkeys("bB<>", "word boundary"),
        **dict.fromkeys("123456789k", "back-reference"),
    },
    is_reserved=lambda _: True,
    named_property=property_in_rust,
    short_properties=True,
    nested_classes=True,
    other_groups=(
        (re.compile(r"\(\?[a-zA-Z-]*x"), "option x"),
        (re.compile(r"\(\?P="), "back-reference"),
        (re.compile(r"\(\?>"), "atomic group"),
        (re.compile(r"\(\?[a-zA-Z-]*[:)]"), "options"),
    ),
)


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


def check_part(regex: str) -> None:
    """Checks that `regex` can be embedded between other parts. Rust checks the rest of its syntax.

    Raises:
        GrammarError: `regex` has an unbalanced parenthesis or bracket, nothing to repeat, the option ``x``, or a non-regular construct.
    """
    read(regex, RUST)


def not_read(regex: str, reason: str) -> str:
    """The error message that `regex` is not read, with the `reason`."""
    return f"{shown(regex)} is not a regular expression that is read here: {reason}"


def shown(regex: str) -> str:
    """`regex` as it is shown in messages: shortened if it is long."""
    return repr(regex) if len(regex) <= 80 else f"{regex[:60]!r}… ({len(regex)} characters)"
