"""The lock that serializes a model's calls: fair, re-entrant, and free in a child of ``os.fork``."""

from __future__ import annotations

import os
import threading
import weakref
from types import TracebackType

from .threads import release_threads


class CallLock:
    """A re-entrant, fair lock: threads acquire it in the order of arrival, except by ``acquire(first=True)``.

    A thread that releases the lock and acquires it again queues behind the waiting threads. In a child of ``os.fork`` the lock is free,
    because the lock's owner exists only in the parent.
    """

    def __init__(self) -> None:
        self.renew()
        _all.add(self)

    def renew(self) -> None:
        """Makes the lock free, without owner and waiting threads."""
        self._guard = threading.RLock()  # re-entrant, because a finalizer that uses the lock may run within a method
        self._owner: int | None = None
        self._depth = 0
        self._waiting: list[tuple[int, threading.Event]] = []

    def acquire(self, first: bool = False) -> None:
        """Waits until the lock is free, and locks it. first: whether this thread goes before all waiting threads."""
        me = threading.get_ident()
        if self._owner == me:
            self._depth += 1
            return
        waiting = me, threading.Event()
        with self._guard:
            if self._owner is None:
                self._owner, self._depth = me, 1
                return
            self._waiting.insert(0 if first else len(self._waiting), waiting)
        try:
            release_threads()  # another thread decodes now
            waiting[1].wait()
        except BaseException:  # the wait was interrupted, for example by Ctrl-C
            with self._guard:
                if waiting in self._waiting:
                    self._waiting.remove(waiting)
                else:
                    self._pass_on()
            raise

    def release(self) -> None:
        """Undoes one :meth:`acquire`. After as many releases as acquires, the next waiting thread acquires the lock."""
        if self._owner != threading.get_ident():  # after a fork within a call, the child does not own its new lock
            return
        if self._depth == 1 and self._waiting:
            release_threads()
        self._depth -= 1
        if not self._depth:
            with self._guard:
                self._pass_on()

    def _pass_on(self) -> None:
        self._owner, self._depth = None, 0
        if self._waiting:
            (self._owner, event), self._depth = self._waiting.pop(0), 1
            event.set()

    def __enter__(self) -> CallLock:
        self.acquire()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()


_all: weakref.WeakSet[CallLock] = weakref.WeakSet()


def _renew_all() -> None:
    for lock in list(_all):
        lock.renew()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_renew_all)
