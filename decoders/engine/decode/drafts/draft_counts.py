"""What a draft model did in a call, counted where it happens: on the device what steps decide, on the host what Python runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ....report import Stage, Stopwatch, Timings

#: Longest stretch of accepted tokens per pass that a stage's histogram can hold.
LONGEST = 64


class DraftCounts:
    """Passes, tokens and seconds of a draft model.

    Attributes:
        tally: ``[3 + LONGEST]`` int64: tokens, accepted and drafted ones of its stage, and a histogram of tokens per pass.
        passes: forward passes.
    """

    def __init__(self, device: torch.device) -> None:
        self.tally = torch.zeros(3 + LONGEST, dtype=torch.int64, device=device)
        self.passes = 0
        self._before, self._per_step = 0, 0
        self._seconds = {"forward": 0.0, "stage": 0.0}

    @contextmanager
    def clock(self, part: str, timings: Timings) -> Iterator[None]:
        """Books the seconds spent within it as those of `part`: ``forward`` or ``stage``."""
        stopwatch = Stopwatch(timings)
        yield
        self._seconds[part] += stopwatch.next()

    def accepted(self, summary: Tensor) -> None:
        """Counts what a stage's step has decided. summary: as of a step's output."""
        emitted = summary[0]
        self.tally[:3] += summary[:3].sum(1)
        self.tally[3:].scatter_add_(0, (emitted - 1).clamp(0, LONGEST - 1), (emitted > 0).long())

    def recording(self) -> None:
        """What follows is recorded: Python runs, and the device does not."""
        self._before = self.passes

    def recorded(self) -> None:
        """The recording is over; what Python counted meanwhile is what every replay does."""
        self._per_step, self.passes = self.passes - self._before, self._before

    def replayed(self, like: DraftCounts, steps: int) -> None:
        """What `like` has recorded has been run so many times."""
        self.passes += steps * like._per_step

    def report(self, model: str, weights: str, drafter: str | None, stages: list[Stage]) -> Stage:
        """Everything counted. Reads the device: not for use between steps."""
        tokens, accepted, drafted, *lengths = self.tally.tolist()
        while lengths and not lengths[-1]:
            lengths.pop()
        return Stage(
            model=model, weights=weights, drafter=drafter, passes=self.passes,
            tokens=tokens, drafted=drafted, accepted=accepted, accepted_lengths=lengths,
            forward_seconds=self._seconds["forward"], drafter_seconds=self._seconds["stage"], stages=stages,
        )  # fmt: skip
