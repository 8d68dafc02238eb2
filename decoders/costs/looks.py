"""How often to look at what may not pay, when looking takes time."""

from __future__ import annotations

import math
from dataclasses import dataclass

#: Looking at what does not pay may cost this share of the time.
LOOKING = 0.005
#: Weight of the newest look in the mean of what looks bring.
LOOK_WEIGHT = 1 / 8
#: Multiples of it modulo one lie evenly wherever one stops.
GOLDEN = 0.6180339887498949


@dataclass
class Looks:
    """Less and less often while nothing is found, and in every step while it pays.

    Attributes:
        count: how many there were.
        net: mean of what one has brought beyond its price, in tokens; None before the first.
        wait: steps between two of them, on average; 0 while it pays.
    """

    count: int = 0
    net: float | None = None
    wait: int = 0

    def due(self, waited: int, most: int) -> bool:
        """Whether to look again.

        Args:
            waited: steps since the last look.
            most: steps to wait at most, on average.

        Waits are drawn out and cut short in turns: where the text repeats itself every few steps, looks that are as far apart
        would always come at the same place.
        """
        return waited >= int(2 * min(self.wait, most) * (GOLDEN * self.count % 1) + 0.5)

    @property
    def pays(self) -> bool:
        """Whether looks bring more than their price at present."""
        return self.net is not None and not self.wait

    def judge(self, net: float, longest: int) -> None:
        """Learns what a look has brought beyond its price. longest: steps to wait at most."""
        self.count += 1
        self.net = net if self.net is None else self.net + LOOK_WEIGHT * (net - self.net)
        self.wait = 0 if net > 0 or self.net > 0 else min(max(2 * self.wait, 1), longest)


def affordable(share: float, longest: int) -> int:
    """Steps between two looks that take `share` of a step each, for them to cost :data:`LOOKING` of the time; `longest` at most."""
    return min(math.ceil(share / LOOKING), longest)


def mean_seconds(known: float | None, seconds: float, weight: float) -> float:
    """A running mean with one more measurement, of this `weight`; any may have been interrupted, so four times the mean counts at most.

    Args:
        known: the mean so far; None or 0 before there is one.
    """
    return seconds if not known else known + weight * (min(seconds, 4 * known) - known)
