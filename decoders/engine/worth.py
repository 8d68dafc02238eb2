"""How far a chain of draft tokens is worth verifying, where many rows pay for the draft of one."""

from __future__ import annotations

from collections.abc import Callable

#: What a step adds to is worth so much less a step later.
DECAY = 0.97
#: In one of so many steps everything is verified, to see whether drafts have become better.
TRIAL = 24
#: While all blocks had one size, in one of so many steps nothing is, to see what nodes cost.
PLAIN_TRIAL = 4


class DraftWorth:
    """Counts how often the draft tokens at each depth are right and what nodes cost, and says how deep blocks should be.

    A block of B rows has as many nodes per row as the longest draft: where one row drafts eight tokens, eight times B nodes are
    run for them. The tokens that are written are the same at any depth.
    """

    def __init__(self) -> None:
        self._right: list[float] = []
        self._tried: list[float] = []
        self._sums = [0.0] * 5  # of 1, nodes, seconds, nodes², nodes · seconds
        self._steps = 0

    def depth(self, rows: int, drafted: list[int], size: Callable[[int], int]) -> int:
        """How many tokens deep to verify.

        Args:
            rows: of the batch.
            drafted: how many rows have a draft token at each depth.
            size: nodes of the block, per row, that holds so many.
        """
        self._steps += 1
        cost = self._cost()
        if cost is None:
            return 0 if self._steps % PLAIN_TRIAL == 0 else len(drafted)
        if self._steps % TRIAL == 0:
            return len(drafted)
        self._right += [0.5] * (len(drafted) - len(self._right))
        self._tried += [1.0] * (len(drafted) - len(self._tried))
        fixed, node = cost
        tokens, best, depth = float(rows), rows / (fixed + node * rows * size(1)), 0
        for place, count in enumerate(drafted):
            tokens += count * self._right[place] / self._tried[place]
            rate = tokens / (fixed + node * rows * size(place + 2))
            if rate > best:
                best, depth = rate, place + 1
        return depth

    def observe(self, rows: int, nodes: int, seconds: float, drafted: list[int], accepted: list[int]) -> None:
        """Learns from a step.

        Args:
            nodes: per row.
            drafted, accepted: draft tokens of every row, and how many of them were right.
        """
        x = float(rows * nodes)
        self._sums = [
            DECAY * old + new for old, new in zip(self._sums, (1.0, x, seconds, x * x, x * seconds), strict=True)
        ]
        for place in range(min(max(drafted, default=0), len(self._tried))):
            tried = sum(count > place for count in drafted)
            right = sum(count > place for count in accepted)
            self._tried[place] = DECAY * self._tried[place] + tried
            self._right[place] = DECAY * self._right[place] + right

    def _cost(self) -> tuple[float, float] | None:
        """Seconds of a step and of each node in it; None before steps of different sizes were seen."""
        one, x, y, xx, xy = self._sums
        spread = one * xx - x * x
        if one < 4 or spread <= 1e-6 * xx:
            return None
        node = max((one * xy - x * y) / spread, 0.0)
        return max((y - node * x) / one, 0.05 * y / one), node
