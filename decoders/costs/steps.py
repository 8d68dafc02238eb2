"""Estimates the seconds of a step: from a measured curve corrected by observed steps, or from observed steps alone."""

from __future__ import annotations

from collections.abc import Callable

from .curve import CostCurve

#: Weights of a new step in running means of the ratio of observed to expected seconds. `QUICK` is for the mean over all sizes. `SLOW`
#: is the least weight for the mean of the step's own size.
QUICK, SLOW = 1 / 8, 1 / 32
#: The curve weighs as much as this many observed steps of a size.
TRUST = 8
#: Ratios of observed to expected seconds are clipped to this factor, up and down.
OUTLIER = 3.0

#: Nodes of a block → (mean ratio of observed to expected seconds, relative to the ratio of all sizes; number of steps).
SizeRatios = dict[int, tuple[float, int]]
KNOWN = (1.0, 0)


class StepLine:
    """A straight line fitted to observed steps: seconds by the number of nodes of all rows. Recent steps weigh more.

    Compiled and uncompiled steps differ in cost, so a change between them resets the line.
    """

    #: Every new step multiplies the weights of earlier steps by this.
    DECAY = 0.97
    #: The assumed cost of a node, relative to a step's fixed cost, before steps of several sizes were observed.
    GUESS = 0.03
    #: Number of steps from trial to trial, before and after steps of several sizes were observed. In a trial, a step is chosen as if
    #: nodes cost less. If all steps so far had a draft of the same size, steps without a draft are tried, too.
    TRIAL, LATER_TRIAL = 4, 128
    #: In a trial, a node's assumed cost is the estimate divided by this.
    HOPE = 4

    def __init__(self) -> None:
        self._compiled = False
        self._forget()

    def _forget(self) -> None:
        self._sums = [0.0] * 5  # weighted sums of 1, nodes, seconds, nodes², nodes · seconds
        self._steps = 0
        self._smallest = 0

    def observe(self, nodes: int, seconds: float, compiled: bool) -> None:
        """Adds an observed step to the fit. nodes: number of nodes of all rows together."""
        if compiled != self._compiled:
            self._compiled = compiled
            self._forget()
        new = (1.0, nodes, seconds, nodes * nodes, nodes * seconds)
        self._sums = [self.DECAY * old + value for old, value in zip(self._sums, new, strict=True)]
        self._smallest = min(self._smallest or nodes, nodes)
        self._steps += 1

    def step(self, nodes: int) -> float | None:
        """Expected seconds of a step; None before steps of several sizes were observed. nodes: number of nodes of all rows together."""
        line = self._line()
        return None if line is None else line[0] + line[1] * nodes

    def estimate(self, plain: int) -> tuple[float, float]:
        """Returns a step's fixed cost and a node's cost, in an arbitrary unit. In a trial they are wrong on purpose.

        plain: number of nodes of a step without a draft.
        """
        line, trial = self._line(), self.LATER_TRIAL
        if line is None:
            line, trial = (1.0, self.GUESS), self.TRIAL
            if self._smallest > plain and self._steps % trial == 0:
                return 0.0, 1.0
        return line[0], line[1] / self.HOPE if self._steps % trial == trial - 1 else line[1]

    @property
    def node(self) -> float:
        """Seconds that a node adds to a step; 0 until steps of several sizes were observed."""
        one, x, y, xx, xy = self._sums
        spread = one * xx - x * x
        return max((one * xy - x * y) / spread, 0.0) if spread > 1e-6 * xx else 0.0

    def _line(self) -> tuple[float, float] | None:
        one, x, y, xx, _ = self._sums
        if one < self.TRIAL or one * xx - x * x <= 1e-6 * xx:
            return None
        return max((y - self.node * x) / one, 0.05 * y / one), self.node


