"""What a step costs, fitted to the steps of calls: for those that do without a measured curve (:mod:`.steps`)."""

from __future__ import annotations


class FittedStepCosts:
    """What a step of a model costs, and each node in it: a straight line through the steps that were seen, of which recent ones count
    more. Steps that run compiled have little in common with others: what the one kind cost is forgotten once the other comes.
    """

    #: Share of its weight that a step keeps when the next one comes.
    DECAY = 0.97
    #: A node's share of the cost of a step, until steps of several sizes were seen.
    GUESS = 0.03
    #: Steps from one trial to the next: before that, and after it. A trial is a step without a draft if all had one, and else one
    #: in which nodes are taken to cost less than they seem to.
    TRIAL, LATER_TRIAL = 4, 128
    #: By which their cost is divided then.
    HOPE = 4

    def __init__(self) -> None:
        self._compiled = False
        self._forget()

    def _forget(self) -> None:
        self._sums = [0.0] * 5  # of 1, nodes, seconds, nodes², nodes · seconds
        self._steps = 0
        self._smallest = 0

    def observe(self, nodes: int, seconds: float, compiled: bool) -> None:
        """Learns from a step of so many nodes, all rows together."""
        if compiled != self._compiled:
            self._compiled = compiled
            self._forget()
        new = (1.0, nodes, seconds, nodes * nodes, nodes * seconds)
        self._sums = [self.DECAY * old + value for old, value in zip(self._sums, new, strict=True)]
        self._smallest = min(self._smallest or nodes, nodes)
        self._steps += 1

    def step(self, nodes: int) -> float | None:
        """Seconds of a step of so many nodes, all rows together; None before steps of several sizes were seen."""
        line = self._line()
        return None if line is None else line[0] + line[1] * nodes

    def estimate(self, plain: int) -> tuple[float, float]:
        """What to take a step and each node in it for, in whatever unit. plain: nodes of a step without a draft."""
        line, trial = self._line(), self.LATER_TRIAL
        if line is None:
            line, trial = (1.0, self.GUESS), self.TRIAL
            if self._smallest > plain and self._steps % trial == 0:
                return 0.0, 1.0
        return line[0], line[1] / self.HOPE if self._steps % trial == trial - 1 else line[1]

    def _line(self) -> tuple[float, float] | None:
        one, x, y, xx, xy = self._sums
        spread = one * xx - x * x
        if one < self.TRIAL or spread <= 1e-6 * xx:
            return None
        node = max((one * xy - x * y) / spread, 0.0)
        return max((y - node * x) / one, 0.05 * y / one), node
