"""At which times the tokens of a call came."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from .batches import Workload
from .call import TimedCall, synchronize
from .call import decode as _decode
from .methods import Method


class Stamps(BaseStreamer):
    """Notes the time of every `put` after the prompt's."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self._prompt_seen = False

    def put(self, value: Tensor) -> None:
        if self._prompt_seen:
            self.times.append(time.perf_counter())
        self._prompt_seen = True

    def end(self) -> None:
        """Nothing to close."""


def stamped(
    method: Method, workload: Workload, new_tokens: int, decode: Any = _decode
) -> tuple[TimedCall, dict[str, float | None]]:
    """A call, and seconds: `first_token` from its start, `pause`, the longest from one token to the next, and
    `tokens_per_second` of what came after the first, all rows (compilation included).
    """
    synchronize(method.model.device)
    stamps, started = Stamps(), time.perf_counter()
    call = decode(method, workload, new_tokens, stamps)
    if not stamps.times:
        return call, {"first_token": None, "pause": None, "tokens_per_second": None}
    times = stamps.times
    span = times[-1] - times[0]
    return call, {
        "first_token": times[0] - started,
        "pause": max((b - a for a, b in pairwise(times)), default=None),
        "tokens_per_second": (len(times) - 1) * workload.rows / span if span > 0 else None,
    }
