"""Sets of strings. A set has patterns that must match or must not match, a range of lengths, enumerated values and excluded values."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from ...errors import GrammarError
from ..patterns import automata
from ..patterns import limits as pattern_limits
from ..patterns.tree import NOTHING, Pattern, words
from . import formats

if TYPE_CHECKING:
    from interegular.fsm import FSM


@dataclass(frozen=True)
class Strings:
    """A set of strings: all strings that meet every condition.

    Attributes:
        conditions: trees that the strings must match (True) or must not match (False).
        formats: names of known formats, which all :attr:`written` strings meet, unless they are enumerated. Since only some validators
            check formats, a format decides neither :meth:`contains` nor :func:`complement`.
        low: least length in characters.
        high: greatest length, None for no bound.
        values: all strings of the set, if they are enumerated; they meet all other conditions. None: not enumerated.
        excluded: strings that are not in the set.
    """

    conditions: frozenset[tuple[Pattern, bool]] = frozenset()
    formats: frozenset[str] = frozenset()
    low: int = 0
    high: int | None = None
    values: frozenset[str] | None = None
    excluded: frozenset[str] = field(default=frozenset())

    @property
    def unconstrained(self) -> bool:
        """Whether all strings are in the set."""
        return self == ALL

    def contains(self, text: str) -> bool:
        """Whether `text` is in the set, without regard to formats."""
        if self.values is not None:
            return text in self.values
        if text in self.excluded or len(text) < self.low or (self.high is not None and len(text) > self.high):
            return False
        return all(automata.matches(pattern, text) is good for pattern, good in self.conditions)

    @property
    def written(self) -> Strings | None:
        """The strings of the set that also meet the formats; a grammar allows no other strings. None if there are none.

        Raises:
            GrammarError: the automaton of the conditions and formats would be too large.
        """
        if self.values is not None:
            return self
        conditions = self.conditions | {(formats.tree(name), True) for name in self.formats}
        try:
            return replace(self, conditions=conditions, formats=frozenset()).simplified()
        except GrammarError as problem:  # only the formats make the automaton too large
            raise GrammarError(str(problem), "format" if self.formats else None) from problem

    def automaton(self) -> FSM:
        """The strings as an automaton, without regard to formats; not for enumerated strings. Raises GrammarError: too large."""
        return _automaton(self)

    def simplified(self) -> Strings | None:
        """This set in simplest form; None if it is empty."""
        if self.values is not None:
            return self if self.values else None
        if self.high is not None and self.low > self.high:
            return None
        if self.high == 0:
            return _ONLY_EMPTY if self.contains("") else None
        if len(self.conditions) == 1 and not (self.low or self.high or self.excluded):
            ((pattern, good),) = self.conditions
            if good:  # a negated tree that matches nothing is no condition
                return None if pattern == NOTHING else self
        return None if self.conditions and _nothing(self) else self


ALL = Strings()
_ONLY_EMPTY = Strings(values=frozenset([""]))


def intersection(a: Strings, b: Strings) -> Strings | None:
    """The strings in both `a` and `b`; None if there are none."""
    if a == b or b.unconstrained:
        return a
    if a.unconstrained:
        return b
    if a.values is not None or b.values is not None:
        few, other = (a, b) if a.values is not None else (b, a)
        matching = frozenset(text for text in few.values or () if other.contains(text))
        return Strings(values=matching).simplified()
    highs = [x.high for x in (a, b) if x.high is not None]
    return Strings(
        a.conditions | b.conditions, a.formats | b.formats, max(a.low, b.low), min(highs, default=None), None,
        a.excluded | b.excluded,
    ).simplified()  # fmt: skip


def complement(a: Strings) -> list[Strings]:
    """The strings that are not in `a`, as a list of sets."""
    if a.values is not None:
        return [Strings(excluded=a.values)]
    left = [Strings(high=a.low - 1).simplified()] if a.low else []
    if a.high is not None:
        left.append(Strings(low=a.high + 1))
    left += [
        Strings(conditions=frozenset([(pattern, not good)])).simplified()
        for pattern, good in sorted(a.conditions, key=repr)
    ]
    if a.excluded:
        left.append(Strings(values=a.excluded))
    return [piece for piece in left if piece is not None]


def _nothing(strings: Strings) -> bool:
    """Whether `strings` is empty. If the automaton is too large, the automaton without lengths is searched for strings of each length.

    Raises:
        GrammarError: the automaton of the patterns alone is too large, or the lengths are too great.
    """
    try:
        return strings.automaton().empty()
    except GrammarError:
        if strings.high is None or strings.high >= pattern_limits.STATES:
            raise
        patterns = replace(strings, low=0, high=None).automaton()
    reached = set() if patterns.empty() else {0}
    for length in range(strings.high + 1):
        if length >= strings.low and reached & patterns.finals:
            return False
        reached = {after for state in reached for after in patterns.map[state].values()}
    return True


@lru_cache(maxsize=64)  # each automaton may take 10 MB
def _automaton(strings: Strings) -> FSM:
    conditions = sorted(strings.conditions, key=repr)  # sets have no fixed order
    return automata.automaton([*conditions, (words(strings.excluded), False)], strings.low, strings.high)
