"""How much of a draft is worth verifying, where many rows pay for the draft of one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..costs.acceptance import AcceptanceRates, Follower, Proposals
from ..costs.looks import Looks, affordable
from ..costs.rows import row_weights
from ..draft import Draft

#: How many times the tokens that its time would bring a node has to be expected to bring: what seems to pay is what is overrated.
CAUTION = 1.15
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
        self, costs: NodeCosts, rows: int = 0, ends: Sequence[int] | None = None, grade_rates: Sequence[float] = ()
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
        known = drafting if self._drafting is None else self._drafting
        self._drafting, self._waited = known + DRAFT_WEIGHT * (min(drafting, 4 * known) - known), 0
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


class NodeCosts:
    """What a step of a model costs, and each node in it: a straight line through the steps that were seen, of which recent ones count
    more. Steps that run compiled have little in common with others: what the one kind cost is forgotten once the other comes.
    """

    #: What a step adds is worth so much less a step later.
    DECAY = 0.97
    #: A node's share of the cost of a step, until steps of several sizes were seen.
    GUESS = 0.03
    #: Until then a step is taken without a draft now and then, if all had one, and else nodes are taken for cheaper.
    TRIAL = 4
    #: Later too, rarely.
    LATER_TRIAL = 128
    #: How much cheaper.
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
