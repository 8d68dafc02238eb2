"""An alphabet of as few symbols as possible: characters that are in the same sets of some trees are one symbol."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING

from . import characters
from .characters import Ranges
from .tree import Cat, Chars, Or, Pattern, Repeat, irregular

if TYPE_CHECKING:
    from interegular.fsm import Alphabet


class Symbols:
    """Numbers that stand for characters.

    Attributes:
        count: of symbols, from 0 on.
        of: the symbols of each set in the trees.
    """

    def __init__(self, trees: Sequence[Pattern]) -> None:
        sets = sorted({chars for tree in trees for chars in _sets(tree)})
        events: dict[int, list[int]] = {0: []}  # border -> sets that are entered or left there
        for index, chars in enumerate(sets):
            for low, high in chars:
                events.setdefault(low, []).append(index)
                events.setdefault(high + 1, []).append(index)
        events.pop(characters.LAST + 1, None)
        self.borders = sorted(events)
        self.owners: list[int] = []  # the symbol from each border to the next
        numbers: dict[frozenset[int], int] = {}
        members: set[int] = set()
        for border in self.borders:
            members.symmetric_difference_update(events[border])
            self.owners.append(numbers.setdefault(frozenset(members), len(numbers)))
        self.count = len(numbers)
        inside: list[list[int]] = [[] for _ in sets]
        for members_of, symbol in numbers.items():
            for index in members_of:
                inside[index].append(symbol)
        self.of: dict[Ranges, frozenset[int]] = dict(zip(sets, map(frozenset, inside), strict=True))

    def symbol(self, character: str) -> int:
        return self.owners[bisect_right(self.borders, ord(character)) - 1]

    @property
    def alphabet(self) -> Alphabet:
        """The symbols as interegular's alphabet of ranges of characters."""
        from interegular.fsm import Alphabet  # most schemas have no automata

        afters = [*self.borders[1:], characters.LAST + 1]
        pairs = zip(self.borders, afters, self.owners, strict=True)
        return Alphabet({(low, after - 1): symbol for low, after, symbol in pairs})


def _sets(tree: Pattern) -> set[Ranges]:
    match tree:
        case Chars(ranges):
            return {ranges}
        case Cat(parts) | Or(parts):
            return set().union(*map(_sets, parts))
        case Repeat(part, _, _):
            return _sets(part)
        case _:
            raise irregular(tree)
