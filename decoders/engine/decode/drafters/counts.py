"""Counts of a draft model during a call: tokens that it has not read yet, passes, tokens and seconds.

Accepted tokens are counted on the device, passes on the host. While a step is recorded, Python runs and the device does nothing; in
replays the device runs without Python. So the counts must be told of recordings and replays.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ....report import Stage
from ...model.buckets import node_bucket

#: Fewest tokens that are run before the root: smaller sizes would need graphs of their own.
MIN_PENDING = 2
#: Most tokens per pass that a stage's histogram tells apart.
LONGEST = 64


class DraftCounts:
    """Passes, tokens and seconds of a draft model.

    Args:
        model: its name.
        level: how many tokens are pending after a fully accepted draft.
        static: whether passes have one of a few sizes.
        shared: whether the draft uses the verifying model's slots, so that committed tokens are never read again.

    Attributes:
        pending: committed tokens that the draft has not read yet, in the row that has most of them.
        tally: ``[3 + LONGEST]`` int64: tokens, accepted and drafted ones of its stage, and a histogram of tokens per pass.
        passes: forward passes.
        forward_seconds: spent in these.
        stage_seconds: spent in the strategy that drafts for it.
    """

    def __init__(self, model: str, level: int, static: bool, device: torch.device, shared: bool = False) -> None:
        self.model, self.level, self.static, self.device, self.shared = model, level, static, device, shared
        self.pending = level
        self._ranges: dict[int, Tensor] = {MIN_PENDING: torch.arange(MIN_PENDING, device=device)}
        self.tally = torch.zeros(3 + LONGEST, dtype=torch.int64, device=device)
        self.passes = self._per_step = 0
        self._before = self.pending, self.passes
        self.forward_seconds = self.stage_seconds = 0.0

    def range(self, reach: int) -> Tensor:
        """``[U]`` int64, 0 … U-1, at least one entry for each pending token. No row is longer than `reach`."""
        pending = 0 if self.shared else max(min(self.pending, reach), MIN_PENDING)
        if self.static and pending:  # with the last token they are a block
            pending = node_bucket(pending + 1) - 1
        if pending not in self._ranges:
            self._ranges[pending] = torch.arange(pending, device=self.device)
        return self._ranges[pending]

    def accepted(self, summary: Tensor) -> None:
        """Counts a stage's step. summary: as in :class:`~decoders.engine.decode.core.StepOutput`."""
        emitted = summary[0]
        self.tally[:3] += summary[:3].sum(1)
        self.tally[3:].scatter_add_(0, (emitted - 1).clamp(0, LONGEST - 1), (emitted > 0).long())

    def recording(self) -> None:
        """A recording begins."""
        self._before = self.pending, self.passes

    def recorded(self, worked: bool) -> None:
        """The recording is over, or has failed. Every replay adds what was counted meanwhile."""
        pending, passes = self._before
        self._per_step, self.passes = self.passes - passes, passes
        if not worked:
            self.pending = pending

    def replayed(self, like: DraftCounts, steps: int) -> None:
        """Counts `steps` replays of the round that the drafter of `like` has recorded."""
        self.passes += steps * like._per_step
        if steps:
            self.pending = like.pending

    def report(self, weights: str, drafter: str | None, stages: list[Stage]) -> Stage:
        """The stage's report. Reads the device: not for use between steps."""
        tokens, accepted, drafted, *lengths = self.tally.tolist()
        while lengths and not lengths[-1]:
            lengths.pop()
        return Stage(
            model=self.model, weights=weights, drafter=drafter, passes=self.passes,
            tokens=tokens, drafted=drafted, accepted=accepted, accepted_lengths=lengths,
            forward_seconds=self.forward_seconds, drafter_seconds=self.stage_seconds, stages=stages,
        )  # fmt: skip
