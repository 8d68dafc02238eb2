"""What `auto` verifies in one step: of all that was proposed, as much as pays."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from ..costs import Follower, Proposals, StepCosts
from ..strategy import Draft
from ..tree import TreeTensors
from .candidates import Candidate

#: Most entries of a report's history.
LONGEST_HISTORY = 1000
#: How many times the tokens that its time would bring a node has to be expected to bring. The nodes that seem to pay are, on
#: average, those whose chances are overrated.
CAUTION = 1.15


@dataclass
class Phase:
    """What was verified in some steps that follow each other.

    Attributes:
        step: the first of them.
        steps: how many.
        strategies: whose draft tokens, "+" between them; "" for none.
        nodes: draft tokens per row, all steps.
        expected: tokens that were expected, all rows and steps.
        tokens: tokens that were written, likewise.
    """

    step: int
    strategies: str
    steps: int = 0
    nodes: float = 0.0
    expected: float = 0.0
    tokens: float = 0.0


@dataclass
class AutoState:
    """What `auto` knows of a call.

    Attributes:
        candidates: the drafters.
        left_out: why others are not among them, by name.
        costs: of a step, by its nodes.
        rows: what is known of each row's text.
        proposals: what was proposed for each row in this step.
        weights: what a token is worth in each row that goes on, 1 on average.
        new_tokens: most that a row may write, where all begin and end together.
        tokens: of the present rate, per step; those of rows that others wait for count more.
        seconds: of the present rate, per step.
        width: draft tokens per row that are verified.
        verifying: seconds that verifying takes in this step, by the bit of the first drafter that proposes what is verified.
        chain: bits of the drafters of whose chains these are the first.
        begun: when this step began.
        proposed: when its draft was chosen.
        history: what was verified so far.
        steps: how many there were.
        clock: seconds, the call's.
    """

    candidates: list[Candidate]
    left_out: dict[str, str]
    costs: StepCosts
    rows: list[Follower]
    proposals: list[Proposals] = field(default_factory=list)
    new_tokens: int | None = None
    weights: dict[int, float] = field(default_factory=dict)
    tokens: float = 0.0
    seconds: float = 0.0
    width: int = 0
    verifying: dict[int, float] = field(default_factory=dict)
    chain: int = 0
    begun: float = 0.0
    proposed: float = 0.0
    history: list[Phase] = field(default_factory=list)
    steps: int = 0
    clock: Callable[[], float] = time.perf_counter

    @property
    def rate(self) -> float:
        """Tokens per second, all rows."""
        return self.tokens / self.seconds


class Plan:
    """What to verify in one step.

    Attributes:
        price: tokens that a node must be expected to bring per second that it takes.
        worth: expected tokens beyond that price.
    """

    def __init__(self, state: AutoState, active: list[int], most: int) -> None:
        self.state, self.active, self.most = state, active, most
        self.costs, self.price = state.costs, CAUTION * state.rate
        self._plain = self.costs.step(1)
        self.count = 0
        self.gain = 0.0
        self.worth = 0.0
        self._ranked: dict[int, list[tuple[float, int]]] = {row: [] for row in active}

    def weigh(self) -> None:
        """Finds the number of draft tokens per row that is worth most."""
        state = self.state
        gains: list[float] = []
        for row in self.active:
            ranked = self._ranked[row] = state.proposals[row].ranked(state.rows[row].rates)
            gains.extend([0.0] * (len(ranked) - len(gains)))
            weight = state.weights[row]
            for place, (likely, _) in enumerate(ranked):
                gains[place] += weight * likely
        self.count, self.gain, self.worth, gain = 0, 0.0, 0.0, 0.0
        for count, more in enumerate(gains[: self.most], 1):
            gain += more
            worth = gain - self.price * (self.costs.step(count + 1) - self._plain)
            if worth > self.worth:
                self.count, self.gain, self.worth = count, gain, worth

    def depth_of(self, candidate: Candidate) -> int:
        """How many tokens a drafter is to draft to which each costs time; 0 if none is worth it beside what there is."""
        best, depth, worth = self.worth, 0, 0.0
        likely = [self.state.weights[row] for row in self.active]
        if not candidate.experience.runs:
            return 2
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

    def draft(self, device: torch.device) -> Draft:
        """The draft of all rows; each has the nodes that are likeliest there."""
        rows = len(self.state.rows)
        self.state.width = self.state.chain = 0
        if not self.count:
            return Draft.nothing(rows, device)
        chosen = {row: self._chosen(row) for row in self.active}
        proposals = self.state.proposals
        width = max(len(nodes) for nodes in chosen.values())
        tokens = [[-1] * width for _ in range(rows)]
        parents = [[-1] * (width + 1) for _ in range(rows)]
        chain, sources = True, -1
        for row, nodes in chosen.items():
            own = proposals[row]
            place = {0: 0}
            for index, node in enumerate(nodes):
                tokens[row][index] = own.tokens[node]
                parents[row][index + 1] = place[own.parents[node]]
                chain = chain and parents[row][index + 1] == index
                place[node] = index + 1
                sources &= own.sources[node]
        made = torch.tensor(tokens, device=device)
        self.state.width = width
        if chain:
            self.state.chain = sources
            return Draft.chain(made)
        depth = max(proposals[row].depths[node] for row, nodes in chosen.items() for node in nodes)
        return Draft(made, TreeTensors.from_parents(torch.tensor(parents, device=device), depth), depth=depth)

    def _chosen(self, row: int) -> list[int]:
        """The nodes that are verified for a row, children behind their parents.

        The likeliest path stands first, in slots of its own depth: there its tokens have the bits of plain decoding, and need
        not be run again.
        """
        parents = self.state.proposals[row].parents
        path, others = [0], list[int]()
        for _, node in self._ranked[row][: self.count]:  # the likeliest first
            (path if parents[node] == path[-1] else others).append(node)
        return path[1:] + others

    def note(self) -> None:
        """Books the choice: in the history, and for whom it takes time."""
        state, sources, gain = self.state, 0, 0.0
        seconds = (self.costs.step(self.count + 1) - self._plain) / max(self.count * len(self.active), 1)
        state.verifying = {}
        for row in self.active:
            for likely, node in self._ranked[row][: self.count]:
                of_node = state.proposals[row].sources[node]
                sources |= of_node
                gain += likely
                first = of_node & -of_node
                state.verifying[first] = state.verifying.get(first, 0.0) + seconds
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
