"""How sure a draft must be to pay, from what drafting and verifying cost and what is accepted, all measured."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from statistics import StatisticsError, linear_regression, median

from torch import Tensor

from ..strategy import Step

#: Steps that measurements are taken over, and how many there must be before they are believed.
WINDOW, ENOUGH = 32, 3


class CalibratedThreshold:
    """The threshold on the probability of a draft token that gives most tokens per second.

    Another draft token costs ``c`` seconds to draft and ``v`` to verify and brings, with cumulative probability ``P``, ``P``
    tokens; rows share a pass and so its seconds. In the long run a second is worth ``R`` tokens, the present rate. By the
    renewal-reward argument (Dinkelbach 1967 for the ratio of tokens to seconds) drafting goes on as long as
    ``P >= (c + v) R``. A draft model is more or
    less sure than it is right: ``P`` is its product of probabilities times the measured ratio of accepted to expected.

    Times differ from run to run, so the number of steps may; the tokens do not.
    """

    def __init__(self, rows: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self.rows, self._clock = rows, clock
        self._draft: deque[float] = deque(maxlen=WINDOW)  # seconds per pass
        self._verify: deque[tuple[int, float]] = deque(maxlen=WINDOW)  # nodes, seconds
        self._steps: deque[tuple[int, float]] = deque(maxlen=WINDOW)  # tokens, seconds
        self._hits: deque[tuple[float, float]] = deque(maxlen=WINDOW)  # accepted, expected
        self._begun = self._proposed = 0.0
        self._passes = 0
        self._first = True

    def drafting(self) -> None:
        """A step begins."""
        self._begun = self._clock()

    def drafted(self, passes: int) -> None:
        """The draft is made. passes: of the draft model so far in this call."""
        self._proposed = self._clock()
        self._draft.append((self._proposed - self._begun) / max(passes - self._passes, 1))
        self._passes = passes

    def threshold(self, step: Step, expected: Tensor | None) -> float | None:
        """The threshold from here on; None while too little is known.

        Args:
            expected: sum of the cumulative probabilities of all draft tokens, of a chain; None leaves them as they are.
        """
        now = self._clock()
        if self._first:  # compilation may hide in the first step
            self._first = False
            self._draft.clear()
            return None
        emitted = int(step.emitted.sum())
        self._verify.append((step.nodes.shape[1], now - self._proposed))
        self._steps.append((emitted, now - self._begun))
        if expected is not None:
            self._hits.append((float(step.accepted.sum()), float(expected)))
        if len(self._steps) < ENOUGH or not emitted:
            return None
        seconds = sum(seconds for _, seconds in self._steps)
        if not seconds > 0:  # a clock too coarse to say
            return None
        rate = sum(tokens for tokens, _ in self._steps) / seconds
        try:
            per_node = max(linear_regression(*zip(*self._verify, strict=True)).slope, 0.0)
        except StatisticsError:  # all blocks had the same size
            per_node = 0.0
        accepted, expectation = (sum(values) for values in zip(*self._hits, strict=True)) if self._hits else (1.0, 1.0)
        trust = min(max(accepted / expectation, 0.1), 10.0) if expectation > 0 else 1.0
        return (median(self._draft) + per_node) / self.rows * rate / trust
