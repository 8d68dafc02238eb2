"""The lock of one model's calls, which a forked child finds free."""

from __future__ import annotations

import os
import threading
import time
import weakref
from contextlib import suppress
from types import TracebackType

from .compiled.openmp import release_threads


class CallLock:
    """A re-entrant lock. In a child made by ``os.fork`` nobody holds it: the thread that did exists in the parent only."""

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
        """Lets others have it first who wait for it; whoever takes it again and again calls this in between.

        The lock itself would be taken by the thread that is running, every time.
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
