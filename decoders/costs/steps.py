"""Estimates the seconds of a step: from a measured curve corrected by observed steps, or from observed steps alone."""

from __future__ import annotations

from collections.abc import Callable

from .curve import CostCurve

#: Weights of a new step in running means of the ratio of observed to expected seconds. `QUICK` is the weight in the mean of all steps.
#: `SLOW` is the least weight in the mean of the steps with the same number of nodes.
QUICK, SLOW = 1 / 8, 1 / 32
#: In the mean of the steps with the same number of nodes, the curve counts as TRUST observed steps.
TRUST = 8
#: Ratios of observed to expected seconds are clipped to this factor, up and down.
OUTLIER = 3.0

#: For each number of nodes of a block: the mean ratio of observed to expected seconds, divided by the mean ratio of all steps, and the
#: number of observed steps.
SizeRatios = dict[int, tuple[float, int]]
UNSEEN = (1.0, 0)


class StepLine:
    """A straight line fitted to observed steps: seconds as a function of the number of nodes of all rows. Recent steps weigh more.

    Compiled and uncompiled steps differ in cost, so a change between them resets the line.
    """

    #: Every new step multiplies the weights of earlier steps by DECAY.
    DECAY = 0.97
    #: The assumed cost of a node, relative to a step's fixed cost, before steps of several sizes were observed.
    GUESS = 0.03
    #: A line needs steps of several sizes. So one of TRIAL steps is a trial, in which nodes are assumed to cost less than estimated. If
    #: all steps so far had drafts, another trial has no draft. Once there is a line, one of LATER_TRIAL steps is a trial.
    TRIAL, LATER_TRIAL = 4, 128
    #: In a trial, the estimated cost of a node is divided by HOPE.
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
        """Returns a step's fixed cost and a node's cost; only their ratio matters. In a trial (:attr:`TRIAL`) it is wrong on purpose.

        plain: number of nodes of all rows in a step without a draft.
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
    """Estimates the seconds of a verification step of a batch from its number of nodes per row, and learns from every observed step.

    Args:
        curve: a measured curve with points; None: the estimates come from `line`.
        rows: number of rows of the batch.
        context: number of tokens per row at the start.
        size: maps the number of nodes of a draft, root included, to the number of nodes of its padded block.
        ratios: for a context, returns the ratios of observed to expected seconds from earlier calls: a dict for compiled steps and a
            dict for uncompiled steps (keys True and False). The dicts are updated in place.
        line: the line that earlier calls fitted, for calls without a curve; updated in place.
        former: costs of the same batch before rows joined or left, whose ratio of observed to expected seconds is carried over.
    """

    def __init__(
        self, curve: CostCurve | None, rows: int, context: int, size: Callable[[int], int] = lambda nodes: nodes,
        ratios: Callable[[int], dict[bool, SizeRatios]] | None = None, line: StepLine | None = None,
        former: StepCosts | None = None,
    ) -> None:  # fmt: skip
        self.curve, self.rows, self.size = curve, rows, size
        self.context = max(context, 1)
        self.compiled, self._scale, self.observed = False, 1.0, 0
        if former is not None and former.curve is not None:
            self.compiled, self._scale, self.observed = former.compiled, former._scale, former.observed
        own: dict[bool, SizeRatios] = {}
        self._ratios = ratios or (lambda context: own)
        self._line = line or StepLine()
        self._expected: dict[int, float] = {}

    @property
    def known(self) -> bool:
        """Whether :meth:`step` has an estimate: from a curve, or from observed steps of several sizes."""
        return self.curve is not None or self._line.step(self.rows) is not None

    def step(self, nodes: int) -> float:
        """Expected seconds of a step. nodes: number of the draft's nodes, root included. Raises ValueError unless :attr:`known`."""
        size = self.size(nodes)
        if self.curve is not None:
            return self._of_curve(self.curve, size) * self._scale * self._of_size.get(size, UNSEEN)[0]
        seconds = self._line.step(self.rows * size)
        if seconds is None:
            raise ValueError("no estimate yet: observe steps of several sizes, or check `known` first")
        return seconds

    def to_weigh(self) -> Callable[[int], float]:
        """Returns a function from a number of nodes to a step's cost, for choosing a draft's nodes. Only ratios of costs matter.

        Without a curve, some costs are wrong on purpose (:attr:`StepLine.TRIAL`), so that steps of several sizes are observed.
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

        At most 256, and with a curve at most twice the largest measured number of nodes: extrapolated timings may be far off.
        """
        limit, best, most = (1 + share) * self.step(1), 1, 256
        if self.curve is not None:
            most = min(most, 2 * self.curve.most_nodes(self.rows, self.compiled))
        while best < most and self.step(best + 1) <= limit:
            best += 1
        return best

    def observe(self, nodes: int, seconds: float, context: int, compiled: bool) -> None:
        """Updates the estimates with an observed step.

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
            if not self._of_size:  # no step at such a context was observed: start with the last context's ratios
                self._of_size.update({size: (ratio, 0) for size, (ratio, _) in known.items()})
        own, steps = self._of_size.get(nodes, UNSEEN)
        expected = self._of_curve(self.curve, nodes) * own
        if self.observed == 1:
            self._scale = seconds / expected  # the machine's load and the sampling settings change this ratio, too
        ratio = min(max(seconds / expected / self._scale, 1 / OUTLIER), OUTLIER)
        self._scale *= 1 + QUICK * (ratio - 1)
        self._of_size[nodes] = own * (1 + max(SLOW, 1 / (TRUST + steps)) * (ratio - 1)), steps + 1

    def _of_curve(self, curve: CostCurve, nodes: int) -> float:
        if nodes not in self._expected:
            self._expected[nodes] = curve.seconds(nodes, self.rows, self.context, self.compiled)
        return self._expected[nodes]
