"""The worth of a draft: how many nodes it may have, how many of them to verify, and how often to try a drafter that does not pay."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..draft import Draft
from .acceptance import CAUTION, AcceptanceRates, Follower, Proposals, row_weights
from .steps import StepCosts

#: A step with a draft may take this share more time than one without: it must then bring half a token more per step.
SHARE = 0.5


def node_budget(costs: Callable[[], StepCosts | None], chosen: int | None, otherwise: int, most: int = 256) -> int:
    """Most nodes of a block, the root included.

    Args:
        costs: :attr:`Context.costs`.
        chosen: set by the user; returned unless None.
        otherwise: the answer where nothing was measured.
        most: upper bound of the answer by costs.

    Returns:
        by costs a power of two of at least 4, so that calls of different lengths share graphs.
    """
    if chosen is not None:
        return chosen
    known = costs()
    if known is None:
        return otherwise
    return 1 << (max(min(known.affordable(SHARE), most), 4).bit_length() - 1)


def draft_budget(costs: Callable[[], StepCosts | None], chosen: int | None, otherwise: int, most: int = 255) -> int:
    """:func:`node_budget` in draft tokens: no number includes the root."""
    return node_budget(costs, None if chosen is None else chosen + 1, otherwise + 1, most + 1) - 1


def worthwhile(gains: Sequence[float], seconds: Callable[[int], float], price: float) -> tuple[int, float, float]:
    """How many draft tokens to verify, from the first on: as long as they bring more tokens than their time is worth.

    Args:
        gains: tokens that each is expected to bring, all rows together.
        seconds: of a step by its nodes per row, the root included.
        price: tokens that a second must bring: the present rate (maximizing tokens per second, as Dinkelbach 1967 does for ratios),
            times a factor of caution.

    Returns:
        their number, the tokens that they are expected to bring, and that gain less the price.
    """
    plain = seconds(1)
    count, gain, worth, total = 0, 0.0, 0.0, 0.0
    for drafted, more in enumerate(gains, 1):
        total += more
        net = total - price * (seconds(drafted + 1) - plain)
        if net > worth:
            count, gain, worth = drafted, total, net
    return count, gain, worth


#: Share of the time that may be spent on trying a drafter whose drafts do not pay.
LOOKING = 0.005
#: Weight of the newest draft in the mean of what drafts bring.
LOOK_WEIGHT = 1 / 8
#: Its multiples modulo one are spread evenly, however many are taken.
GOLDEN = 0.6180339887498949


@dataclass
class Looks:
    """When to ask a drafter: in every step while that pays, and ever less often while it does not.

    Attributes:
        count: how often it was asked.
        net: mean of the tokens that a draft brought less its price; None before the first.
        wait: steps between two drafts, on average; 0 while drafts pay.
    """

    count: int = 0
    net: float | None = None
    wait: int = 0

    def due(self, waited: int, most: int) -> bool:
        """Whether to ask it in this step.

        Waits vary, because in a periodic text equal waits would always end at the same place of a period.

        Args:
            waited: steps since it was asked.
            most: steps to wait at most, on average.
        """
        return waited >= int(2 * min(self.wait, most) * (GOLDEN * self.count % 1) + 0.5)

    @property
    def pays(self) -> bool:
        """Whether drafts bring more than their price at present."""
        return self.net is not None and not self.wait

    def judge(self, net: float, longest: int) -> None:
        """Learns the gain of a draft less its price, in tokens. longest: steps to wait at most."""
        self.count += 1
        self.net = net if self.net is None else self.net + LOOK_WEIGHT * (net - self.net)
        self.wait = 0 if net > 0 or self.net > 0 else min(max(2 * self.wait, 1), longest)


def affordable(share: float, longest: int) -> int:
    """Steps between drafts that take `share` of a step, so that drafting takes :data:`LOOKING` of the time; at most `longest`."""
    return min(math.ceil(share / LOOKING), longest)


def mean_seconds(known: float | None, seconds: float, weight: float) -> float:
    """A running mean with one more measurement of this `weight`, clipped to four times the mean because it may have been interrupted.

    Args:
        known: the mean so far; None or 0 before there is one.
    """
    return seconds if not known else known + weight * (min(seconds, 4 * known) - known)


#: The only drafter's bit.
SOURCE = 1
#: Most steps between two drafts.
LONGEST_WAIT = 64
#: Weight of the newest draft in the mean of what drafts cost.
DRAFT_WEIGHT = 1 / 8


class DraftWorth:
    """Decides how many nodes of a draft, from the first on, are worth their time in a step of several rows.

    All rows of a block have as many nodes as the longest draft: if one of B rows drafts eight tokens, 8 B nodes are run.

    Args:
        costs: returns the batch's present costs.
        ends: most tokens of each row, where all rows begin together, so that the call lasts as long as its slowest row.
        grade_rates: the strategy's declared rates by grade (:attr:`Strategy.grade_rates`).
    """

    def __init__(
        self,
        costs: Callable[[], StepCosts],
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

    def rebatch(self, sources: Sequence[int]) -> None:
        """Follows the batch after rows have joined or left. sources: which row each was before, -1 for a new one."""
        before = self._rows
        self._rows = [before[row] if row >= 0 else Follower(AcceptanceRates(self._common)) for row in sources]
        self._proposals.clear()

    def due(self) -> bool:
        """Whether to draft in this step: not while drafting takes more time than it saves."""
        costs = self._costs()
        if self._drafting is None or not costs.known:
            return True
        return self._looks.due(self._waited, affordable(self._drafting / costs.step(1), LONGEST_WAIT))

    def nodes(self, draft: Draft, lengths: Sequence[int], finished: Sequence[bool]) -> int:
        """How many of the draft's tokens to verify to maximize the step's tokens per second.

        Args:
            lengths: tokens of each row.
            finished: which rows have ended.
        """
        active = [row for row in range(len(self._rows)) if not finished[row]]
        gains = self._gains(draft, active, self._weights(lengths, active))
        seconds = self._costs().to_weigh()
        rate, best = len(active) / seconds(1), 0
        while True:  # Dinkelbach's iteration: choose by the rate of the last choice, until it no longer rises
            count, gain, _ = worthwhile(gains, seconds, CAUTION * rate)
            reached = (len(active) + gain / CAUTION) / seconds(count + 1)
            if count == 0 or reached <= rate:
                return best if count else 0
            rate, best = reached, count

    def observe(self, seconds: float, emitted: Sequence[int], drafting: float | None) -> None:
        """Learns whether a step's draft was worth the time. Called before the costs observe the step.

        Args:
            seconds: of its core.
            emitted: how many tokens every row has written.
            drafting: seconds that drafting took; None if the step had no draft.
        """
        if drafting is None:
            self._waited += 1
            return
        self._drafting, self._waited = mean_seconds(self._drafting, drafting, DRAFT_WEIGHT), 0
        if (costs := self._costs()).known:
            plain = costs.step(1)
            active = sum(count > 0 for count in emitted)
            net = sum(emitted) - active - active / plain * (drafting + max(seconds - plain, 0.0))
            self._looks.judge(net, LONGEST_WAIT)

    def follow(self, written: Sequence[Sequence[int]]) -> None:
        """Judges the step's draft. written: the new tokens of every row."""
        for row, tokens in enumerate(written):
            if tokens and row in self._proposals:
                self._rows[row].follow(self._proposals[row])
            for token in tokens:
                self._rows[row].write(token)
        self._proposals.clear()

    def _weights(self, lengths: Sequence[int], active: Sequence[int]) -> list[float]:
        """The value of a token in each active row."""
        if self._ends is None:
            return [1.0] * len(active)
        return row_weights(
            [self._ends[row] - lengths[row] for row in active], [self._rows[row].outlook for row in active]
        )

    def _gains(self, draft: Draft, active: Sequence[int], weights: Sequence[float]) -> list[float]:
        """For every draft token, how many tokens it is expected to bring in all rows together."""
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
