"""Sets of numbers as JSON writes them: exact regular expressions over decimal digits.

Integers are written without a fraction (``1``, not ``1.0``). Numbers between bounds have no exponent, and where rounding
to a float could carry them over a bound, or make them integers, few enough digits that it cannot.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from typing import Any

from ...errors import GrammarError
from ..patterns import automata, ecma
from . import json_text, limits
from .digits import DIGITS, EXPONENT, decimals, integers
from .numbers import Numbers, intersection

#: Any number; with an exponent only in scientific notation, and one that a float has.
NUMBER = rf"-?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]+)?|[0-9](?:\.[0-9]+)?{EXPONENT})"
_LARGE = 10**DIGITS
_LARGEST = int(sys.float_info.max)
_FRACTION = r"-?(?:0\.[0-9]{0,14}[1-9]|[1-9][0-9]{0,7}\.[0-9]{0,6}[1-9]|[1-9][0-9]{8,12}\.[0-9]?[1-9])"  # at most 15
_LARGEST_INLINE = 2**62  # bounds that llguidance keeps in 64 bits
_MOST_DECIMALS = 40  # digits of a step
_MOST_ENUMERATED = 200  # values that are enumerated, remainders that are told apart
_MOST_CHARACTERS = 5_000


@lru_cache(maxsize=1024)
def expression(numbers: Numbers) -> str | None:
    """The texts of `numbers`, a set as :meth:`Numbers.simplified` leaves it; None if this notation is too long for it.

    Empty if none of them can be written.
    """
    step = numbers.step
    if step is not None:
        return _multiples_between(numbers, step)
    if numbers.low is None and numbers.high is None:
        return NUMBER if numbers.kind == "any" else _FRACTION
    if numbers.low is not None and numbers.low == numbers.high:
        return _plain(numbers.low)
    if numbers.kind == "fraction":
        are_small = all(bound is None or abs(bound) <= 10**8 for bound in (numbers.low, numbers.high))
        return _between(_within(numbers, 10**8 if are_small else 10 ** (DIGITS - 1)))
    if _rounds(numbers.low, numbers.open_low) or _rounds(numbers.high, numbers.open_high):
        high, low = Numbers(low=Fraction(_LARGE), kind="integer"), Numbers(high=Fraction(-_LARGE), kind="integer")
        ranges = [intersection(numbers, high), _within(numbers, _LARGE), intersection(numbers, low)]
        written = [expression(part) if part is not None and part.step else _between(part) for part in ranges]
        return "|".join(text for text in written if text)
    return _between(numbers)


def _rounds(bound: Fraction | None, is_open: bool) -> bool:
    """Whether a decimal beyond `bound` may become the bound, or pass it, as a float, however few digits it has."""
    if bound is None or abs(bound) < _LARGE:
        return False
    return is_open or abs(bound) > _LARGEST or Fraction(float(bound)) != bound


def _within(numbers: Numbers, most: int) -> Numbers | None:
    """Those of `numbers` from -`most` to `most`."""
    return intersection(numbers, Numbers(Fraction(-most), False, Fraction(most), False))


def _between(numbers: Numbers | None) -> str:
    """Decimals between bounds, at least one of which there is."""
    if numbers is None:
        return ""
    alternatives = []
    if numbers.low is None or numbers.low < 0:
        high = Fraction(0) if numbers.high is None or numbers.high > 0 else numbers.high
        alternatives += ["-" + text for text in decimals(
            -high, high == 0 or numbers.open_high, None if numbers.low is None else -numbers.low, numbers.open_low,
            numbers.kind,
        )]  # fmt: skip
    if numbers.high is None or numbers.high > 0 or (numbers.high == 0 and not numbers.open_high):
        low, open_low = (
            (Fraction(0), False) if numbers.low is None or numbers.low < 0 else (numbers.low, numbers.open_low)
        )
        alternatives += decimals(low, open_low, numbers.high, numbers.open_high, numbers.kind)
    return "|".join(alternatives)


def _multiples_between(numbers: Numbers, step: Fraction) -> str | None:
    low, high = numbers.low, numbers.high
    if low is not None and high is not None and (high - low) / step < (2 if step == 1 else _MOST_ENUMERATED):
        values = [low + step * i for i in range(int((high - low) / step) + 1)]
        return "|".join(_plain(value) for value in values if numbers.contains(value)) or None
    if step == 1 and numbers.kind == "integer":
        return integers(None if low is None else int(low), None if high is None else int(high))
    multiples = _multiples(step) or _remainders(step)
    if multiples is None or (low is None and high is None and numbers.kind != "fraction"):
        return multiples
    bounds = expression(replace(numbers, multiple=None)) or ""
    conditions = [ecma.strings(f"^(?:{text})$")[0] for text in (bounds, multiples)]
    written = json_text.expression(automata.automaton(conditions))
    return written if written is not None and len(written) <= _MOST_CHARACTERS else None


def schema(numbers: Numbers) -> dict[str, Any]:
    """`numbers`, multiples of something, as llguidance reads them.

    Raises:
        GrammarError: it does not.
    """
    if numbers.kind == "fraction" or numbers.step is None:
        raise GrammarError(f"multiples of {numbers.multiple} that are no integers; strict=False works", "multipleOf")
    if numbers.step.numerator > limits.STEP:  # its automaton has a state per remainder
        limits.exceeded("STEP", limits.STEP, f"multipleOf {numbers.step}", "multipleOf")
    if numbers.step.denominator > 10**DIGITS:
        limits.exceeded("decimal places", DIGITS, "multipleOf", "multipleOf")
    keywords: dict[str, Any] = {"type": "integer" if numbers.step.denominator == 1 else "number"}
    keywords["multipleOf"] = _json_number(numbers.step)
    for keyword, bound in (("minimum", numbers.low), ("maximum", numbers.high)):
        if bound is not None and abs(bound) > _LARGEST_INLINE:
            raise GrammarError(f"multiples beyond {'-' * (bound < 0)}2**62; strict=False works", "multipleOf")
        if bound is not None:
            keywords[keyword] = _json_number(bound)
    return {**keywords, "x-guidance": {"whitespace_flexible": False}}


def _json_number(value: Fraction) -> int | float:
    if value.denominator == 1:
        return int(value)
    if Fraction(repr(float(value))) != value:
        raise GrammarError(f"{value} has more digits than a float; fewer, or strict=False, works", "multipleOf")
    return float(value)


def _remainders(step: Fraction) -> str | None:
    """Multiples of a decimal: an automaton whose states are decimal places and remainders, as an expression."""
    places = next((places for places in range(5) if (step * 10**places).denominator == 1), None)
    if places is None or (size := int(step * 10**places)) > _MOST_ENUMERATED:
        return None
    from interegular.fsm import FSM, Alphabet

    def state(place: int, rest: int) -> int:  # states 0, 1, 2: the beginning, a minus sign, a leading zero
        return 3 + place * size + rest % size

    def point(rest: int) -> int:
        return state(places + 1, rest) if places else -1

    first = [2, *(state(0, digit) for digit in range(1, 10))]
    rows = [[*first, 1, -1], [*first, -1, -1], [*[-1] * 11, point(0)]]
    for place in range(places + 1):
        after = [0] if place == 0 else [place + 1] if place < places else []
        for rest in range(size):
            digits = [state(after[0], 10 * rest + digit) for digit in range(10)] if after else [-1] * 10
            rows.append([*digits, -1, point(rest) if place == 0 else -1])
    rows += [[*(state(1, 10 * rest + digit) for digit in range(10)), -1, -1] for rest in range(size if places else 0)]
    ends = {
        state(place, rest)
        for place in range(places + 1)
        for rest in range(size)
        if rest * 10 ** (places - place) % size == 0
    }
    alphabet = Alphabet({(ord(letter), ord(letter)): symbol for symbol, letter in enumerate("0123456789-.")})
    moves = {number: {symbol: to for symbol, to in enumerate(row) if to >= 0} for number, row in enumerate(rows)}
    written = json_text.expression(automata.minimal(FSM(alphabet, set(moves), 0, {2, *ends}, moves)))
    return written if written is not None and len(written) <= _MOST_CHARACTERS else None


def _multiples(step: Fraction) -> str | None:
    """All multiples of a tenth, a hundredth, …, and of twice or five times that; None for other steps."""
    value, places = step, 0
    while value.denominator != 1 and places < _MOST_DECIMALS:
        value, places = value * 10, places + 1
    last = {1: "[0-9]", 2: "[02468]", 5: "[05]"}.get(int(value)) if value.denominator == 1 and places else None
    if last is None:
        return None
    shorter = f"[0-9]{{1,{places - 1}}}|" if places > 1 else ""
    return rf"-?(?:0|[1-9][0-9]*)(?:\.(?:{shorter}[0-9]{{{places - 1}}}{last}0{{0,{DIGITS}}}))?"


def _plain(value: Fraction) -> str:
    """One number as JSON writes it, as an expression."""
    text = str(value.numerator) if value.denominator == 1 else json.dumps(float(value))
    return text.replace(".", r"\.").replace("+", r"\+").replace("-", r"\-")
