"""Exact regular expressions for sets of numbers as JSON text.

Integers are written without a fraction (``1``, not ``1.0``). Numbers with a bound other than 0 have no exponent, and few digits where
rounding matters. So the float that a reader parses is within the bounds, too, and is an integer only if the written number is one.
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
from . import limits, string_text
from .numbers import Numbers, intersection

INTEGER = "-?(?:0|[1-9][0-9]*)"
#: An exponent within the range of floats.
EXPONENT = r"[eE][+\-]?0*(?:[1-9]?[0-9]|[12][0-9][0-9]|30[0-7])"
#: Number of decimal digits that a float represents exactly.
DIGITS = 15
#: Any number; exponents only in scientific notation, and within the range of floats.
NUMBER = rf"-?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]+)?|[0-9](?:\.[0-9]+)?{EXPONENT})"
_LARGE = 10**DIGITS
_LARGEST = int(sys.float_info.max)
_FRACTION = r"-?(?:0\.[0-9]{0,14}[1-9]|[1-9][0-9]{0,7}\.[0-9]{0,6}[1-9]|[1-9][0-9]{8,12}\.[0-9]?[1-9])"  # ≤ 15 digits
_LARGEST_INLINE = 2**62  # largest bound for llguidance, which uses 64 bits
_MOST_DECIMALS = 40  # decimal places of a step
_MOST_ENUMERATED = 200  # enumerated values
_MOST_CHARACTERS = 5_000


@lru_cache(maxsize=1024)
def expression(numbers: Numbers) -> str | None:
    """A regular expression for `numbers`, a simplified set; None if there is no short one, "" if no number can be written."""
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
    """Whether a decimal near `bound`, even one of few digits, may become a float that equals the bound or lies beyond it."""
    if bound is None or abs(bound) < _LARGE:
        return False
    return is_open or abs(bound) > _LARGEST or Fraction(float(bound)) != bound


def _within(numbers: Numbers, most: int) -> Numbers | None:
    return intersection(numbers, Numbers(Fraction(-most), False, Fraction(most), False))


def _between(numbers: Numbers | None) -> str:
    """A regular expression for the decimals between the bounds of `numbers`, at least one of which is given; "" for None."""
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
    multiples = _multiples(step)
    if multiples is None or (low is None and high is None and numbers.kind != "fraction"):
        return multiples
    bounds = expression(replace(numbers, multiple=None)) or ""
    conditions = [ecma.strings(f"^(?:{text})$")[0] for text in (bounds, multiples)]
    written = string_text.expression(automata.automaton(conditions))
    return written if written is not None and len(written) <= _MOST_CHARACTERS else None


def schema(numbers: Numbers) -> dict[str, Any]:
    """`numbers`, which are multiples of a step, as a JSON schema for llguidance. Raises GrammarError: llguidance cannot read them."""
    if numbers.kind == "fraction" or numbers.step is None:
        raise GrammarError(
            f"no grammar can exclude integers from multiples of {numbers.multiple}: set strict=False", "multipleOf"
        )
    if numbers.step.numerator > limits.STEP:  # the automaton has a state per remainder
        limits.exceeded("STEP", limits.STEP, f"multipleOf {numbers.step}", "multipleOf")
    if numbers.step.denominator > 10**DIGITS:
        limits.exceeded("decimal places", DIGITS, "multipleOf", "multipleOf")
    keywords: dict[str, Any] = {"type": "integer" if numbers.step.denominator == 1 else "number"}
    keywords["multipleOf"] = _json_number(numbers.step)
    for keyword, bound in (("minimum", numbers.low), ("maximum", numbers.high)):
        if bound is not None and abs(bound) > _LARGEST_INLINE:
            raise GrammarError(f"bound is beyond {'-' * (bound < 0)}2**62: set strict=False", "multipleOf")
        if bound is not None:
            keywords[keyword] = _json_number(bound)
    return {**keywords, "x-guidance": {"whitespace_flexible": False}}


def _json_number(value: Fraction) -> int | float:
    if value.denominator == 1:
        return int(value)
    if Fraction(repr(float(value))) != value:
        raise GrammarError(f"{value} has more digits than a float: take fewer, or set strict=False", "multipleOf")
    return float(value)


def _multiples(step: Fraction) -> str | None:
    """A regular expression for all multiples of `step`; None unless `step` is 1, 2 or 5 divided by 10, 100, …."""
    value, places = step, 0
    while value.denominator != 1 and places < _MOST_DECIMALS:
        value, places = value * 10, places + 1
    last = {1: "[0-9]", 2: "[02468]", 5: "[05]"}.get(int(value)) if value.denominator == 1 and places else None
    if last is None:
        return None
    shorter = f"[0-9]{{1,{places - 1}}}|" if places > 1 else ""
    return rf"-?(?:0|[1-9][0-9]*)(?:\.(?:{shorter}[0-9]{{{places - 1}}}{last}0{{0,{DIGITS}}}))?"


def _plain(value: Fraction) -> str:
    """A regular expression for one number."""
    text = str(value.numerator) if value.denominator == 1 else json.dumps(float(value))
    return text.replace(".", r"\.").replace("+", r"\+").replace("-", r"\-")


# Regular expressions for digits between bounds. The bounds are not negative except in :func:`integers`.


def integers(low: int | None, high: int | None) -> str:
    """A regular expression for the integers from `low` to `high`, None for no bound."""
    if low is None and high is None:
        return INTEGER
    alternatives = []
    if low is None or low < 0:
        alternatives += [
            "-" + text for text in _magnitudes(1 if high is None or high >= 0 else -high, None if low is None else -low)
        ]
    if high is None or high >= 0:
        alternatives += _magnitudes(max(low or 0, 0), high)
    return "|".join(alternatives)


def _magnitudes(low: int, high: int | None) -> list[str]:
    """Regular expressions that together match the integers from `low` (0 or more) to `high`; None for no bound."""
    if len(str(low if high is None else high)) > 400:
        limits.exceeded("digits of a bound", 400, "a bound of numbers", "minimum")
    if high is None:
        size = len(str(low))
        more = f"[1-9][0-9]{{{size},}}"
        if low == 0:
            return ["0", "[1-9][0-9]*"]
        return [*_same_size(str(low), "9" * size), more]
    alternatives: list[str] = []
    for size in range(len(str(low)), len(str(high)) + 1):
        first = max(low, 10 ** (size - 1) if size > 1 else 0)
        last = min(high, 10**size - 1)
        if first <= last:
            alternatives += _same_size(str(first), str(last))
    return alternatives


def _same_size(low: str, high: str) -> list[str]:
    """Regular expressions that together match the digit strings from `low` to `high`, which are equally long."""
    if not low:
        return [""]
    rest = len(low) - 1
    if low == "0" * len(low) and high == "9" * len(high):
        return [_digits(len(low))]
    if low[0] == high[0]:
        return [low[0] + text for text in _same_size(low[1:], high[1:])]
    first, last = int(low[0]), int(high[0])
    alternatives = []
    if low[1:] != "0" * rest:
        alternatives += [low[0] + text for text in _same_size(low[1:], "9" * rest)]
        first += 1
    if high[1:] != "9" * rest:
        alternatives += [high[0] + text for text in _same_size("0" * rest, high[1:])]
        last -= 1
    if first <= last:
        alternatives.append(_span(first, last) + _digits(rest))
    return alternatives


def _digits(count: int) -> str:
    return "" if count == 0 else "[0-9]" if count == 1 else f"[0-9]{{{count}}}"


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"[{first}-{last}]"


def decimals(low: Fraction, open_low: bool, high: Fraction | None, open_high: bool, kind: str) -> list[str]:
    """Regular expressions that together match the decimals from `low` (0 or more) to `high`; None for no bound.

    `kind` is as in :class:`~.numbers.Numbers`.
    """
    # Digits are few where rounding could give a bound that is excluded or, for kind "fraction", an integer.
    critical = [low] * (open_low or kind == "fraction") + [high or Fraction(0)] * (open_high or kind == "fraction")
    most = max(1, DIGITS - len(str(int(max(critical))))) if critical else None
    open_low = open_low or (kind == "fraction" and low.denominator == 1)
    any_fraction = _fractions("", kind == "fraction", None, False, most)
    floor = int(low)
    alternatives = []
    if high is None:
        if low == 0 and kind == "any":
            lead = "[1-9]" if open_low else "[0-9]"
            alternatives.append(rf"{lead}(?:\.[0-9]+)?{EXPONENT}")
        alternatives.append(_with_fraction(integers(floor + 1, None), any_fraction))
        return [
            *alternatives,
            _with_fraction(str(floor), _fractions(_digits_behind_point(low), open_low, None, False, most)),
        ]
    ceiling = int(high)
    if floor == ceiling:
        text = _with_fraction(
            str(floor), _fractions(_digits_behind_point(low), open_low, _digits_behind_point(high), open_high, most)
        )
        return [text] if text else []
    alternatives.append(_with_fraction(str(floor), _fractions(_digits_behind_point(low), open_low, None, False, most)))
    if floor + 1 <= ceiling - 1:
        alternatives.append(_with_fraction(integers(floor + 1, ceiling - 1), any_fraction))
    alternatives.append(
        _with_fraction(str(ceiling), _fractions("", kind == "fraction", _digits_behind_point(high), open_high, most))
    )
    return [text for text in alternatives if text]


def _with_fraction(integer: str, fractions: tuple[bool, list[str]]) -> str:
    """A regex for numbers whose integer part matches the regex `integer`. fractions: a result of :func:`_fractions`."""
    optional, alternatives = fractions
    if not optional and not alternatives:
        return ""
    tail = rf"\.(?:{'|'.join(alternatives)})" if alternatives else ""
    return f"(?:{integer})" + (f"(?:{tail})?" if optional and tail else tail)


def _fractions(low: str, open_low: bool, high: str | None, open_high: bool, most: int | None) -> tuple[bool, list[str]]:
    """Expressions for the digits d of the fractions 0.d from 0.`low` to 0.`high` (None: below 1); at most `most` digits.

    Returns:
        whether there may be no digits, and the expressions for one digit or more.
    """
    optional = low == "" and not open_low and not (high == "" and open_high)
    return optional, [text for text in _following_digits(low, open_low, high, open_high, most) if text]


def _following_digits(low: str, open_low: bool, high: str | None, open_high: bool, most: int | None) -> list[str]:
    """Expressions for the digits of :func:`_fractions`, "" for none. `low` and `high` have no trailing zeros."""
    if most is not None and most <= 0:
        return [""] if low == "" and not open_low and not (high == "" and open_high) else []
    rest = "*" if most is None else f"{{0,{most - 1}}}"
    every = "[0-9]+" if most is None else f"[0-9]{{1,{most}}}"
    if high is None and low == "":
        if not open_low:
            return [every, ""]
        return [f"0*[1-9][0-9]{rest}"] if most is None else [f"[0-9]{{0,{most - 1}}}[1-9]"]
    if high == "" and not (low == "" and not open_low):
        return []
    if high == "":
        zeros = "0+" if most is None else f"0{{1,{most}}}"
        return [] if open_high else [zeros, ""]
    alternatives = [] if low or open_low else [""]
    bottom, top = int(low[:1] or 0), 9 if high is None else int(high[0])
    fewer = None if most is None else most - 1
    if bottom == top:
        tails = _following_digits(low[1:], open_low, None if high is None else high[1:], open_high, fewer)
        return alternatives + [str(bottom) + tail for tail in tails]
    alternatives += [str(bottom) + tail for tail in _following_digits(low[1:], open_low, None, False, fewer)]
    if bottom + 1 <= top - 1 or (high is None and bottom + 1 <= top):
        last = top if high is None else top - 1
        alternatives.append(_span(bottom + 1, last) + f"[0-9]{rest}")
    if high is not None:
        alternatives += [str(top) + tail for tail in _following_digits("", False, high[1:], open_high, fewer)]
    return alternatives


def _digits_behind_point(value: Fraction) -> str:
    part = value - int(value)
    digits = ""
    while part:
        part *= 10
        digits += str(int(part))
        part -= int(part)
        if len(digits) > 400:
            limits.exceeded("digits of a bound", 400, "a bound of numbers", "minimum")
    return digits
