"""Regular expressions for strings as JSON text, from sets of characters, trees and automata.

A string under a condition is spelt in one way, as ``json.dumps(…, ensure_ascii=False)`` writes it. A character stands for itself
unless JSON requires an escape: an escape of two characters (``\\n``), if there is one, or else the character's number in lower case
(``\\u001f``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING

from ...errors import GrammarError
from ..patterns import automata, characters
from ..patterns.characters import Ranges
from ..patterns.limits import check
from ..patterns.tree import (
    NOTHING,
    Cat,
    Chars,
    Or,
    Pattern,
    Repeat,
    cat,
    code_point,
    either,
    irregular,
    repeat,
    slashed,
    times,
    unit,
    write,
)
from . import limits
from .notation import NOTHING as NO_TEXT
from .notation import Expr, Terminal, Word
from .strings import Strings

if TYPE_CHECKING:
    from interegular.fsm import FSM

_ESCAPES = {0x22: '"', 0x5C: "\\", 0x08: "b", 0x0C: "f", 0x0A: "n", 0x0D: "r", 0x09: "t"}
_PLAIN: Ranges = characters.complement(
    characters.ranges([(0, 0x1F), (0x22, 0x22), (0x5C, 0x5C), *characters.SURROGATES])
)
#: The control characters that have no escape of two characters.
_NUMBERED = [point for point in range(0x20) if point not in _ESCAPES]
_HEX = "[0-9a-fA-F]"
#: One character of an unconstrained JSON string: plain or escaped, but no lone surrogate.
_FREE = (
    r'(?:[^"\\\x00-\x1F]|\\(?:["\\/bfnrt]|u(?:[0-9a-cefA-CEF]' + _HEX + "{3}|[dD][0-7]" + _HEX + "{2}"
    r"|[dD][89abAB]" + _HEX + r"{2}\\u[dD][c-fC-F]" + _HEX + "{2})))"
)
FREE_STRING = f'"{_FREE}*"'
#: Characters that a regular expression has to escape.
_SPECIAL = re.compile(r"""[^\w !"%',:;<=>@`/]""")
_SURROGATE = re.compile("[\ud800-\udfff]")
_JSON, _ASCII_JSON = json.JSONEncoder(ensure_ascii=False), json.JSONEncoder()


def literal(text: str) -> str:
    """A regular expression that matches only `text`."""
    return _SPECIAL.sub(lambda character: code_point(ord(character[0])), text)


def quoted(value: str) -> str:
    """`value` as JSON text, with quotes."""
    return (_ASCII_JSON if _SURROGATE.search(value) else _JSON).encode(value)


def escaped(pattern: Pattern) -> Pattern:
    """A tree for the JSON texts, without quotes, of the strings that the regular `pattern` matches; surrogates are left out."""
    match pattern:
        case Chars(ranges):
            return _escaped_set(ranges)
        case Cat(parts):
            return cat(*map(escaped, parts))
        case Or(parts):
            return either(*map(escaped, parts))
        case Repeat(part, low, high):
            return repeat(escaped(part), low, high)
        case _:
            raise irregular(pattern)


@lru_cache(maxsize=4096)
def _escaped_set(ranges: Ranges) -> Pattern:
    letters = "".join(letter for point, letter in _ESCAPES.items() if characters.contains(ranges, point))
    numbers = [f"{point:02x}" for point in _NUMBERED if characters.contains(ranges, point)]
    digits = [(first, "".join(number[1] for number in numbers if number[0] == first)) for first in "01"]
    last = either(*(cat(_one_of(first), _one_of(second)) for first, second in digits))
    numbered = cat(_one_of("u"), _one_of("0"), _one_of("0"), last)
    plain = Chars(characters.common(ranges, _PLAIN))
    return either(plain, cat(_one_of("\\"), either(_one_of(letters), numbered)))


def _one_of(letters: str) -> Pattern:
    return Chars(characters.of(letters))


@lru_cache(maxsize=256)
def inside(pattern: Pattern) -> str | None:
    """A regular expression for the JSON texts, without quotes, of strings that `pattern` matches; None if no string can be written."""
    tree = escaped(pattern)
    return None if tree == NOTHING else write(tree)


@lru_cache(maxsize=4096)
def chars(ranges: Ranges) -> str | None:
    """A regular expression, which can be repeated as a unit, for a character of `ranges` as JSON text; None if none of these
    characters can be written.
    """
    tree = _escaped_set(ranges)
    return None if tree == NOTHING else unit(tree)


def length(low: int, high: int | None) -> str:
    """A regular expression for the JSON texts, without quotes, of all strings of `low` to `high` characters."""
    return times(chars(characters.ANY) or "", low, high)


