"""The dialect of Rust's ``regex``, and the check that an expression can be embedded in a longer one."""

from __future__ import annotations

import re

from ..errors import GrammarError
from . import characters
from .dialect import Dialect, Problem, property_in_rust
from .reader import read


def _error(pattern: str, problem: Problem, what: str, reason: str, place: int) -> GrammarError:
    if problem == "unopened group":
        return GrammarError(f"{shown(pattern)} is no regular expression: {reason} at {place}")
    return GrammarError(not_read(pattern, f"{reason}, {what} at {place}"))


RUST = Dialect(
    # Whether an expression is well formed is for Rust to say: what has no reason here is kept verbatim.
    messages={
        "unopened group": "unopened group, ')'",
        "anchor": "no automaton has anchors (the whole text must match anyway)",
        "word boundary": "no automaton has word boundaries",
        "look-around": "no automaton has look-around",
        "back-reference": "no automaton has back-references",
        "atomic group": "no automaton has atomic groups",
        "option x": "the option x would read what stands behind it differently",
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


def check_part(regex: str) -> None:
    """Checks that `regex` can be embedded between other parts. Whether it is well formed is checked by Rust.

    Raises:
        GrammarError: a parenthesis closes what `regex` has not opened, there is the option ``x``, or something that no automaton has.
    """
    read(regex, RUST)


def not_read(regex: str, reason: str) -> str:
    """The message that `regex` is not read, with the reason."""
    return f"{shown(regex)} is not a regular expression that is read here: {reason}"


def shown(regex: str) -> str:
    """`regex` for a message."""
    return repr(regex) if len(regex) <= 80 else f"{regex[:60]!r}… ({len(regex)} characters)"
