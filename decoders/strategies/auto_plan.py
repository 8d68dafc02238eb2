"""Chooses which of the proposed nodes `auto` verifies in a step."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from ..costs import CAUTION, AcceptanceRates, Follower, Proposals, StepCosts, worthwhile
from ..strategy import Draft
from .auto_candidates import COUNTED_AHEAD, Candidate, Experience, Ledger

#: Greatest number of phases (:class:`Phase`) in a report's history.
LONGEST_HISTORY = 1000


@dataclass
class Phase:
    """Consecutive steps whose draft tokens come from the same strategies.

    Attributes:
        step: index of its first step.
        steps: number of its steps.
        strategies: the strategies' names, joined by "+"; "" for steps without a draft.
        nodes: number of draft tokens per row, summed over the steps.
        expected: expected number of written tokens, over all rows and steps.
        tokens: number of written tokens, over all rows and steps.
    """

    step: int
    strategies: str
    steps: int = 0
    nodes: float = 0.0
    expected: float = 0.0
    tokens: float = 0.0


@dataclass
class Memory:
    """The statistics that `auto` keeps between calls.

    Attributes:
        rates: acceptance rates of the drafters in the last calls.
        experience: statistics of the drafters, by name.
        seconds: total seconds of all steps of all calls.
    """

    rates: AcceptanceRates = field(default_factory=AcceptanceRates)
    experience: dict[str, Experience] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass
class AutoState:
    """The state of a call.

    Attributes:
        memory: the statistics that are kept between calls.
        candidates: the drafters that take part in the call.
        left_out: for each other candidate's name, the reason why it does not take part.
        costs: the cost of a step by its number of nodes.
        rows: for every row a follower, which compares the row's drafts with the written tokens.
        ledger: tracks how far the call is behind plain decoding.
        new_tokens: greatest number of tokens that a row may write; None if rows join and leave.
        tokens: mean number of tokens of a step, the numerator of the rate. Tokens of rows that are likely to finish last count more.
        seconds: mean seconds of a step, the denominator of the rate.
        history: the phases so far.
        steps: number of steps so far.
        clock: the call's clock.
        plan: the last step's plan.
    """

    memory: Memory
    candidates: list[Candidate]
    left_out: dict[str, str]
    costs: StepCosts
    rows: list[Follower]
    ledger: Ledger
    new_tokens: int | None = None
    tokens: float = 0.0
    seconds: float = 0.0
    history: list[Phase] = field(default_factory=list)
    steps: int = 0
    clock: Callable[[], float] = time.perf_counter
    plan: Plan | None = None

    @property
    def rate(self) -> float:
        """Tokens per second of all rows together."""
        return self.tokens / self.seconds

    @property
    def all_seconds(self) -> float:
        """Seconds of all calls so far, plus the expected seconds of the rest of this call."""
        left = COUNTED_AHEAD
        if self.new_tokens is not None:
            left = min(max(self.new_tokens - self.ledger.least, 0), COUNTED_AHEAD)
        return self.memory.seconds + left * len(self.rows) / self.rate


class Plan:
    """Collects the nodes that drafters propose in a step, and chooses those that are verified.

    Attributes:
        active: indices of the unfinished rows.
        proposals: for each row the nodes that drafters proposed in this step.
        price: number of expected tokens that a second of drafting or verifying must bring.
        worth: expected tokens of the draft, minus `price` times the seconds of verifying the draft.
        count: greatest number of draft tokens to verify per row, set by :meth:`weigh`.
        width: number of nodes per row in the step's draft, root excluded, set by :meth:`draft`.
        chain: bit mask of the drafters that proposed all verified tokens, if these form a chain in every row; otherwise 0.
        verifying: for each drafter's bit, seconds of verifying the nodes that this drafter was the first to propose.
        chosen: time on the call's clock at which the draft was chosen.

    Args:
        weights: weight of a token in each active row, 1 on average.
        most: greatest number of draft tokens per row.
        begun: time on the call's clock at which the step began.
        tries: whether the step may have a draft.
    """

    def __init__(self, state: AutoState, weights: dict[int, float], most: int, begun: float, *, tries: bool) -> None:
        self.state, self.weights, self.most, self.tries = state, weights, most, tries
        self.begun = self.chosen = begun
        self.active = list(weights)
        self.proposals = [Proposals() for _ in state.rows]
        self.width = self.chain = 0
        self.verifying: dict[int, float] = {}
        self.costs = state.costs
        self._plain = self.costs.step(1)
        self.price = CAUTION * state.rate * state.ledger.strictness(self._plain)
        self.count = 0
        self.worth = 0.0
        self._ranked: dict[int, list[tuple[float, int]]] = {row: [] for row in self.active}

    def weigh(self) -> None:
        """Ranks the proposed nodes of every row, and sets `count` to the most valuable number of draft tokens per row."""
        state = self.state
        gains: list[float] = []
        for row in self.active:
            ranked = self._ranked[row] = self.proposals[row].ranked(state.rows[row].rates)
            gains.extend([0.0] * (len(ranked) - len(gains)))
            weight = self.weights[row]
            for place, (likely, _) in enumerate(ranked):
                gains[place] += weight * likely
        self.count, _, self.worth = worthwhile(gains[: self.most], self.costs.step, self.price)

    def depth_of(self, candidate: Candidate) -> int:
        """The most valuable depth to request from a limited drafter.

        0 if no depth is worth more than the nodes proposed so far, or if the drafter has not run yet.
        """
        best, depth, worth = self.worth, 0, 0.0
        likely = [self.weights[row] for row in self.active]
        if not candidate.experience.runs:
            return 0
        gain = 0.0
        for count in range(1, candidate.depth + 1):
            for index, row in enumerate(self.active):
                likely[index] *= self.state.rows[row].rates.rate_of(candidate.bit, count)
            gain += sum(likely)
            seconds = self.costs.step(count + 1) - self._plain + count * candidate.experience.cost
            worth = gain - self.price * seconds
            if worth > best:
                best, depth = worth, count
            if sum(likely) < 0.05 * len(likely):
                break
        return depth

    def draft(self) -> Draft:
        """The step's draft: the likeliest nodes of every row."""
        rows = len(self.state.rows)
        if not self.count:
            return Draft.listed([[]] * rows)
        chosen = {row: self._chosen(row) for row in self.active}
        width = max(len(nodes) for nodes in chosen.values())
        tokens = [[-1] * width for _ in range(rows)]
        parents = [[-1] * (width + 1) for _ in range(rows)]
        names = {candidate.bit: candidate.name for candidate in self.state.candidates}
        drafters = [[""] * width for _ in range(rows)]
        chain, sources = True, -1
        for row, nodes in chosen.items():
            own = self.proposals[row]
            place = {0: 0}
            for index, node in enumerate(nodes):
                tokens[row][index] = own.tokens[node]
                parents[row][index + 1] = place[own.parents[node]]
                chain = chain and parents[row][index + 1] == index
                place[node] = index + 1
                drafters[row][index] = names[own.sources[node] & -own.sources[node]]
                sources &= own.sources[node]
        self.width = width
        if chain:
            self.chain = sources
            return replace(Draft.listed(tokens), drafters=drafters)
        depth = max(self.proposals[row].depths[node] for row, nodes in chosen.items() for node in nodes)
        return replace(Draft.listed(tokens, parents, depth), drafters=drafters)

    def _chosen(self, row: int) -> list[int]:
        """The nodes of a row that are verified, parents before their children.

        The likeliest path comes first. Each token of the path then has the slot that plain decoding would give it, so its keys and
        values have the same bits as in plain decoding. If the token is accepted, the target need not run it again.
        """
        parents = self.proposals[row].parents
        path, others = [0], list[int]()
        for _, node in self._ranked[row][: self.count]:  # the likeliest first
            (path if parents[node] == path[-1] else others).append(node)
        return path[1:] + others

    def note(self) -> None:
        """Records the chosen nodes: updates the history, `verifying` and `chosen`."""
        state, sources, gain = self.state, 0, 0.0
        seconds = (self.costs.step(self.count + 1) - self._plain) / max(self.count * len(self.active), 1)
        for row in self.active:
            for likely, node in self._ranked[row][: self.count]:
                of_node = self.proposals[row].sources[node]
                sources |= of_node
                gain += likely
                first = of_node & -of_node
                self.verifying[first] = self.verifying.get(first, 0.0) + seconds
        name = "+".join(c.name for c in state.candidates if c.bit & sources)
        history = state.history
        if not history or (history[-1].strategies != name and len(history) < LONGEST_HISTORY):
            history.append(Phase(state.steps, name))
        last = history[-1]
        last.steps += 1
        last.nodes += self.count
        last.expected += len(self.active) + gain
        state.steps += 1
        if any(candidate.requested_depth for candidate in state.candidates):
            for row in self.active:
                state.rows[row].expect(sum(likely for likely, _ in self._ranked[row]))
        self.chosen = state.clock()

    def book(self, drafting: float, emitted: dict[int, int]) -> None:
        """Adds to the call's :class:`Ledger` the seconds that the step took longer than a plain step.

        The sum of `drafting` and the expected seconds of verifying the draft tokens; 0 in a step that was not allowed a draft. Measured
        seconds of verifying are not used, because they vary by more than the time of the draft tokens.

        Args:
            drafting: seconds of drafting and of `observe`.
            emitted: number of written tokens, by row.
        """
        if self.tries:
            drafting += self.costs.step(self.count + 1) - self._plain
        self.state.ledger.book(drafting if self.tries else 0.0, self._plain, emitted)