def raw_chars(ranges: Ranges) -> str | None:
    """A regular expression, which can be repeated as a unit, for an unescaped character of `ranges`; None if none of these characters
    can be written.
    """
    return unit(Chars(ranges)) if characters.common(ranges, characters.ENCODABLE) else None


def expression(machine: FSM, chars: Callable[[Ranges], str | None] = chars) -> str | None:
    """A regular expression for the JSON texts, without quotes, of the strings that `machine` accepts; None if it would be too long.

    Args:
        chars: returns a regular expression for a character of a set; None if no character can be written.

    States are eliminated one by one, the cheapest first (Brzozowski and McCluskey 1963; Delgado and Morais 2004).
    """
    edges: dict[int, dict[int, str]] = {}
    sets: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for state, after in machine.map.items():
        for symbol, to in after.items():
            sets.setdefault((state, to), []).extend(machine.alphabet.by_transition[symbol])
    for (state, to), pairs in sets.items():
        edge = chars(characters.ranges(pairs))
        if edge is not None:
            edges.setdefault(state, {})[to] = edge
    begin, end = -1, -2
    edges[begin] = {machine.initial: ""}
    for state in machine.finals:
        edges.setdefault(state, {})[end] = ""
    into: dict[int, set[int]] = {}
    for state, out in edges.items():
        for to in out:
            into.setdefault(to, set()).add(state)
    remaining = set(machine.states)
    while remaining:
        check("the expression of a string's pattern and length")
        state = min(remaining, key=lambda s: (len(into.get(s, ())) * len(edges.get(s, ())), s))
        remaining.discard(state)
        out = edges.pop(state, {})
        loop = out.pop(state, None)
        around = "" if loop is None else f"(?:{loop})*"
        sources = into.pop(state, set()) - {state}
        for to in out:
            into[to].discard(state)
        for source in sources:
            first = edges[source].pop(state)
            for to, edge in out.items():
                text = _as_part(first) + around + _as_part(edge)
                known = edges[source].get(to)
                edges[source][to] = text if known is None else f"{known}|{text}" if known or text else ""
                into[to].add(source)
                if len(edges[source][to]) > limits.REGEX_CHARACTERS:
                    return None
    return edges[begin].get(end)


def _as_part(text: str) -> str:
    return f"(?:{text})" if "|" in text else text


def write_string(strings: Strings, suffix: str = "", within: Pattern | None = None) -> Expr:
    """An expression for the JSON texts of the `strings` that `within` matches, each followed by a match of the regex `suffix`."""
    written = strings.written
    if written is not None and within is not None:
        if written.values is not None:
            values = frozenset(value for value in written.values if automata.matches(within, value))
            written = Strings(values=values) if values else None
        else:
            written = replace(written, conditions=written.conditions | {(within, True)})
    if written is None:
        return NO_TEXT
    simple = _simple(written)
    lark = _lark(written) if simple is None else slashed(simple)
    if lark is None:
        return NO_TEXT
    tail = f" /{suffix}/" if suffix else ""
    return Word(Terminal(f"({lark}){tail}" if tail else lark, partial(_with_suffix, written, simple, suffix)))


def _with_suffix(strings: Strings, simple: str | None, suffix: str) -> str | None:
    text = _regex(strings) if simple is None else simple
    return None if text is None else _as_part(text) + suffix


def _simple(strings: Strings) -> str | None:
    """A regular expression for the JSON texts of `strings`, if they are enumerated or have at most one condition; else None."""
    if strings.unconstrained:
        return FREE_STRING
    if strings.values is not None:
        return "|".join(literal(quoted(value)) for value in sorted(strings.values))
    if not strings.conditions and not strings.excluded:
        return f'"{length(strings.low, strings.high)}"'
    ((pattern, good),) = strings.conditions if len(strings.conditions) == 1 else ((None, False),)
    if pattern is not None and good and not strings.excluded and strings.low == 0 and strings.high is None:
        text = inside(pattern)
        return None if text is None else f'"(?:{text})"'
    return None


def _regex(strings: Strings) -> str | None:
    try:
        text = expression(strings.automaton())
    except GrammarError:  # the automaton is too large; the Lark notation needs no expression
        return None
    return None if text is None else f'"(?:{text})"'


def _lark(strings: Strings) -> str | None:
    """The definition of a terminal for the JSON texts of `strings`; None if no string can be written."""
    parts = [slashed(f'"{length(strings.low, strings.high)}"')]
    for pattern, good in sorted(strings.conditions, key=repr):
        text = inside(pattern)
        if text is None and good:
            return None
        if text is not None:
            parts.append(("" if good else "~") + slashed(f'"(?:{text})"'))
    if strings.excluded:
        names = "|".join(literal(quoted(value)) for value in sorted(strings.excluded))
        parts.append("~" + slashed(names))
    return " & ".join(parts)
