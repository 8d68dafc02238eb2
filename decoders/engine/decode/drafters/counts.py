"""Statistics of a draft model during a call: pending tokens (committed tokens that it has not run yet), passes, tokens and seconds.

Accepted tokens are counted on the device, passes on the host. While a step is recorded, Python runs and the device does nothing; in
replays the device runs without Python. So the host's numbers are corrected after recordings and replays.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ....report import Stage
from ...model.buckets import node_bucket

#: A pass runs at least this many tokens before the root, because each smaller number would need another compiled graph.
MIN_PENDING = 2
#: Number of entries in the histogram of new tokens per step; the last entry also counts steps with more tokens.
LONGEST = 64


class DraftCounts:
    """Passes, tokens and seconds of a draft model. If a strategy drafts for it, the model and this strategy are a *stage*.

    Args:
        model: the draft model's name.
        level: number of tokens that are pending after a fully accepted draft.
        static: whether the number of tokens in a pass is rounded up to one of a few sizes.
        shared: whether the draft model uses the slots of the model that verifies its drafts, so that no tokens are ever pending.

    Attributes:
        drafter: name of the strategy that drafts for the draft model; None without one.
        pending: number of committed tokens that the draft model still has to run, as the maximum over all rows.
        tally: ``[3 + LONGEST]`` int64: numbers of new, accepted and drafted tokens in the stage's steps (in which the draft model
            verifies); then a histogram of new tokens per step.
        passes: number of forward passes.
        forward_seconds: seconds of the forward passes.
        stage_seconds: seconds of the strategy that drafts for the draft model.
    """

    def __init__(self, model: str, level: int, static: bool, device: torch.device, shared: bool = False) -> None:
        self.model, self.level, self.static, self.device, self.shared = model, level, static, device, shared
        self.drafter: str | None = None
        self.pending = level
        self._ranges: dict[int, Tensor] = {MIN_PENDING: torch.arange(MIN_PENDING, device=device)}
        self.tally = torch.zeros(3 + LONGEST, dtype=torch.int64, device=device)
        self.passes = self._per_step = 0
        self._before = self.pending, self.passes
        self.forward_seconds = self.stage_seconds = 0.0

    def range(self, reach: int) -> Tensor:
        """``[U]`` int64, 0 … U-1. The length U tells a pass how many pending tokens to run. reach: tokens of the longest row."""
        pending = 0 if self.shared else max(min(self.pending, reach), MIN_PENDING)
        if self.static and pending:  # the block holds the pending tokens and the root
            pending = node_bucket(pending + 1) - 1
        if pending not in self._ranges:
            self._ranges[pending] = torch.arange(pending, device=self.device)
        return self._ranges[pending]

    def accepted(self, summary: Tensor) -> None:
        """Adds a step of the stage to :attr:`tally`. summary: see :class:`~decoders.engine.decode.core.StepOutput`."""
        emitted = summary[0]
        self.tally[:3] += summary[:3].sum(1)
        self.tally[3:].scatter_add_(0, (emitted - 1).clamp(0, LONGEST - 1), (emitted > 0).long())

    def recording(self) -> None:
        """Stores the host's numbers when a recording begins, for :meth:`recorded`."""
        self._before = self.pending, self.passes

    def recorded(self, worked: bool) -> None:
        """Subtracts the passes counted during a recording, because each replay will add them. worked: whether recording succeeded."""
        pending, passes = self._before
        self._per_step, self.passes = self.passes - passes, passes
        if not worked:
            self.pending = pending

    def replayed(self, recorded_counts: DraftCounts, steps: int) -> None:
        """Adds the passes of `steps` replays of a recorded step. recorded_counts: this model's statistics in the recorded call."""
        self.passes += steps * recorded_counts._per_step
        if steps:
            self.pending = recorded_counts.pending

    def report(self, weights: str, stages: list[Stage]) -> Stage:
        """Returns the report on the draft model. Waits for the device, so call it after the last step.

        stages: the reports on the draft models that draft for this model.
        """
        tokens, accepted, drafted, *lengths = self.tally.tolist()
        while lengths and not lengths[-1]:
            lengths.pop()
        return Stage(
            model=self.model, weights=weights, drafter=self.drafter, passes=self.passes,
            tokens=tokens, drafted=drafted, accepted=accepted, accepted_lengths=lengths,
            forward_seconds=self.forward_seconds, drafter_seconds=self.stage_seconds, stages=stages,
        )  # fmt: skip
