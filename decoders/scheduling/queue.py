"""A scheduler's requests that wait for a row, in the order in which they will get rows."""

from __future__ import annotations

import bisect
import itertools
import math

from .generation import Generation
from .lanes import is_over


class Waiting:
    """The waiting requests, ordered by priority, then by arrival. Not thread-safe: the scheduler holds a lock.

    Attributes:
        expiry: the earliest deadline of the waiting requests, or an earlier time.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[int, int, Generation]] = []
        self._serial = itertools.count()
        self.expiry = math.inf

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, generation: Generation, priority: int) -> None:
        bisect.insort(self._entries, (-priority, next(self._serial), generation))
        self.expiry = min(self.expiry, generation.expires)

    def next(self) -> Generation:
        """Removes the next request, and returns it."""
        return self._entries.pop(0)[2]

    def remove(self, generation: Generation) -> bool:
        """Removes a request; returns whether it was in the queue."""
        place = next((i for i, entry in enumerate(self._entries) if entry[2] is generation), None)
        if place is not None:
            del self._entries[place]
        return place is not None

    def take_over(self, now: float) -> list[Generation]:
        """Removes and returns the requests that were cancelled or whose deadline has passed."""
        over = [entry[2] for entry in self._entries if is_over(entry[2], now)]
        self._entries = [entry for entry in self._entries if not is_over(entry[2], now)]
        self.expiry = min((entry[2].expires for entry in self._entries), default=math.inf)
        return over

    def all(self) -> list[Generation]:
        return [entry[2] for entry in self._entries]

    def clear(self) -> None:
        self._entries.clear()
