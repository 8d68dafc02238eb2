"""An observer that counts tokens per step while calls run."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from decoders import ObservedCall, Observer, hookimpl


class Depths(Observer):
    """Counts, by strategy, how many tokens a row writes in a step: ``counts["tiny_eagle"][3]`` is how often a row wrote 3 tokens."""

    name = "depths"
    summary = "counts steps by the number of tokens that they write, for each strategy"

    def __init__(self) -> None:
        self.counts: defaultdict[str, Counter[int]] = defaultdict(Counter)

    def step(self, call: ObservedCall, tokens: Sequence[Sequence[int]]) -> None:
        self.counts[call.strategy].update(len(row) for row in tokens if row)


@hookimpl
def decoders_observers() -> list[type[Observer]]:
    return [Depths]
