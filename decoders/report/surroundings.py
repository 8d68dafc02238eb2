"""A stopwatch that leaves out compilation, and what else times depend on: the processor's name, and its load by other processes."""

from __future__ import annotations

import time

import torch

from ..common.devices import processor_name
from .figures import Timings

__all__ = ["WAITING", "busy_share", "processor_name"]

#: Share of time in which a thread may wait for a processor before the processors count as busy.
WAITING = 0.25


def busy_share(seconds: float = 0.01) -> float:
    """Measures the share of time (0 to 1) in which code on torch's threads waits for cores that other processes use.

    A share of at most :data:`WAITING` is returned as 0.0.

    Args:
        seconds: how long to measure.
    """
    numbers = torch.zeros(1 << 17)  # large enough to run on several threads
    wall = computing = 0.0
    first, end = True, time.perf_counter() + seconds
    while (began := time.perf_counter()) < end:
        had = time.thread_time()
        for _ in range(20):
            numbers.add_(1)
        if not first:  # the first round includes the preparation of the threads
            wall, computing = wall + time.perf_counter() - began, computing + time.thread_time() - had
        first = False
    share = waiting_share(wall, computing)
    return share if share > WAITING else 0.0


def waiting_share(wall: float, computing: float) -> float:
    """The share of `wall` seconds in which a thread waited for a processor. computing: seconds in which the thread had a processor."""
    return max(1 - computing / wall, 0.0) if wall > 0 else 0.0


class Stopwatch:
    """A stopwatch that leaves out seconds of compilation, because `Timings.compile` already includes them."""

    def __init__(self, timings: Timings) -> None:
        self._timings = timings
        self._begun, self._compiled = time.perf_counter(), timings.compile

    def next(self) -> float:
        """Returns the seconds since the last call of this method; the first call, since the stopwatch was created."""
        begun, compiled = self._begun, self._compiled
        self._begun, self._compiled = time.perf_counter(), self._timings.compile
        return self._begun - begun - (self._compiled - compiled)
