"""An observer: it is called while calls run, and keeps figures."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from decoders import ObservedCall, Observer, hookimpl


class Depths(Observer):
    """How many tokens the steps of each strategy wrote in a row: ``depths.counts["tiny_eagle"][3]`` steps wrote 3."""

    name = "depths"
    summary = "counts steps by the number of tokens that they write, for each strategy"

    def __init__(self) -> None:
        self.counts: defaultdict[str, Counter[int]] = defaultdict(Counter)

    def step(self, call: ObservedCall, tokens: Sequence[Sequence[int]]) -> None:
        self.counts[call.strategy].update(len(row) for row in tokens if row)


@hookimpl
def decoders_observers() -> list[type[Observer]]:
    return [Depths]
