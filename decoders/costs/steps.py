"""What a step of the call under way costs: the curve, refined by the steps that were seen."""

from __future__ import annotations

from collections.abc import Callable

from .curve import CostCurve

#: Weight of the newest step in the mean ratio of observed to expected seconds, over all sizes and, at least, of one.
QUICK, SLOW = 1 / 8, 1 / 32
#: The curve counts as much as so many steps of a size.
TRUST = 8
#: A step that takes this many times longer or shorter than expected counts as one that takes so many times longer or shorter.
OUTLIER = 3.0

#: By nodes of a block: mean ratio of observed to measured seconds beside that of all sizes, and of how many steps.
SizeRatios = dict[int, tuple[float, int]]
KNOWN = (1.0, 0)


class StepCosts:
    """Expected seconds of a verification step, by nodes; the loop shows it every step.

    Args:
        curve: with points.
        rows: of the call.
        context: tokens per row at the start.
        size: nodes of the block that holds so many of a draft, root included: blocks come in sizes that suit the kernels.
        ratios: what earlier calls have learnt, by tier; goes on there.
    """

    def __init__(
        self, curve: CostCurve, rows: int, context: int, size: Callable[[int], int] = lambda nodes: nodes,
        ratios: dict[bool, SizeRatios] | None = None,
    ) -> None:  # fmt: skip
        self.curve, self.rows, self.size = curve, rows, size
        self.context, self.compiled = max(context, 1), False
        self._scale = 1.0
        self._ratios = {} if ratios is None else ratios
        self._expected: dict[int, float] = {}
        self.observed = 0

    def step(self, nodes: int) -> float:
        """Expected seconds of a step whose draft has so many nodes, the root included."""
        size = self.size(nodes)
        return self._curve(size) * self._scale * self._of_size.get(size, KNOWN)[0]

    @property
    def _of_size(self) -> SizeRatios:
        return self._ratios.setdefault(self.compiled, {})

    def affordable(self, share: float) -> int:
        """Most nodes, up to 256, whose step costs at most ``1 + share`` times the step without a draft."""
        limit, best = (1 + share) * self.step(1), 1
        while best < 256 and self.step(best + 1) <= limit:
            best += 1
        return best

    def observe(self, nodes: int, seconds: float, context: int, compiled: bool) -> None:
        """Learns from a step.

        Args:
            nodes: of the block as it ran.
            seconds: of its core.
            context: tokens of the longest row.
            compiled: whether it ran compiled.
        """
        # The curve is straight between its contexts: it need not be asked at every token.
        if compiled != self.compiled or context > 1.25 * self.context:
            self.compiled, self.context = compiled, context
            self._expected.clear()
        own, steps = self._of_size.get(nodes, KNOWN)
        expected = self._curve(nodes) * own
        if not self.observed:
            self._scale = seconds / expected  # another machine's load, another sampling plan
        ratio = min(max(seconds / expected / self._scale, 1 / OUTLIER), OUTLIER)
        self.observed += 1
        self._scale *= 1 + QUICK * (ratio - 1)
        self._of_size[nodes] = own * (1 + max(SLOW, 1 / (TRUST + steps)) * (ratio - 1)), steps + 1

    def _curve(self, nodes: int) -> float:
        if nodes not in self._expected:
            self._expected[nodes] = self.curve.seconds(nodes, self.rows, self.context, self.compiled)
        return self._expected[nodes]
