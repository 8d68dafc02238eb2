"""What a call's stream tells: its steps, the time of its first token, and what it wrote."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from .batches import Workload
from .call import TimedCall, stop_tokens, synchronize
from .call import decode as _decode
from .methods import Method

Decode = Callable[..., TimedCall]


class PutCounter(BaseStreamer):
    """Counts transformers' target forwards: one `put` each, however many tokens it brings.

    Assisted generation drafts before its first forward, which reads the prompt too, and what it puts ends with the stop
    token or at the last token asked for: tokens per `put` compare with our tokens per step.
    """

    def __init__(self) -> None:
        self.puts = -1  # the prompt comes first

    def put(self, value: Tensor) -> None:
        self.puts += 1

    def end(self) -> None:
        """Nothing to close."""


@contextlib.contextmanager
def forwards(model: PreTrainedModel | None) -> Iterator[list[int]]:
    """Counts the forward passes of transformers' assistant in the one entry of the list; that of its prompt drafts too."""
    count = [0]
    if model is None:
        yield count
        return

    def counted(*_: Any) -> None:
        count[0] += 1

    hook = model.register_forward_hook(counted)
    try:
        yield count
    finally:
        hook.remove()


class _FirstToken(Exception):
    """Ends a call once its first token is there."""


class _UntilFirstToken(BaseStreamer):
    def __init__(self) -> None:
        self.prompt_seen = False

    def put(self, value: Tensor) -> None:
        if self.prompt_seen:
            raise _FirstToken
        self.prompt_seen = True

    def end(self) -> None:
        """A call without a token ends here."""


def first_token(method: Method, workload: Workload, new_tokens: int, decode: Decode = _decode) -> float | None:
    """Seconds from the start of a call to its first token; None if there is none. Where transformers hands
    tokens over one step late (it does so on some devices), that is part of its figure.
    """
    device = method.model.device
    synchronize(device)
    started = time.perf_counter()
    try:
        decode(method, workload, new_tokens, _UntilFirstToken())
    except _FirstToken:
        return time.perf_counter() - started
    finally:
        synchronize(device)
    return None


def written(method: Method, workload: Workload, sequences: Tensor) -> list[list[int]]:
    """New tokens per row, up to and with the stop token. Without one, padding cannot be told from text and counts."""
    stops = set(stop_tokens(method.model))
    rows = []
    for row in sequences[:, workload.input_ids.shape[1] :].tolist():
        end = next((i + 1 for i, token in enumerate(row) if token in stops), len(row))
        rows.append(row[:end])
    return rows