class StepCosts:
    """Expected seconds of a verification step of a batch, by number of nodes per row. The loop reports every step to it.

    Args:
        curve: a curve with points; None uses `line`.
        rows: number of rows of the batch.
        context: number of tokens per row at the start.
        size: maps the number of nodes of a draft, root included, to the number of nodes of its padded block.
        ratios: returns, for a context, each tier's ratios of observed to expected seconds in earlier calls; they are updated in place.
        line: the line that earlier calls fitted without a curve; it is updated in place.
        like: costs of the same batch with other rows; their ratio of observed to expected seconds is kept.
    """

    def __init__(
        self, curve: CostCurve | None, rows: int, context: int, size: Callable[[int], int] = lambda nodes: nodes,
        ratios: Callable[[int], dict[bool, SizeRatios]] | None = None, line: StepLine | None = None,
        like: StepCosts | None = None,
    ) -> None:  # fmt: skip
        self.curve, self.rows, self.size = curve, rows, size
        self.context = max(context, 1)
        self.compiled, self._scale, self.observed = False, 1.0, 0
        if like is not None and like.curve is not None:
            self.compiled, self._scale, self.observed = like.compiled, like._scale, like.observed
        own: dict[bool, SizeRatios] = {}
        self._ratios = ratios or (lambda context: own)
        self._line = line or StepLine()
        self._expected: dict[int, float] = {}

    @property
    def known(self) -> bool:
        """Whether there is a curve, or steps of several sizes were observed."""
        return self.curve is not None or self._line.step(self.rows) is not None

    def step(self, nodes: int) -> float:
        """Expected seconds of a step. nodes: number of the draft's nodes, root included. Raises ValueError unless :attr:`known`."""
        size = self.size(nodes)
        if self.curve is not None:
            return self._of_curve(self.curve, size) * self._scale * self._of_size.get(size, KNOWN)[0]
        seconds = self._line.step(self.rows * size)
        if seconds is None:
            raise ValueError("no steps of several sizes were seen yet")
        return seconds

    def to_weigh(self) -> Callable[[int], float]:
        """A function like :meth:`step`, in an arbitrary unit, to choose the number of nodes of one draft.

        Without a curve it is sometimes wrong on purpose (a trial), so that steps of several sizes are observed.
        """
        if self.curve is not None:
            return self.step
        fixed, node = self._line.estimate(self.rows * self.size(1))
        return lambda nodes: fixed + node * self.rows * self.size(nodes)

    @property
    def _of_size(self) -> SizeRatios:
        return self._ratios(self.context).setdefault(self.compiled, {})

    def affordable(self, share: float) -> int:
        """The greatest number of nodes whose step costs at most ``1 + share`` times the step without a draft.

        At most 256, and with a curve at most twice the largest measured number, because inaccurate timings may extrapolate too far.
        """
        limit, best, most = (1 + share) * self.step(1), 1, 256
        if self.curve is not None:
            most = min(most, 2 * self.curve.most_nodes(self.rows, self.compiled))
        while best < most and self.step(best + 1) <= limit:
            best += 1
        return best

    def observe(self, nodes: int, seconds: float, context: int, compiled: bool) -> None:
        """Updates the estimates by an observed step.

        Args:
            nodes: number of nodes per row of the padded block.
            seconds: duration of the step's forward pass, verification and commit.
            context: number of tokens of the longest row.
            compiled: whether the step ran compiled.
        """
        self.observed += 1
        if self.curve is None:
            self._line.observe(self.rows * nodes, seconds, compiled)
            return
        # The curve varies slowly with the context (piecewise linear), so it is evaluated again only after a change by a quarter.
        if compiled != self.compiled or not 0.8 * self.context <= context <= 1.25 * self.context:
            known = self._of_size if compiled == self.compiled else {}
            self.compiled, self.context = compiled, context
            self._expected.clear()
            if not self._of_size:  # no observed step had a context like this: start with the last context's ratios
                self._of_size.update({size: (ratio, 0) for size, (ratio, _) in known.items()})
        own, steps = self._of_size.get(nodes, KNOWN)
        expected = self._of_curve(self.curve, nodes) * own
        if self.observed == 1:
            self._scale = seconds / expected  # the ratio also reflects the machine's load and the sampling plan
        ratio = min(max(seconds / expected / self._scale, 1 / OUTLIER), OUTLIER)
        self._scale *= 1 + QUICK * (ratio - 1)
        self._of_size[nodes] = own * (1 + max(SLOW, 1 / (TRUST + steps)) * (ratio - 1)), steps + 1

    def _of_curve(self, curve: CostCurve, nodes: int) -> float:
        if nodes not in self._expected:
            self._expected[nodes] = curve.seconds(nodes, self.rows, self.context, self.compiled)
        return self._expected[nodes]
