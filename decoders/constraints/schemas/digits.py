"""Decimal digits between bounds, as regular expressions. Bounds are not negative here, but for :func:`integers`."""

from __future__ import annotations

from fractions import Fraction

from . import limits

INTEGER = "-?(?:0|[1-9][0-9]*)"
#: An exponent that a float has.
EXPONENT = r"[eE][+\-]?0*(?:[1-9]?[0-9]|[12][0-9][0-9]|30[0-7])"
#: Decimal digits that a float keeps apart.
DIGITS = 15


def integers(low: int | None, high: int | None) -> str:
    """The integers from `low` to `high`, None for no bound."""
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
    """Integers from `low` to `high`, none below zero."""
    if max(len(str(low)), len(str(high or 0))) > 400:
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
    """Digit strings from `low` to `high`, all of one size."""
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
    """Any `count` digits."""
    return "" if count == 0 else "[0-9]" if count == 1 else f"[0-9]{{{count}}}"


def _span(first: int, last: int) -> str:
    """One digit from `first` to `last`."""
    return str(first) if first == last else f"[{first}-{last}]"


def decimals(low: Fraction, open_low: bool, high: Fraction | None, open_high: bool, kind: str) -> list[str]:
    """Alternatives for the decimals from `low`, 0 or more, to `high`, None for no bound; `kind` as in :class:`~.numbers.Numbers`."""
    near = [low] * (open_low or kind == "fraction") + [high or Fraction(0)] * (open_high or kind == "fraction")
    most = max(1, DIGITS - len(str(int(max(near))))) if near else None
    open_low = open_low or (kind == "fraction" and low.denominator == 1)
    some = _fractions("", kind == "fraction", None, False, most)
    floor = int(low)
    alternatives = []
    if high is None:
        if low == 0 and kind == "any":
            lead = "[1-9]" if open_low else "[0-9]"
            alternatives.append(rf"{lead}(?:\.[0-9]+)?{EXPONENT}")
        alternatives.append(_with_fraction(integers(floor + 1, None), some))
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
        alternatives.append(_with_fraction(integers(floor + 1, ceiling - 1), some))
    alternatives.append(
        _with_fraction(str(ceiling), _fractions("", kind == "fraction", _digits_behind_point(high), open_high, most))
    )
    return [text for text in alternatives if text]


def _with_fraction(integer: str, fractions: tuple[bool, list[str]]) -> str:
    """`integer` with one of `fractions` (whether there may be none, and what may follow the point)."""
    none, alternatives = fractions
    if not none and not alternatives:
        return ""
    tail = rf"\.(?:{'|'.join(alternatives)})" if alternatives else ""
    return f"(?:{integer})" + (f"(?:{tail})?" if none and tail else tail)


def _fractions(low: str, open_low: bool, high: str | None, open_high: bool, most: int | None) -> tuple[bool, list[str]]:
    """Digits d such that 0.d is from 0.`low` to 0.`high` (None: below 1), at most `most` of them.

    Returns:
        whether there may be no digits, and the alternatives.
    """
    none = low == "" and not open_low and not (high == "" and open_high)
    return none, [text for text in _following_digits(low, open_low, high, open_high, most, True) if text]


def _following_digits(
    low: str, open_low: bool, high: str | None, open_high: bool, most: int | None, first: bool
) -> list[str]:
    """The digits that may come, at least one if `first`. `low` and `high` have no zeros at their end."""
    if most is not None and most <= 0:
        return [""] if low == "" and not open_low and not (high == "" and open_high) else []
    rest = "*" if most is None else f"{{0,{most - 1}}}"
    every = "[0-9]+" if most is None else f"[0-9]{{1,{most}}}"
    if high is None and low == "":
        if not open_low:
            return [every] if first else [every, ""]
        return [f"0*[1-9][0-9]{rest}"] if most is None else [f"[0-9]{{0,{most - 1}}}[1-9]"]
    if high == "" and not (low == "" and not open_low):
        return []
    if high == "":
        zeros = "0+" if most is None else f"0{{1,{most}}}"
        return [] if open_high else [zeros] if first else [zeros, ""]
    alternatives = [] if first or low or open_low else [""]
    bottom, top = int(low[:1] or 0), 9 if high is None else int(high[0])
    fewer = None if most is None else most - 1
    if bottom == top:
        tails = _following_digits(low[1:], open_low, None if high is None else high[1:], open_high, fewer, False)
        return alternatives + [str(bottom) + tail for tail in tails]
    alternatives += [str(bottom) + tail for tail in _following_digits(low[1:], open_low, None, False, fewer, False)]
    if bottom + 1 <= top - 1 or (high is None and bottom + 1 <= top):
        last = top if high is None else top - 1
        alternatives.append(_span(bottom + 1, last) + f"[0-9]{rest}")
    if high is not None:
        alternatives += [str(top) + tail for tail in _following_digits("", False, high[1:], open_high, fewer, False)]
    return alternatives


def _digits_behind_point(value: Fraction) -> str:
    """The digits behind the point of `value`."""
    part = value - int(value)
    digits = ""
    while part:
        part *= 10
        digits += str(int(part))
        part -= int(part)
        if len(digits) > 400:
            limits.exceeded("digits of a bound", 400, "a bound of numbers", "minimum")
    return digits
