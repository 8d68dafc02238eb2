"""How much of a draft is worth verifying, where many rows pay for the draft of one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...costs.acceptance import CAUTION, AcceptanceRates, Follower, Proposals, row_weights
from ...costs.fitted import FittedStepCosts
from ...costs.looks import Looks, affordable, mean_seconds
from ...strategy import Draft

#: The only drafter's bit.
SOURCE = 1
#: Drafts are looked at once in so many steps at least.
LONGEST_WAIT = 64
#: Weight of the newest draft in the mean of what drafts cost.
DRAFT_WEIGHT = 1 / 8


class DraftWorth:
    """Says how many nodes of a draft, from the first on, are worth their time in a step of several rows.

    A block of B rows has as many nodes per row as the longest draft: where one row drafts eight tokens, eight times B nodes are
    run for them. The tokens that are written are the same whatever is verified, so every draft token can be judged by them,
    verified or not: looking costs no step. What nodes cost is learnt from the steps.

    Args:
        costs: of the model's steps, as calls before have learnt them.
        rows: how many there are.
        ends: length that no row grows beyond, where all begin together and the call lasts as long as its slowest row.
        grade_rates: how often draft tokens of each grade are right as a rule (:attr:`Strategy.grade_rates`).
    """

    def __init__(
        self,
        costs: FittedStepCosts,
        rows: int = 0,
        ends: Sequence[int] | None = None,
        grade_rates: Sequence[float] = (),
    ) -> None:
        self._common = AcceptanceRates(grade_rates={SOURCE: grade_rates})
        self._rows: list[Follower] = []
        self._proposals: dict[int, Proposals] = {}
        self._costs = costs
        self._ends = ends
        self._drafting: float | None = None  # seconds of a draft
        self._looks, self._waited = Looks(), 0
        self.rebatch([-1] * rows)

    def rebatch(self, sources: Sequence[int]) -> None:
        """Rows have come or gone. sources: which row each was before, -1 for one that is new."""
        before = self._rows
        self._rows = [before[row] if row >= 0 else Follower(AcceptanceRates(self._common)) for row in sources]
        self._proposals.clear()

    def due(self) -> bool:
        """Whether drafts are looked at in this step: their making takes time, and may have brought nothing for long."""
        step = self._costs.step(len(self._rows))
        if self._drafting is None or step is None:
            return True
        return self._looks.due(self._waited, affordable(self._drafting / step, LONGEST_WAIT))

    def nodes(self, draft: Draft, lengths: Sequence[int], finished: Sequence[bool], size: Callable[[int], int]) -> int:
        """How many of the draft's tokens to verify.

        Args:
            lengths: tokens of each row.
            finished: which rows have ended.
            size: nodes of the block, per row, that holds so many.
        """
        active = [row for row in range(len(self._rows)) if not finished[row]]
        gains = self._gains(draft, active, self._weights(lengths, active))
        fixed, node = self._costs.estimate(len(self._rows) * size(1))
        tokens, best, count = float(len(active)), 0.0, 0
        for drafted in range(len(gains) + 1):
            tokens += gains[drafted - 1] / CAUTION if drafted else 0.0
            rate = tokens / (fixed + node * len(self._rows) * size(drafted + 1))
            if rate > best:
                best, count = rate, drafted
        return count

    def observe(
        self, nodes: int, seconds: float, compiled: bool, emitted: Sequence[int], drafting: float | None
    ) -> None:
        """Learns what a step cost, and whether making its draft was worth the time.

        Args:
            nodes: that were run, per row.
            compiled: whether they ran compiled.
            emitted: how many tokens every row has written.
            drafting: seconds that making the draft took; None if there was none to be made.
        """
        plain = self._costs.step(len(self._rows))
        self._costs.observe(len(self._rows) * nodes, seconds, compiled)
        if drafting is None:
            self._waited += 1
            return
        self._drafting, self._waited = mean_seconds(self._drafting, drafting, DRAFT_WEIGHT), 0
        if plain is not None:
            active = sum(count > 0 for count in emitted)
            net = sum(emitted) - active - active / plain * (drafting + max(seconds - plain, 0.0))
            self._looks.judge(net, LONGEST_WAIT)

    def follow(self, written: Sequence[Sequence[int]]) -> None:
        """Judges what was drafted. written: the new tokens of every row."""
        for row, tokens in enumerate(written):
            if tokens and row in self._proposals:
                self._rows[row].follow(self._proposals[row])
            for token in tokens:
                self._rows[row].write(token)
        self._proposals.clear()

    def _weights(self, lengths: Sequence[int], active: Sequence[int]) -> list[float]:
        """What a token is worth in each of the rows that go on."""
        if self._ends is None:
            return [1.0] * len(active)
        return row_weights(
            [self._ends[row] - lengths[row] for row in active], [self._rows[row].outlook for row in active]
        )

    def _gains(self, draft: Draft, active: Sequence[int], weights: Sequence[float]) -> list[float]:
        """Of every draft token how many it is expected to bring, all rows together."""
        tokens, parents = draft.tokens.tolist(), draft.parents
        grades = [None] * len(tokens) if draft.grades is None else draft.grades.tolist()
        gains = [0.0] * draft.tokens.shape[1]
        for row, weight in zip(active, weights, strict=True):
            follower, proposals = self._rows[row], Proposals()
            places = proposals.add(SOURCE, tokens[row], parents[row], grades[row])
            outlook = 0.0
            for likely, node in proposals.ranked(follower.rates):
                gains[places[node]] += weight * likely
                outlook += likely
            follower.expect(outlook)
            self._proposals[row] = proposals
        return gains
