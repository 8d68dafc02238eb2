"""The differences between dialects of regular expressions, as a table that the reader follows."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from ...errors import GrammarError
from . import characters
from .characters import Ranges
from .tree import Anchor, Chars, Class

#: Errors in a pattern, and constructs that a dialect may refuse.
Problem: TypeAlias = Literal[
    "unclosed group", "unopened group", "unclosed comment", "unclosed class", "class in a class", "class operation",
    "range of classes", "range reversed", "nothing to repeat", "repeated anchor", "repeated group with anchors", "repeated twice",
    "possessive", "too often", "bounds reversed", "backslash at the end", "unknown escape", "octal escape", "back-reference",
    "word boundary", "anchor", "anchor inside", "look-around", "no digits", "no character", "unknown property", "options", "option x",
    "atomic group", "group without a name", "unknown group", "lone surrogate",
]  # fmt: skip

#: A node that matches one character, out of a set.
Set: TypeAlias = Chars | Class
#: What a letter after a backslash means, or why it is refused.
Escape: TypeAlias = Set | Anchor | Problem


def single(character: str) -> Chars:
    """The set with the only member `character`."""
    return Chars(characters.of(character))


def property_in_rust(name: str, negated: bool) -> Class | None:
    """A property of Unicode in Rust's notation; None if `name` is empty. Rust checks whether the property exists."""
    return Class(rf"\{'P' if negated else 'p'}{{{name}}}") if name else None


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """What one dialect means by each construct, and what it refuses.

    Attributes:
        messages: why a construct is refused, with ``{what}`` for the refused text. A construct without a message is not refused: it
            is read as in other dialects, or kept verbatim.
        error: creates the error from the pattern, the problem, the refused text, the reason, and the index of the refused text.
        dot: the meaning of ``.``.
        escapes: letters that mean the same in a class and outside.
        escapes_outside: escapes that exist only outside of classes, or have another meaning there.
        escapes_in_class: escapes with another meaning in a class.
        is_reserved: whether an unknown letter after a backslash is refused; otherwise it stands for itself.
        named_property: returns the characters of ``\\p{name}``, or of ``\\P{name}`` if negated; None if the name is unknown.
        short_properties: whether ``\\pL`` is a property too.
        codes: letters of escapes that give the digits of a code point.
        codes_in_braces: the letters of `codes` after which the digits may stand in braces.
        surrogate_pairs: whether two escapes may be the two surrogates of one character; a single surrogate is a character, too.
        control_letters: whether ``\\cA`` is U+0001.
        open_low: whether ``{,n}`` is a quantifier.
        most_digits: greatest number of digits of a quantifier's bound.
        lone_counts: whether braces with nothing to repeat stand for themselves.
        empty_classes: whether ``[]`` is an empty class; otherwise a bracket at the beginning of a class stands for itself.
        no_range_before: in a class, a hyphen in front of one of these texts stands for itself; "" is the end of the pattern.
        class_operations: operators between classes, which are refused.
        nested_classes: whether classes may contain classes; all classes are kept verbatim then.
        class_algebra: whether classes may contain classes, POSIX classes and operations between classes; their sets are computed.
        named_group: the beginning of a group with a name.
        comments: whether ``(?#…)`` is a comment.
        look_aheads: whether ``(?=`` and ``(?!`` are read.
        other_groups: beginnings of groups of other kinds, each with its problem; the first match is used.
        nesting_limited: whether groups may be nested only as deep as :data:`limits.NESTING` says.
    """

    messages: Mapping[Problem, str]
    error: Callable[[str, Problem, str, str, int], GrammarError]
    dot: Ranges
    escapes: Mapping[str, Escape] = field(default_factory=dict)
    escapes_outside: Mapping[str, Escape] = field(default_factory=dict)
    escapes_in_class: Mapping[str, Escape] = field(default_factory=dict)
    is_reserved: Callable[[str], bool] = str.isalnum
    named_property: Callable[[str, bool], Set | None]
    short_properties: bool = False
    codes: str = "xuU"
    codes_in_braces: str = "xuU"
    surrogate_pairs: bool = False
    control_letters: bool = False
    open_low: bool = True
    most_digits: int = 8
    lone_counts: bool = False
    empty_classes: bool = False
    no_range_before: tuple[str, ...] = ("", "]", "-")
    class_operations: tuple[str, ...] = ()
    nested_classes: bool = False
    class_algebra: bool = False
    named_group: re.Pattern[str] = re.compile(r"\(\?P?<([A-Za-z_]\w*)>")
    comments: bool = False
    look_aheads: bool = False
    other_groups: tuple[tuple[re.Pattern[str], Problem], ...] = ()
    nesting_limited: bool = False
