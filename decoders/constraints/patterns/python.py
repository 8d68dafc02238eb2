"""Regular expressions of users: the whole text must match, and non-regular constructs are refused.

The dialect is the common part of Python's ``re`` and Rust's ``regex``, so that a pattern means what it means in ``re.fullmatch``;
constructs that the two read differently are refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ...errors import GrammarError
from . import characters
from .dialect import Dialect, Problem, property_in_rust, single
from .reader import read
from .tree import Anchor, Cat, Class, Or, Pattern, write

#: Largest count of a repetition: an automaton with that many states can still be built.
REPETITIONS = 99_999
#: What to write instead of look-around or a word boundary.
_INTERSECT = (
    "write the texts out, or use decoders.grammar, whose terminals have & (and) and ~ (not): T: /[a-z]+/ & ~/if|else/"
)
_ITSELF = r"write \{what[0]} for the character itself"
_BACK_REFERENCE = "a back-reference is not regular: write the alternatives out"

_MESSAGES: Mapping[Problem, str] = {
    "unclosed group": "it is never closed",
    "unopened group": "no group is open",
    "unclosed comment": "it is never closed",
    "unclosed class": "it is never closed",
    "class in a class": "inside a class write \\[; classes in classes are not supported",
    "class operation": f"operations on classes are not supported: escape the characters, or {_INTERSECT}",
    "range of classes": "a range is from one character to another",
    "range reversed": "the smaller character comes first",
    "nothing to repeat": f"nothing stands before it; {_ITSELF}",
    "repeated twice": f"what it repeats is already repeated: use (?:…); {_ITSELF}",
    "repeated anchor": "it repeats an anchor",
    "repeated group with anchors": "it repeats an anchor",
    "possessive": "possessive repetition is not supported: leave the second + out",
    "too often": f"the limit is {REPETITIONS:,} repetitions",
    "bounds reversed": "the smaller number comes first",
    "backslash at the end": "nothing follows it",
    "unknown escape": "there is no such escape",
    "octal escape": "write \\x00",
    "back-reference": _BACK_REFERENCE,
    "word boundary": f"word boundaries are not supported: {_INTERSECT}",
    "look-around": f"look-around has no automaton of its own: {_INTERSECT}",
    "no digits": "hexadecimal digits are missing",
    "no character": "it stands for no character",
    "options": "flags are not supported: spell both cases, [Aa], or (.|\\n) for any character",
    "atomic group": "atomic groups and conditions are not supported: use (?:…)",
}


def _error(pattern: str, problem: Problem, what: str, reason: str, place: int) -> GrammarError:
    shown = pattern if len(pattern) <= 80 else f"…{pattern[max(0, place - 30) : place + 40]}…"
    return GrammarError(f"regex {shown!r}: {what!r} at character {place}: {reason}", keyword=what)


def _is_ascii_letter(letter: str) -> bool:
    return letter.isascii() and letter.isalpha()


PYTHON = Dialect(
    messages=_MESSAGES,
    error=_error,
    dot=characters.complement(characters.of("\n")),
    # In Rust, unlike in Python, combining marks are word characters, and U+001C to U+001F are not white space.
    escapes={
        "d": Class(r"\d"), "D": Class(r"\D"), "w": Class(r"[\p{L}\p{N}_]"), "W": Class(r"[^\p{L}\p{N}_]"),
        "s": Class(r"[\s\x1c-\x1f]"), "S": Class(r"[^\s\x1c-\x1f]"), "k": "back-reference", "0": "octal escape",
        **dict.fromkeys("123456789", "back-reference"),
        **{letter: single(character) for letter, character in zip("nrtfva", "\n\r\t\f\v\a", strict=True)},
    },
    escapes_outside={
        "A": Anchor(end=False), "z": Anchor(end=True), "Z": Anchor(end=True), "b": "word boundary", "B": "word boundary",
    },
    escapes_in_class={"b": single("\b")},
    is_reserved=_is_ascii_letter,
    named_property=property_in_rust,
    short_properties=True,
    most_digits=len(str(REPETITIONS)),
    class_operations=("&&", "--", "~~"),
    comments=True,
    other_groups=(
        (re.compile(r"\(\?P="), "back-reference"),
        (re.compile(r"\(\?[aiLmsuxRU-]+[:)]"), "options"),
        (re.compile(r"\(\?.?", re.DOTALL), "atomic group"),
    ),
)  # fmt: skip


def whole_text(pattern: str) -> str:
    """`pattern` in Rust's notation, without constructs that have no effect on whole matches: outer anchors, laziness, captures.

    Raises:
        GrammarError: `pattern` is not regular, or not well formed; the error names the construct and its place.
    """
    try:
        pattern.encode()
    except UnicodeEncodeError as error:
        raise _error(
            pattern, "lone surrogate", "half of a surrogate pair", "it stands for no character", error.start
        ) from None
    tree = read(pattern, PYTHON)
    _check_anchors(pattern, tree)
    return write(tree, anchors=False)


def _check_anchors(pattern: str, tree: Pattern) -> None:
    """Checks that all anchors of `tree` are at the beginning or end of the text. Raises GrammarError: an anchor is elsewhere."""
    # Parts to check; for each, whether it may be at the beginning of the text, and the index of the part that follows it (None: none).
    todo: list[tuple[Pattern, bool, int | None]] = [(tree, True, None)]
    while todo:
        node, first, following = todo.pop()
        match node:
            case Anchor(end=True) if following is not None:
                reason = f"text follows it at character {following}, so nothing can match"
                raise _error(pattern, "anchor", "$", reason, node.place)
            case Anchor(end=False) if not first:
                what = pattern[node.place : node.place + (2 if pattern[node.place] == "\\" else 1)]
                reason = "the whole text must match anyway, and this anchor stands inside: drop it"
                raise _error(pattern, "anchor", what, reason, node.place)
            case Or(parts):
                todo += [(part, first, following) for part in parts]
            case Cat(parts):
                children: list[tuple[Pattern, bool, int | None]] = []
                leading = next((i for i, part in enumerate(parts) if not isinstance(part, Anchor)), len(parts))
                for index, part in reversed([*enumerate(parts)]):
                    children.append((part, first and index <= leading, following))
                    following = following if isinstance(part, Anchor) else part.place
                todo += children
            case _:
                pass  # other nodes contain no anchors: the reader refuses repeated anchors
