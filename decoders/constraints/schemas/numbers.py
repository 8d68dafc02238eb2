"""Sets of numbers (intervals of integers, non-integers or both, and multiples), and equality of JSON values."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from ...errors import GrammarError

#: Floats represent every integer up to this number exactly.
EXACT = 2**53


@dataclass(frozen=True)
class Numbers:
    """The numbers of one `kind` between `low` and `high` (None: no bound).

    Attributes:
        open_low: whether `low` itself is excluded.
        open_high: whether `high` itself is excluded.
        kind: "integer" (1.0 is an integer), "fraction" (all numbers but integers), or "any".
        multiple: every number of the set is a multiple of this number; None: no condition.
    """

    low: Fraction | None = None
    open_low: bool = False
    high: Fraction | None = None
    open_high: bool = False
    kind: str = "any"
    multiple: Fraction | None = None

    @property
    def empty(self) -> bool:
        if self.low is None or self.high is None:
            return False
        if self.low > self.high:
            return True
        point = self.low == self.high
        return point and (self.open_low or self.open_high or not self.contains(self.low))

    def contains(self, value: Fraction) -> bool:
        """Whether the set contains `value`."""
        if self.low is not None and (value < self.low or (self.open_low and value == self.low)):
            return False
        if self.high is not None and (value > self.high or (self.open_high and value == self.high)):
            return False
        whole = value.denominator == 1
        if (self.kind == "integer" and not whole) or (self.kind == "fraction" and whole):
            return False
        return self.multiple is None or (value / self.multiple).denominator == 1

    def simplified(self) -> Numbers | None:
        """This set, with closed bounds if its numbers are evenly spaced; None if it is empty."""
        step = self.step
        if step is None:
            return None if self.empty else self
        if self.kind == "fraction" and step.denominator == 1:
            return None
        low, high = self.low, self.high
        if low is not None:
            low = math.ceil(low / step) * step
            low += step if self.open_low and low == self.low else 0
        if high is not None:
            high = math.floor(high / step) * step
            high -= step if self.open_high and high == self.high else 0
        simple = replace(self, low=low, open_low=False, high=high, open_high=False)
        if simple.kind == "any" and step.denominator == 1:
            simple = replace(simple, kind="integer")
        if simple.kind == "integer" and simple.multiple is not None and simple.multiple != step:
            simple = replace(simple, multiple=step)
        if simple.multiple == 1 and simple.kind == "integer":
            simple = replace(simple, multiple=None)
        return None if simple.empty else simple

    @property
    def step(self) -> Fraction | None:
        """The distance between neighbours if the numbers are evenly spaced, else None."""
        if self.kind == "integer":
            return Fraction(1) if self.multiple is None else _common_multiple(self.multiple, Fraction(1))
        return self.multiple


def intersection(a: Numbers, b: Numbers) -> Numbers | None:
    """The numbers in both `a` and `b`; None if there are none."""
    kind = b.kind if a.kind == "any" else a.kind
    if b.kind not in ("any", kind):
        return None
    low, open_low = max([(x.low, x.open_low) for x in (a, b) if x.low is not None], default=(None, False))
    highs = [(x.high, not x.open_high) for x in (a, b) if x.high is not None]
    high, closed_high = min(highs, default=(None, True))
    multiple = a.multiple or b.multiple
    if a.multiple is not None and b.multiple is not None:
        multiple = _common_multiple(a.multiple, b.multiple)
    return Numbers(low, open_low, high, not closed_high, kind, multiple).simplified()


def complement(a: Numbers) -> list[Numbers]:
    """The numbers that are not in `a`, as a list of sets.

    Raises:
        GrammarError: `a` is a set of multiples. Its complement cannot be expressed.
    """
    alternatives: list[Numbers] = []
    if a.low is not None:
        alternatives.append(Numbers(high=a.low, open_high=not a.open_low))
    if a.high is not None:
        alternatives.append(Numbers(low=a.high, open_low=not a.open_high))
    if a.low is None or a.low != a.high:  # a single number is excluded by its bounds alone
        if a.multiple is not None:
            raise GrammarError(
                "no grammar can exclude the multiples of a number; strict=False validates it afterwards", "multipleOf"
            )
        if a.kind != "any":
            alternatives.append(replace(a, kind="integer" if a.kind == "fraction" else "fraction"))
    return [simple for piece in alternatives if (simple := piece.simplified()) is not None]


def point(value: Any) -> Numbers:
    """The set whose only number is `value`."""
    exact = fraction(value)
    return Numbers(exact, False, exact, False, "integer" if exact.denominator == 1 else "fraction")


def fraction(value: Any) -> Fraction:
    """The exact number that a schema means by `value`. 0.1 is one tenth; floats from 2**53 on mean their binary value (1e23 < 10**23).

    Raises:
        GrammarError: `value` is infinite or not a number.
    """
    try:
        exact = isinstance(value, int) or abs(value) >= EXACT
        return Fraction(value) if exact else Fraction(repr(value))
    except (ValueError, OverflowError) as problem:
        raise GrammarError(f"{value!r} is not a number of JSON") from problem


def _common_multiple(a: Fraction, b: Fraction) -> Fraction:
    return Fraction(math.lcm(a.numerator * b.denominator, b.numerator * a.denominator), a.denominator * b.denominator)


def canonical(value: Any) -> str:
    """A text that is the same for equal values: 1, 1.0 and 1e0 are equal, and so are reordered objects; 1 and true are not equal.

    Raises:
        GrammarError: `value` contains an infinite number.
    """
    if isinstance(value, list):
        return f"[{','.join(map(canonical, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(key)}:{canonical(value[key])}" for key in sorted(value)) + "}"
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(fraction(value))
    return json.dumps(value)
