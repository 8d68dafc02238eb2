"""Drafts as long as the draft's probability stays above a threshold (vgel 2023, "How to make LLMs go fast")."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from ..costs import StepLine, draft_budget
from ..drafters import Drafter
from ..strategy import Context, Draft, Sequences, Step
from ..tree import Topology
from .draft_model import DraftModelStrategy, DraftTreeSettings
from .draft_tree import DynamicTree, require_coupled

#: Default of the maximum number of tokens of a draft: LENGTH for a tree, or if the costs of a step have not been measured; otherwise as
#: many as the costs allow, up to MOST_LENGTH.
LENGTH, MOST_LENGTH = 16, 32
#: Reading a value from a device other than a CPU makes the host wait. So it reads once per draft, after one of these numbers of passes.
BUCKETS = (2, 4, 8, 16, 32)


class ThresholdSettings(DraftTreeSettings):
    """The threshold, how it adapts, and the shape of drafts."""

    threshold: float = Field(
        0.4,
        gt=0,
        lt=1,
        description="Initial threshold: drafting stops when the cumulative draft probability falls below it.",
    )
    rule: Literal["adaptive", "calibrated"] = Field(
        "adaptive",
        description="How the threshold adapts. adaptive: a rejection sets it to the mean of itself and the rejected "
        "token's cumulative probability; otherwise it falls by `decrease`. calibrated: computed from the measured "
        "costs of drafting and verifying, and the measured acceptance.",
    )
    decrease: float = Field(
        0.1,
        ge=0,
        le=1,
        description="With rule adaptive: how much the threshold falls after a draft that was fully accepted.",
    )
    lowest: float = Field(0.05, gt=0, lt=1, description="Minimum of the threshold.")
    highest: float = Field(0.95, gt=0, lt=1, description="Maximum of the threshold.")
    max_length: int | None = Field(
        None,
        ge=1,
        le=32,
        description="Maximum number of tokens drafted per step; for a tree, its depth. None: for a chain as many as the "
        "measured costs of a step allow; 16 for a tree, and without measured costs.",
    )
    tree: Literal["none", "dynamic"] = Field(
        "none",
        description="Shape of a draft. none: a chain. dynamic: a tree whose nodes are expanded if their cumulative "
        "probability is above the threshold.",
    )

    @model_validator(mode="after")
    def _ordered(self) -> ThresholdSettings:
        if not self.lowest <= self.threshold <= self.highest:
            raise ValueError(
                f"threshold {self.threshold} must lie between lowest, {self.lowest}, and highest, {self.highest}"
            )
        return self


@dataclass
class _State:
    """The state of a call.

    Attributes:
        drafter: the draft model.
        tree: the shape of drafts; None for chains.
        calibration: measurements for the calibrated rule; None for the adaptive rule.
        threshold: ``[B]`` float32, each row's threshold.
        length: greatest number of tokens of a draft.
        waits: whether the host has to wait for the device to read values (not on a CPU). It then reads values only once per draft.
        bucket: number of passes of the draft model before the host reads values, one of :data:`BUCKETS`.
        weights: ``[B, n]``, cumulative log-probability of each node of the last draft.
        draft: the last draft.
    """

    drafter: Drafter
    tree: DynamicTree | None
    calibration: CalibratedThreshold | None
    threshold: Tensor
    length: int
    waits: bool
    bucket: int = BUCKETS[0]
    weights: Tensor | None = None
    draft: Draft | None = None


class Threshold(DraftModelStrategy):
    """Drafts a chain until the product of the draft tokens' probabilities falls below a threshold.

    The token at which the product falls below the threshold is still proposed. In a tree, a node is expanded if its cumulative
    probability is above the threshold. Every row has its own threshold, which adapts after every step.
    """

    name = "threshold"
    summary = "A draft model drafts until its probability falls below a threshold that adapts."
    settings_class = ThresholdSettings
    hints = {"num_assistant_tokens": "max_length", "assistant_confidence_threshold": "threshold"}
    on_device = False  # while it drafts, the host checks whether any row continues

    def start(self, context: Context) -> _State:
        s: ThresholdSettings = self.settings
        tree, length, children = None, s.max_length or LENGTH, 1
        if s.tree == "dynamic":
            require_coupled(context, self.name)
            tree = DynamicTree(length, s.beam, self.tree_nodes(context), s.children, context.compile)
            ahead, children = tree.ahead, tree.children
        else:
            ahead = length = draft_budget(context.costs, s.max_length, LENGTH, MOST_LENGTH)
        drafter = context.draft(self.draft_model(context), ahead=ahead, children=children)
        calibration = CalibratedThreshold(context.rows, context.clock) if s.rule == "calibrated" else None
        threshold = torch.full((context.rows,), s.threshold, device=context.device)
        return _State(drafter, tree, calibration, threshold, length, waits=context.device.type != "cpu")

    def rebatch(self, state: _State, rows: Tensor, context: Context) -> _State:
        """Rows that stay keep their thresholds. New rows begin with the setting `threshold`."""
        s: ThresholdSettings = self.settings
        state.threshold = torch.where(rows >= 0, state.threshold[rows.clamp(min=0)], s.threshold)
        if state.calibration is not None:
            state.calibration.rows = context.rows
        return state

    def propose(self, state: _State, sequences: Sequences) -> Draft:
        if state.calibration is not None:
            state.calibration.drafting()
        state.drafter.begin(sequences)
        floor = state.threshold.log()
        if state.tree is not None:
            state.draft, state.weights = state.tree.weighted(state.drafter, floor)
        else:
            state.draft = self._chain(state, sequences, floor)
        if state.calibration is not None:
            state.calibration.drafted(state.drafter.passes)
        return state.draft

    def observe(self, state: _State, step: Step) -> None:
        s: ThresholdSettings = self.settings
        draft, weights = state.draft, state.weights
        assert draft is not None and weights is not None
        state.drafter.observe(step, draft.tokens.shape[1] + 1, 0 if state.tree is None else state.tree.depth)
        rejected = first_rejected(draft, weights, step)
        if state.calibration is not None:
            expected = torch.where(draft.tokens >= 0, weights.exp(), 0.0).sum() if state.tree is None else None
            value = state.calibration.threshold(step, expected)
            if value is not None:
                state.threshold.fill_(min(max(value, s.lowest), s.highest))
            return
        lower = state.threshold - s.decrease
        mean = (state.threshold + rejected) / 2
        state.threshold = torch.where(rejected >= 0, mean, lower).clamp(s.lowest, s.highest)

    def _chain(self, state: _State, sequences: Sequences, floor: Tensor) -> Draft:
        reached = torch.where(sequences.finished, float("-inf"), 0.0)
        products: list[Tensor] = []
        scores: list[Tensor] = []
        last, look = state.length, state.bucket
        while len(products) < last:
            expansion = state.drafter.extend()
            reached = reached + expansion.weights[:, 0, 0]
            products.append(reached)
            if expansion.scores is not None:
                scores.append(expansion.scores)
            if not state.waits:
                if not bool((reached >= floor).any()):
                    break
            elif len(products) == look:
                # The host reads only here. If a row continues, all rows draft up to the next bucket without another read.
                needed = int(self._kept(torch.stack(products, 1), floor).sum(1).max())
                going = bool((reached >= floor).any())
                last = min(2 * len(products), state.length) if going else len(products)
                state.bucket = min(next(b for b in BUCKETS if b >= (last if going else needed)), state.length)
        state.weights = torch.stack(products, dim=1)
        tokens = state.drafter.drafted(len(products))
        tokens = torch.where(self._kept(state.weights, floor), tokens, -1)
        return Draft.chain(tokens, torch.cat(scores, dim=1) if scores else None)

    @staticmethod
    def _kept(products: Tensor, floor: Tensor) -> Tensor:
        """Which tokens are proposed, ``[B, n]`` bool: all up to the first product below `floor`, included. Arguments are logarithms."""
        above = (products >= floor[:, None]).long().cumprod(1)
        return torch.nn.functional.pad(above, (1, -1), value=1).bool()


def first_rejected(draft: Draft, weights: Tensor, step: Step) -> Tensor:
    """The cumulative probability of each row's first rejected draft token, ``[B]`` float32. -1 if the draft was accepted to its end.

    In a tree, this token is the likeliest child of the last accepted node. weights: cumulative log-probabilities.
    """
    end = step.path.gather(1, step.accepted[:, None])  # [B, 1]
    tree = draft.topology
    if isinstance(tree, Topology):
        tree = tree.tensors(len(end), end.device)
    draft_tokens = (tree.parents[:, 1:] == end) & tree.ancestors[:, 1:, 0] & (draft.tokens >= 0)
    return torch.where(draft_tokens, weights.exp(), -1.0).amax(1)


#: Averages are taken over the last WINDOW steps, and are used after ENOUGH steps.
WINDOW, ENOUGH = 32, 3


class CalibratedThreshold:
    """Finds the threshold on a draft token's probability that maximizes tokens per second.

    One more draft token takes ``c`` seconds to draft (a pass of the draft model) and ``v`` seconds to verify (another node), both per
    row. It is accepted with probability ``P``, so it brings ``P`` tokens on average. The present rate is ``R`` tokens per second. To
    maximize tokens per second (Dinkelbach 1967), drafting continues as long as ``P >= (c + v) R``. ``P`` is the product of the draft
    model's probabilities along the draft, times the measured ratio of accepted to expected tokens. The ratio corrects a draft model
    that is over- or underconfident.

    Measured times differ between runs, so the number of steps may differ. The tokens do not.
    """

    def __init__(self, rows: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self.rows, self._clock = rows, clock
        self._draft: deque[float] = deque(maxlen=WINDOW)  # seconds per pass
        self._verify = StepLine()
        self._steps: deque[tuple[int, float]] = deque(maxlen=WINDOW)  # tokens, seconds
        self._hits: deque[tuple[float, float]] = deque(maxlen=WINDOW)  # accepted, expected
        self._begun = self._proposed = 0.0
        self._passes = 0
        self._first = True

    def drafting(self) -> None:
        """Records the time at which drafting begins."""
        self._begun = self._clock()

    def drafted(self, passes: int) -> None:
        """Records the time at which drafting ends. passes: number of passes of the draft model so far in this call."""
        self._proposed = self._clock()
        self._draft.append((self._proposed - self._begun) / max(passes - self._passes, 1))
        self._passes = passes

    def threshold(self, step: Step, expected: Tensor | None) -> float | None:
        """Updates the measurements and returns the new threshold, a probability. None if there are too few measurements yet.

        Args:
            expected: sum of the cumulative probabilities of a chain's draft tokens; None for a tree, whose probabilities are not
                corrected.
        """
        now = self._clock()
        if self._first:  # the first step may include compilation
            self._first = False
            self._draft.clear()
            return None
        read = step.read()
        emitted = sum(map(len, read.tokens))
        self._verify.observe(step.nodes.shape[1], now - self._proposed, False)
        self._steps.append((emitted, now - self._begun))
        if expected is not None:
            self._hits.append((float(sum(read.accepted)), float(expected)))
        if len(self._steps) < ENOUGH or not emitted:
            return None
        seconds = sum(seconds for _, seconds in self._steps)
        if not seconds > 0:  # the clock's resolution is too low
            return None
        rate = sum(tokens for tokens, _ in self._steps) / seconds
        accepted, expectation = (sum(values) for values in zip(*self._hits, strict=True)) if self._hits else (1.0, 1.0)
        trust = min(max(accepted / expectation, 0.1), 10.0) if expectation > 0 else 1.0
        return (median(self._draft) + self._verify.node) / self.rows * rate / trust
