"""The lock of one model's calls, which a forked child finds free."""

from __future__ import annotations

import os
import threading
import weakref
from contextlib import suppress
from types import TracebackType


class CallLock:
    """A re-entrant lock. In a child made by ``os.fork`` nobody holds it: the thread that did exists in the parent only."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        _all.add(self)

    def __enter__(self) -> CallLock:
        self._lock.acquire()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with suppress(RuntimeError):  # a child that was forked within a call has not acquired its new lock
            self._lock.release()

    def renew(self) -> None:
        """Forgets who holds it."""
        self._lock = threading.RLock()


_all: weakref.WeakSet[CallLock] = weakref.WeakSet()


def _renew_all() -> None:
    for lock in list(_all):
        lock.renew()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_renew_all)
