"""Streamers that act in the middle of a call."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from transformers.generation.streamers import BaseStreamer


class Calls(BaseStreamer):
    """Calls `job` at the first token."""

    def __init__(self, job: Callable[[], object]) -> None:
        self.job: Callable[[], object] | None = job

    def put(self, value: Tensor) -> None:
        if value.dim() == 1 and self.job is not None:
            job, self.job = self.job, None
            job()

    def end(self) -> None: ...
