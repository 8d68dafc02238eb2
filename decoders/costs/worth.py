"""Decides how many nodes a draft may have, how many to verify, and how often to try a drafter that costs more than it saves."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..draft import Draft
from .acceptance import CAUTION, AcceptanceRates, Follower, Proposals, row_weights
from .steps import StepCosts

#: A step with a draft may take ``1 + SHARE`` times as long as a step without a draft: the draft then pays if it adds half a token.
SHARE = 0.5


def node_budget(costs: Callable[[], StepCosts | None], chosen: int | None, otherwise: int, most: int = 256) -> int:
    """The greatest number of nodes of a block, the root included.

    Args:
        costs: :attr:`Context.costs`, which returns None if nothing was measured.
        chosen: the user's setting; returned unless None.
        otherwise: the result if nothing was measured.
        most: upper bound of a result computed from costs. A computed result is a power of two, at least 4, so that calls at different
            context lengths use the same compiled graphs.
    """
    if chosen is not None:
        return chosen
    known = costs()
    if known is None:
        return otherwise
    return 1 << (max(min(known.affordable(SHARE), most), 4).bit_length() - 1)


def draft_budget(costs: Callable[[], StepCosts | None], chosen: int | None, otherwise: int, most: int = 255) -> int:
    """The greatest number of draft tokens of a block: as :func:`node_budget`, but no argument and no result counts the root."""
    return node_budget(costs, None if chosen is None else chosen + 1, otherwise + 1, most + 1) - 1


def worthwhile(gains: Sequence[float], seconds: Callable[[int], float], price: float) -> tuple[int, float, float]:
    """Chooses how many draft tokens to verify, beginning with the first: maximizes the expected gain minus the price of the added time.

    Args:
        gains: for each draft token, the expected number of new tokens that it adds, summed over all rows.
        seconds: maps a number of nodes per row, root included, to the seconds of a step.
        price: number of new tokens for which one more second is worth spending: the current tokens per second (Dinkelbach 1967, on
            maximal ratios) times :data:`CAUTION`.

    Returns:
        the number of draft tokens to verify, their expected gain in tokens, and this gain minus the price of the added time.
    """
    plain = seconds(1)
    count, gain, worth, total = 0, 0.0, 0.0, 0.0
    for drafted, more in enumerate(gains, 1):
        total += more
        net = total - price * (seconds(drafted + 1) - plain)
        if net > worth:
            count, gain, worth = drafted, total, net
    return count, gain, worth


#: Share of a call's time for trying a drafter whose drafts do not pay: TRYING if the call has several drafters, else TRYING_ALONE.
TRYING, TRYING_ALONE = 0.005, 0.02
#: Weight of the newest draft in the mean net gain.
TRIAL_WEIGHT = 1 / 8
#: Golden ratio. Its multiples modulo one, which are spread evenly between 0 and 1, vary the waits between drafts.
GOLDEN = 0.6180339887498949


@dataclass
class Trials:
    """Decides when to call a drafter: in every step while drafts pay, otherwise less and less often.

    Attributes:
        count: number of drafts so far.
        net: mean of the tokens that a draft gains, minus the tokens that plain decoding writes meanwhile; None before any draft.
        wait: mean number of steps between drafts; 0 while drafts pay.
    """

    count: int = 0
    net: float | None = None
    wait: int = 0

    def due(self, waited: int, most: int) -> bool:
        """Whether to call the drafter in this step. Waits vary: with equal waits all drafts could fall on one place of a periodic text.

        Args:
            waited: number of steps since the last draft.
            most: upper bound of the mean wait in steps.
        """
        return waited >= int(2 * min(self.wait, most) * (GOLDEN * self.count % 1) + 0.5)

    @property
    def pays(self) -> bool:
        """Whether recent drafts gained more tokens than they cost."""
        return self.net is not None and not self.wait

    def judge(self, net: float, longest: int) -> None:
        """Updates the attributes after a draft. net: the draft's gain, as in :attr:`net`; longest: greatest `wait`, in steps."""
        self.count += 1
        self.net = net if self.net is None else self.net + TRIAL_WEIGHT * (net - self.net)
        self.wait = 0 if net > 0 or self.net > 0 else min(max(2 * self.wait, 1), longest)


def affordable(share: float, longest: int, trying: float = TRYING) -> int:
    """The number of steps to wait between drafts so that drafting takes the share `trying` of the time; at most `longest`.

    share: duration of a draft relative to a step.
    """
    return min(math.ceil(share / trying), longest)


def mean_seconds(mean: float | None, seconds: float, weight: float) -> float:
    """Returns the running `mean` (None or 0 before the first measurement), updated with the measurement `seconds`. A measurement
    counts as at most four times the mean, because a longer duration is an interruption.
    """
    return seconds if not mean else mean + weight * (min(seconds, 4 * mean) - mean)


