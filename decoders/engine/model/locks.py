"""The lock of one model's calls, and the threads that OpenMP keeps for a thread that has decoded."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import torch

#: ``omp_pause_soft`` of OpenMP 5: threads go, settings stay.
_SOFT = 1


def release_threads() -> None:
    """Ends the calling thread's team; its next parallel region makes a new one, in less than a millisecond.

    Does nothing within a parallel region, and where OpenMP is not libgomp.
    """
    if (pause := _pause()) is not None:
        pause(_SOFT)


@functools.cache
def _pause() -> Callable[[int], int] | None:
    """``omp_pause_resource_all`` of the libgomp that PyTorch uses. Other libraries' ends every thread's team, or none."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    if sys.platform != "linux" or not library.exists():
        return None
    try:  # symbols are looked up in the libraries that it needs, too
        symbols = ctypes.CDLL(str(library), mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        return None
    if not hasattr(symbols, "GOMP_parallel") or hasattr(symbols, "__kmpc_fork_call"):
        return None
    return getattr(symbols, "omp_pause_resource_all", None)


class CallLock:
    """A re-entrant lock. In a child made by ``os.fork`` it is free: the thread that held it exists in the parent only."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._waiting: set[int] = set()
        _all.add(self)

    def __enter__(self) -> CallLock:
        if not self._lock.acquire(blocking=False):
            me = threading.get_ident()
            self._waiting.add(me)
            release_threads()  # another thread decodes now
            try:
                self._lock.acquire()
            finally:
                self._waiting.discard(me)
        return self

    def give_way(self, seconds: float = 0.05) -> None:
        """Lets waiting threads have it first. A thread that takes it again and again calls this in between: it runs already, so it
        would otherwise get the lock every time.
        """
        until = time.monotonic() + seconds
        while self._waiting and time.monotonic() < until:
            time.sleep(0.0002)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._waiting:
            release_threads()
        with suppress(RuntimeError):  # a child that was forked within a call has not acquired its new lock
            self._lock.release()

    def renew(self) -> None:
        """Forgets who holds it."""
        self._lock = threading.RLock()
        self._waiting = set()


_all: weakref.WeakSet[CallLock] = weakref.WeakSet()


def _renew_all() -> None:
    for lock in list(_all):
        lock.renew()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_renew_all)
