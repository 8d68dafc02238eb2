"""Streams rows that advance unevenly as transformers' streamers expect them: one position at a time."""

from __future__ import annotations

import torch
from transformers.generation.streamers import BaseStreamer


class StreamAligner:
    """Hands a streamer ``[B]`` tokens per position as soon as every row has got that far or has ended.

    A row that ended early is filled with the pad token, as transformers does. A streamer that wants to know which tokens
    came out of one step may have a method ``on_step(new: list[list[int]])``, called before their ``put``.
    """

    def __init__(self, streamer: BaseStreamer, rows: int, pad_token: int) -> None:
        self.streamer, self.pad_token = streamer, pad_token
        self.tokens: list[list[int]] = [[] for _ in range(rows)]
        self.sent = 0

    def step(self, new: list[list[int]], ended: list[bool]) -> None:
        """Takes each row's new tokens; `ended` rows hold the others up no longer."""
        if hasattr(self.streamer, "on_step"):
            self.streamer.on_step(new)
        for row, tokens in enumerate(new):
            self.tokens[row] += tokens
        self._send(min((len(t) for t, e in zip(self.tokens, ended, strict=True) if not e), default=self._longest()))

    def end(self) -> None:
        """Sends what is left and closes the stream."""
        self._send(self._longest())
        self.streamer.end()

    def _longest(self) -> int:
        return max(map(len, self.tokens))

    def _send(self, ready: int) -> None:
        for position in range(self.sent, ready):
            self.streamer.put(torch.tensor([t[position] if position < len(t) else self.pad_token for t in self.tokens]))
        self.sent = max(self.sent, ready)