#: The drafter's bit in bit masks of drafters (:mod:`.acceptance`). :class:`DraftWorth` has only one drafter.
SOURCE = 1
#: Upper bound of the mean number of steps between two drafts.
LONGEST_WAIT = 64
#: Weight of the newest draft in the mean duration of drafts.
DRAFT_WEIGHT = 1 / 8


class DraftWorth:
    """Decides how many tokens of a draft, beginning with the first, are worth the time of verifying them.

    All rows of a block have as many nodes as the longest draft: if one of B rows drafts eight tokens, the step has 8 B draft nodes.

    Args:
        costs: returns the batch's current costs.
        ends: greatest length of each row in tokens; None if rows join and leave. With `ends`, tokens of rows that are likely to finish
            last count more, because the call ends with its last row.
        grade_rates: the acceptance rates that the strategy declares (:attr:`Strategy.grade_rates`).
    """

    def __init__(
        self, costs: Callable[[], StepCosts], ends: Sequence[int] | None = None, grade_rates: Sequence[float] = ()
    ) -> None:
        self._common = AcceptanceRates(grade_rates={SOURCE: grade_rates})
        self._rows: list[Follower] = []
        self._proposals: dict[int, Proposals] = {}
        self._costs = costs
        self._ends = ends
        self._drafting: float | None = None  # seconds of a draft
        self._trials, self._waited = Trials(), 0

    def rebatch(self, sources: Sequence[int]) -> None:
        """Keeps the acceptance rates of rows that stay in the batch. sources: the former index of each row, -1 for a new row."""
        before = self._rows
        self._rows = [before[row] if row >= 0 else Follower(AcceptanceRates(self._common)) for row in sources]
        self._proposals.clear()

    def due(self) -> bool:
        """Whether to draft in this step. While drafting takes more time than it saves, most steps have no draft."""
        costs = self._costs()
        if self._drafting is None or not costs.known:
            return True
        return self._trials.due(self._waited, affordable(self._drafting / costs.step(1), LONGEST_WAIT, TRYING_ALONE))

    def nodes(self, draft: Draft, lengths: Sequence[int], finished: Sequence[bool]) -> int:
        """The number of draft tokens to verify, beginning with the first, so that the step has the most tokens per second.

        lengths: number of tokens of each row; finished: whether each row has ended.
        """
        active = [row for row in range(len(self._rows)) if not finished[row]]
        gains = self._gains(draft, active, self._weights(lengths, active))
        seconds = self._costs().to_weigh()
        rate, best = len(active) / seconds(1), 0
        while True:  # Dinkelbach's iteration: the rate that a choice reaches is the price of the next choice, until it stops rising
            count, gain, _ = worthwhile(gains, seconds, CAUTION * rate)
            reached = (len(active) + gain / CAUTION) / seconds(count + 1)
            if count == 0 or reached <= rate:
                return best if count else 0
            rate, best = reached, count

    def observe(self, seconds: float, emitted: Sequence[int], drafting: float | None) -> None:
        """Updates the mean time and the mean gain of drafts after a step. Call it before :meth:`StepCosts.observe`.

        Args:
            seconds: duration of the step's forward pass, verification and commit.
            emitted: number of new tokens of every row.
            drafting: seconds of drafting; None if the step had no draft.
        """
        if drafting is None:
            self._waited += 1
            return
        self._drafting, self._waited = mean_seconds(self._drafting, drafting, DRAFT_WEIGHT), 0
        if (costs := self._costs()).known:
            plain = costs.step(1)
            active = sum(count > 0 for count in emitted)
            net = sum(emitted) - active - active / plain * (drafting + max(seconds - plain, 0.0))
            self._trials.judge(net, LONGEST_WAIT)

    def follow(self, written: Sequence[Sequence[int]]) -> None:
        """Updates the acceptance rates: compares the step's draft with `written`, the new tokens of every row."""
        for row, tokens in enumerate(written):
            if tokens and row in self._proposals:
                self._rows[row].follow(self._proposals[row])
            for token in tokens:
                self._rows[row].write(token)
        self._proposals.clear()

    def _weights(self, lengths: Sequence[int], active: Sequence[int]) -> list[float]:
        """The weight of each active row's tokens: from :func:`row_weights`, or 1 if rows join and leave."""
        if self._ends is None:
            return [1.0] * len(active)
        return row_weights(
            [self._ends[row] - lengths[row] for row in active], [self._rows[row].outlook for row in active]
        )

    def _gains(self, draft: Draft, active: Sequence[int], weights: Sequence[float]) -> list[float]:
        """Returns, per draft token, the expected number of new tokens that it adds, as a weighted sum over the rows."""
        tokens, parents, grades = draft.read()
        gains = [0.0] * draft.tokens.shape[1]
        for row, weight in zip(active, weights, strict=True):
            follower, proposals = self._rows[row], Proposals()
            places = proposals.add(SOURCE, tokens[row], parents[row], None if grades is None else grades[row])
            outlook = 0.0
            for likely, node in proposals.ranked(follower.rates):
                gains[places[node]] += weight * likely
                outlook += likely
            follower.expect(outlook)
            self._proposals[row] = proposals
        return gains
