"""The dialect of Rust's ``regex``: checking that an expression can be part of a longer one, and translation to ECMA-262."""

from __future__ import annotations

import re

from ...errors import GrammarError
from . import characters
from .dialect import Dialect, Problem, property_in_rust, single
from .ecma import ECMA
from .reader import read
from .tree import Anchor, write


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


#: Rust's dialect as far as ECMA-262 can express it. ``\d``, ``\w``, ``\s`` and ``.`` stand for ECMA-262's sets, which are smaller.
_IN_SCHEMAS = Dialect(
    messages={
        **{problem: reason for problem, reason in ECMA.messages.items() if problem != "repeated twice"},
        "word boundary": "a word boundary",
        "back-reference": "a back-reference",
    },
    error=ECMA.error,
    dot=ECMA.dot,
    escapes={**ECMA.escapes, "a": single("\a")},
    escapes_outside={
        "A": Anchor(end=False), "z": Anchor(end=True),
        **dict.fromkeys("bB<>", "word boundary"), **dict.fromkeys("123456789", "back-reference"),
    },
    named_property=ECMA.named_property,
    short_properties=True,
    class_algebra=True,
    named_group=re.compile(r"\(\?P?<[^\W\d][\w.\[\]]*>"),
    other_groups=ECMA.other_groups,
    nesting_limited=True,
)  # fmt: skip
_ESCAPED = re.compile(r"\\U([0-9A-F]{8})|\\.", re.DOTALL)


def in_ecma(pattern: str) -> str:
    """Rust's `pattern` as a pattern of ECMA-262 that matches the same texts or fewer.

    Returns `pattern` unchanged if it means the same in both dialects, or neither dialect reads it.

    Raises:
        GrammarError: `pattern` has another meaning in ECMA-262 and cannot be translated.
    """
    try:
        as_ecma = read(pattern, ECMA)
    except GrammarError:
        as_ecma = None
    try:
        as_rust = read(pattern, _IN_SCHEMAS)
    except GrammarError:
        if as_ecma is None:
            return pattern
        raise
    if as_rust == as_ecma:
        return pattern
    written = write(as_rust)
    return _ESCAPED.sub(lambda part: f"\\u{{{part[1].lstrip('0') or '0'}}}" if part[1] else part[0], written)


def check_part(regex: str) -> None:
    """Checks that `regex` can be embedded between other parts. Rust checks the rest of its syntax.

    Raises:
        GrammarError: `regex` has an unbalanced parenthesis or bracket, nothing to repeat, the option ``x``, or a non-regular construct.
    """
    read(regex, RUST)


def not_read(regex: str, reason: str) -> str:
    """The error message that `regex` is not supported, with the `reason`."""
    return f"{shown(regex)} is not supported as a regular expression: {reason}"


def shown(regex: str) -> str:
    """`regex` as it is shown in messages: shortened if it is long."""
    return repr(regex) if len(regex) <= 80 else f"{regex[:60]!r}… ({len(regex)} characters)"
