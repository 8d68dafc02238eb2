"""A request that has come in: whose it is, when it came, and whether anybody still waits for it."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, field

from ..errors import CancelledError, DeadlineError

#: Where a scope says which key it came with, as a digest.
CLIENT = "decoders.client"


@dataclass
class Arrival:
    """What is known of a request before its body is.

    Attributes:
        client: digest of its key; empty without one.
        moment: when it came, in seconds of ``time.monotonic()``.
        gone: whether nobody waits for it any more. Set by the event loop, looked at by threads.
    """

    client: str = ""
    moment: float = field(default_factory=time.monotonic)
    gone: bool = False

    def left(self, seconds: float) -> float:
        """What is left of so many seconds."""
        return seconds - (time.monotonic() - self.moment)

    def check(self, seconds: float) -> None:
        """Raises CancelledError if nobody waits, DeadlineError if its `seconds` are over."""
        if self.gone:
            raise CancelledError("the request was cancelled")
        if self.left(seconds) <= 0:
            raise self.late(seconds)

    def late(self, seconds: float) -> DeadlineError:
        """What a request is told whose `seconds` are over."""
        return DeadlineError(f"the request was not done within the {seconds:.3g} seconds that it was given")

    def salt(self, given: str | None) -> str:
        """What keeps its texts and those of other keys, or with another ``cache_salt`` than `given`, apart."""
        if not self.client and given is None:
            return ""
        return digest(f"{self.client}\0{given or ''}")


def digest(text: str) -> str:
    """A name for `text` that does not tell it."""
    return hashlib.sha256(text.encode()).hexdigest()[:32]
