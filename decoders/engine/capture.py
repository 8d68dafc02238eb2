"""On CUDA: a whole step - propose, core, observe - recorded once as a CUDA graph and replayed with a single launch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .core import StepOutput

#: Ordinary steps before recording: compile, autotune, allocate. They are real steps, nothing is thrown away.
WARM_UP_STEPS = 3


@dataclass
class _Landing:
    """Pinned host memory that one step's results are copied to, and the event that says they have arrived."""

    summary: Tensor
    new: Tensor
    arrived: torch.cuda.Event


class CapturedSteps:
    """Replays `body` and hands out each step's results one step late, so that the device never waits for the host.

    Args:
        body: runs one step on static tensors and returns its output; no syncs, the same shapes every time.
    """

    def __init__(self, body: Callable[[], StepOutput]) -> None:
        self.graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.graph(self.graph, stream=stream):
            self.output = body()
        self._landings = [self._landing(), self._landing()]

    def _landing(self) -> _Landing:
        def pinned(like: Tensor) -> Tensor:
            return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)

        return _Landing(pinned(self.output.summary), pinned(self.output.new), torch.cuda.Event())

    def __iter__(self) -> Iterator[tuple[list[list[int]], list[list[int]]]]:
        """Yields ``(summary, new)`` of every step as lists, forever: stop when all rows have ended.

        One further step is under way by then; finished rows idle in it, so it changes nothing.
        """
        turn = 0
        self._launch(self._landings[0])
        while True:
            self._launch(self._landings[1 - turn])
            landing = self._landings[turn]
            landing.arrived.synchronize()
            yield landing.summary.tolist(), landing.new.tolist()
            turn = 1 - turn

    def _launch(self, landing: _Landing) -> None:
        self.graph.replay()
        landing.summary.copy_(self.output.summary, non_blocking=True)
        landing.new.copy_(self.output.new, non_blocking=True)
        landing.arrived.record()
