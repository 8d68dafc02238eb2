"""The number of threads in a step: torch's number, or fewer while other processes use the cores.

Parallel code waits for its slowest thread hundreds of times in a step. If another process uses a core, such a wait lasts a time slice
of the scheduler. On two cores beside two busy processes, a compiled step of 3 ms took 46 ms with two threads and 5 ms with one. Results
have the same bits with any number of threads.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from ...report.surroundings import WAITING, busy_share, waiting_share

#: The number of threads is reconsidered after every STEPS steps, or after LONG seconds of steps.
STEPS = 4
LONG = 0.1
#: A trial's number of threads is kept if its steps take at most this share of the time that steps took before the trial.
BETTER = 0.9
#: Before the next trial, steps run for at least AGAIN seconds, and at least SPARSE times as long as the last trial.
AGAIN, SPARSE = 1.0, 20


class _TorchsOwn(threading.local):
    """Per calling thread: torch's number of threads before our calls changed it, and how many of our calls are running."""

    number, calls = 0, 0


_own = _TorchsOwn()


def torchs_own() -> int:
    """``torch.get_num_threads()`` in this thread; while our calls run in this thread, the number from before the outermost call."""
    return _own.number if _own.calls else torch.get_num_threads()


@contextmanager
def own_number_afterwards() -> Iterator[None]:
    """Context manager for a call that may change torch's number of threads. The outermost of nested calls restores the number."""
    if not _own.calls:
        _own.number = torch.get_num_threads()
    _own.calls += 1
    try:
        yield
    finally:
        _own.calls -= 1
        if not _own.calls:
            set_threads(_own.number)


def set_threads(number: int) -> None:
    if torch.get_num_threads() != number:
        torch.set_num_threads(number)


@dataclass
class _Steps:
    """Seconds of steps with the same number of threads: wall-clock time, and processor time of the calling thread.

    The first step does not count, because it includes the preparation of kernels.
    """

    count: int = -1
    wall: float = 0.0
    computing: float = 0.0

    def add(self, wall: float, computing: float) -> None:
        self.count += 1
        if self.count:
            self.wall += wall
            self.computing += computing

    @property
    def waiting(self) -> float:
        return waiting_share(self.wall, self.computing)

    @property
    def enough(self) -> bool:
        return self.count >= STEPS or self.wall >= LONG

    @property
    def mean(self) -> float:
        return self.wall / self.count


class Threads:
    """Chooses the number of threads for the next step of a model on the CPU, from the seconds of earlier steps.

    If steps wait long for processors, half as many threads are tried for a few steps. If fewer than `most` threads are in use, twice as
    many are tried from time to time. The faster number stays.

    Attributes:
        most: torch's number of threads, which is never exceeded.
        count: the number of threads in use.
    """

    def __init__(self) -> None:
        self._start_over(torchs_own())

    @staticmethod
    def now() -> Threads:
        """A `Threads` for a new model. It begins with torch's number of threads, or with half as many if the machine is busy."""
        threads = Threads()
        if threads.most > 1 and busy_share():
            threads.count = threads.most // 2
        return threads

    def _start_over(self, most: int) -> None:
        self.most = self.count = most
        self._steps, self._until_trial = _Steps(), 0.0
        self._before: tuple[int, float] | None = None  # in a trial, the former number and its mean seconds per step
        self._upwards = False  # whether the next trial uses more threads, not fewer, where both are possible

    def use(self) -> None:
        """Sets the chosen number of threads."""
        if (most := torchs_own()) != self.most:
            self._start_over(most)
        set_threads(self.count)

    def judge(self, wall: float, computing: float) -> None:
        """Chooses the number of threads for the next step.

        Args:
            wall: wall-clock seconds of the last step, without compilation.
            computing: CPU seconds of the calling thread in that step.
        """
        self._steps.add(wall, computing)
        self._until_trial -= wall
        if self.most == 1 or not self._steps.enough:
            return
        steps, self._steps = self._steps, _Steps()
        if self._before is not None:
            number, mean = self._before
            paid, went_up = steps.mean <= BETTER * mean, self.count > number
            self._upwards = paid != went_up
            self._until_trial = max(AGAIN, SPARSE * steps.wall)
            self.count, self._before = self.count if paid else number, None
        elif self._until_trial <= 0:
            fewer, more = self.count > 1 and steps.waiting > WAITING, self.count < self.most
            if more or fewer:
                up = more and not (fewer and self._upwards)
                self._before = self.count, steps.mean
                self.count = min(2 * self.count, self.most) if up else self.count // 2


#: ``omp_pause_soft`` of OpenMP 5: ends threads, but keeps settings.
_SOFT = 1


def release_threads() -> None:
    """Ends the calling thread's OpenMP team; the next parallel region creates a new team in less than a millisecond.

    Does nothing within a parallel region, or if OpenMP is not libgomp.
    """
    if (pause := _pause()) is not None:
        pause(_SOFT)


@functools.cache
def _pause() -> Callable[[int], int] | None:
    """``omp_pause_resource_all`` of PyTorch's libgomp. None with other OpenMP libraries, which may end the teams of all threads."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    if sys.platform != "linux" or not library.exists():
        return None
    try:  # symbols are also looked up in the libraries that libtorch_cpu.so needs, such as libgomp
        symbols = ctypes.CDLL(str(library), mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        return None
    if not hasattr(symbols, "GOMP_parallel") or hasattr(symbols, "__kmpc_fork_call"):
        return None
    return getattr(symbols, "omp_pause_resource_all", None)
