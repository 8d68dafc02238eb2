"""Patterns of JSON Schema (ECMA-262 expressions, which may match any part of a string) as trees for whole strings.

Anchors are read where they mean "the string begins (ends) here". Look-ahead is read only at the very beginning of the pattern, where
it is a condition on the whole string. Every other non-regular construct is refused.

If a pattern is regular, an automaton searches texts in linear time; otherwise ``re`` searches them in a child process. Python's ``re``
may take exponential time, in which it blocks the interpreter, but a child process can be killed.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any, Self, TypeAlias

from ...errors import GrammarError
from . import automata, characters, limits
from .dialect import Dialect, Problem, single
from .limits import check
from .reader import read
from .tree import (
    ANYTHING,
    EMPTY,
    NOTHING,
    Anchor,
    Cat,
    Chars,
    Look,
    Or,
    Pattern,
    Repeat,
    cat,
    copies,
    either,
    irregular,
    nullable,
    repeat,
)

_MESSAGES: Mapping[Problem, str] = {
    "unclosed group": "a ( that is not closed",
    "unopened group": "a ) too many",
    "unclosed class": "a [ that is not closed",
    "range reversed": "a range in the wrong order",
    "nothing to repeat": "nothing to repeat",
    "repeated anchor": "nothing to repeat",
    "repeated twice": "a repetition of a repetition",
    "bounds reversed": "a repetition whose bounds are in the wrong order",
    "backslash at the end": "a backslash at the end",
    "unknown escape": "the escape {what}",
    "octal escape": "an octal escape",
    "no digits": "{what}, without its digits",
    "no character": "{what}, without its digits",
    "unknown property": "the property {what!r} (general categories are known)",
    "look-around": "look-behind or a group of an unknown kind",
    "group without a name": "a group without a name",
    "unknown group": "look-behind or a group of an unknown kind",
}


def _error(pattern: str, problem: Problem, what: str, reason: str, place: int) -> GrammarError:
    return _refusal(pattern, reason, place)


def _refusal(pattern: str, reason: str, place: int) -> GrammarError:
    return GrammarError(
        f"pattern {pattern[:80]!r}: {reason} (at character {place}): leave it out of the pattern, or set strict=False",
        "pattern",
    )


def _property(name: str, negated: bool) -> Chars | None:
    ranges = characters.category(name)
    if ranges is None:
        return None
    return Chars(characters.complement(ranges) if negated else ranges)


_CLASSES = {"d": characters.DIGIT, "w": characters.WORD, "s": characters.SPACE}

ECMA = Dialect(
    messages=_MESSAGES,
    error=_error,
    dot=characters.DOT,
    escapes={
        **{letter: Chars(ranges) for letter, ranges in _CLASSES.items()},
        **{letter.upper(): Chars(characters.complement(ranges)) for letter, ranges in _CLASSES.items()},
        **{letter: single(character) for letter, character in zip("tnvfr0", "\t\n\v\f\r\0", strict=True)},
    },
    escapes_in_class={"b": single("\b")},
    named_property=_property,
    codes="xu",
    codes_in_braces="u",
    surrogate_pairs=True,
    control_letters=True,
    open_low=False,
    lone_counts=True,
    empty_classes=True,
    no_range_before=("]",),
    named_group=re.compile(r"\(\?<[^\W\d]\w*>"),
    look_aheads=True,
    other_groups=((re.compile(r"\(\?<"), "group without a name"), (re.compile(r"\(\?"), "unknown group")),
    nesting_limited=True,
)


@lru_cache(maxsize=1024)
def strings(pattern: str) -> tuple[tuple[Pattern, bool], ...]:
    """Regular trees for the strings in which `pattern` is found: the strings match every tree marked True and no tree marked False.

    Raises:
        GrammarError: `pattern` is not an expression of ECMA-262, or has a construct that regular trees cannot express.
    """
    if len(pattern) > limits.PATTERN_CHARACTERS:
        limits.exceeded("PATTERN_CHARACTERS", limits.PATTERN_CHARACTERS, "a pattern", "pattern")
    conditions = _Anchors(pattern).conditions(read(pattern, ECMA))
    _check_copies(pattern, max(copies(tree) for tree, _ in conditions))
    return conditions


def _check_copies(pattern: str, count: int) -> None:
    if count > limits.COPIES:
        what = f"the pattern {pattern[:60]!r}, its repetitions written out,"
        limits.exceeded("COPIES", limits.COPIES, what, "pattern")


@dataclass(frozen=True)
class _Reading:
    """One way to match a part of a pattern: a tree, and whether the match begins or ends the string."""

    begins: bool
    tree: Pattern
    ends: bool

    @property
    def whole(self) -> Pattern:
        """A tree for the whole strings that contain this match."""
        return cat(*([] if self.begins else [ANYTHING]), self.tree, *([] if self.ends else [ANYTHING]))


_Readings: TypeAlias = tuple[_Reading, ...]
_START: _Readings = (_Reading(False, EMPTY, False),)
_AT_BEGINNING: _Readings = (_Reading(True, EMPTY, False),)


class _Anchors:
    """Resolves the anchors and the look-ahead of one pattern."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.looks: list[tuple[Pattern, bool]] = []

    def conditions(self, tree: Pattern) -> tuple[tuple[Pattern, bool], ...]:
        searched = either(*(reading.whole for reading in self.readings(tree, alternated=False, nested=False)))
        return ((searched, True), *self.looks)

    def readings(self, tree: Pattern, alternated: bool, nested: bool) -> _Readings:
        """The ways in which `tree` may match: at most one reading for each of the four values of (`begins`, `ends`).

        Args:
            alternated: whether `tree` is one of several alternatives.
            nested: whether `tree` is inside of a group.
        """
        match tree:
            case Chars():
                return (_Reading(False, tree, False),)
            case Anchor(end):
                return (_Reading(not end, EMPTY, end),)
            case Or(parts):
                return _merged(reading for part in parts for reading in self.readings(part, True, nested))
            case Cat(parts):
                _check_copies(self.pattern, len(parts) // 2)  # every other part may be an anchor
                readings = _START
                for part in parts:
                    if isinstance(part, Look):
                        self.look(part, readings, alternated, nested)
                    else:
                        check("reading a pattern", "pattern")
                        pairs = product(readings, self.readings(part, False, True))
                        readings = _merged(joined for a, b in pairs if (joined := _join(a, b)) is not None)
                return readings
            case Look():
                self.look(tree, _START, alternated, nested)
            case Repeat(part, low, high):
                return self.repeated(tree.place, self.readings(part, False, True), low, high)
        raise irregular(tree)

    def look(self, look: Look, before: _Readings, alternated: bool, nested: bool) -> None:
        """Adds the condition of `look` on the whole string. before: readings of the pattern before `look`, which must be just ``^``."""
        if before != _AT_BEGINNING:
            reason = "look-ahead that does not stand right after ^ at the beginning"
            raise _refusal(self.pattern, reason, look.place)
        if alternated or nested:
            reason = "look-ahead beside |" if alternated else "look-ahead inside a group"
            raise _refusal(self.pattern, reason, look.place)
        ahead = self.readings(look.part, False, True)
        self.looks.append(
            (either(*(_Reading(True, reading.tree, reading.ends).whole for reading in ahead)), look.positive)
        )

    def repeated(self, place: int, readings: _Readings, low: int, high: int | None) -> _Readings:
        if max(low, high or 0) > limits.COPIES:
            limits.exceeded("COPIES", limits.COPIES, "a counted repetition", "pattern")
        if all(not reading.begins and not reading.ends for reading in readings):
            return (_Reading(False, repeat(either(*(reading.tree for reading in readings)), low, high), False),)
        if (low, high) == (0, 1):
            return _merged((*readings, _Reading(False, EMPTY, False)))
        if (low, high) != (1, 1):
            raise _refusal(self.pattern, "an anchor that is repeated", place)
        return readings


def _merged(readings: Iterable[_Reading]) -> _Readings:
    """`readings`, merged to one reading for each value of (`begins`, `ends`): at most four remain."""
    kinds: dict[tuple[bool, bool], list[Pattern]] = {}
    for reading in readings:
        kinds.setdefault((reading.begins, reading.ends), []).append(reading.tree)
    return tuple(_Reading(begins, either(*trees), ends) for (begins, ends), trees in kinds.items())


def _join(a: _Reading, b: _Reading) -> _Reading | None:
    """`a` followed by `b`; None if an anchor between `a` and `b` forbids a match."""
    left, right = a.tree, b.tree
    if b.begins:
        if not nullable(left):
            return None
        left = EMPTY
    if a.ends:
        if not nullable(right):
            return None
        right = EMPTY
    tree = cat(left, right)
    return None if tree == NOTHING else _Reading(a.begins or b.begins, tree, a.ends or b.ends)


#: The child's program. It reads lines of JSON: a pattern, a text and seconds of processor time. It answers each line with a line of
#: JSON: 1, 0 or the error of the pattern, and the seconds that the search took. A search that needs more seconds ends the process.
_CHILD = (
    limits.BOUNDED
    + """
import json, re, sys
for line in sys.stdin:
    begin, (pattern, text, seconds) = time.process_time(), json.loads(line)
    bounded(seconds)
    try:
        answer = int(re.search(pattern, text) is not None)
    except (re.error, OverflowError, RecursionError) as error:
        answer = str(error)
    bounded(0)
    print(json.dumps([answer, time.process_time() - begin]), flush=True)
"""
)


class Search:
    """Searches patterns in texts. A context manager, which ends the process that a search may start."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[str] | None = None
        self._known: dict[tuple[str, str], bool] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def found(self, pattern: Any, text: str) -> bool:
        """Whether `pattern` is found in `text`, by the rules of ECMA-262, or of Python's ``re`` if `pattern` is not regular.

        Raises:
            GrammarError: neither ECMA-262 nor ``re`` allows `pattern`, or time is up.
        """
        if not isinstance(pattern, str):
            raise GrammarError(f"a pattern must be a string, not {pattern!r}", "pattern")
        try:
            conditions = strings(pattern)
        except GrammarError:
            if (pattern, text) not in self._known:
                self._known[pattern, text] = self._asked(pattern, text)
            return self._known[pattern, text]
        return all(automata.matches(tree, text) is good for tree, good in conditions)

    def _asked(self, pattern: str, text: str) -> bool:
        limits.check("matching a pattern", "pattern")
        left = limits.left()
        bounded = math.isfinite(left)
        child = self._started()
        killer = threading.Timer(min(limits.PATIENCE * left, threading.TIMEOUT_MAX), child.kill)
        killer.start()
        try:
            assert child.stdin is not None and child.stdout is not None
            child.stdin.write(json.dumps([pattern, text, left if bounded else 0]) + "\n")
            child.stdin.flush()
            line = child.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            killer.cancel()
        answer, seconds = json.loads(line) if line else ("the process that matches it has ended", left)
        limits.spend(seconds if bounded else 0)
        limits.check("matching a pattern", "pattern")
        if isinstance(answer, str):
            raise GrammarError(f"pattern {pattern[:80]!r}: {answer}", "pattern")
        return bool(answer)

    def _started(self) -> subprocess.Popen[str]:
        if self._child is None or self._child.poll() is not None:
            self._end()
            command = [sys.executable, "-I", "-S", "-c", _CHILD]
            self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        return self._child

    def _end(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.communicate()
            self._child = None
