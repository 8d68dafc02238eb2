"""What ``generate`` gives back, in transformers' form: the result, and tokens for a streamer while it is decoded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.streamers import BaseStreamer

from ..common.transformers_compat import pad_token_of
from ..engine.decode.request_output import RequestOutput
from ..report import Report


@dataclass
class DecodersOutput(GenerateDecoderOnlyOutput):
    """transformers' output with the call's :class:`~decoders.report.Report`."""

    report: Report | None = None


def assemble(input_ids: Tensor, written: RequestOutput, config: GenerationConfig) -> Tensor | DecodersOutput:
    """The result in transformers' form: ``[B, P + longest]`` int64 with finished rows padded, or an output object."""
    rows, longest = written.rows, max(map(len, written.generated))
    new = torch.full((rows, longest), pad_token_of(config), dtype=torch.int64)
    for row, tokens in enumerate(written.generated):
        new[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
    sequences = torch.cat([input_ids, new.to(input_ids.device)], dim=1)
    if not config.return_dict_in_generate:
        return sequences

    def by_position(per_row: list[list[Tensor]]) -> tuple[Tensor, ...]:
        # A row that has ended has no scores any more; zeros stand in its place.
        blank = next((torch.zeros_like(t) for row in per_row for t in row), torch.empty(0))
        return tuple(torch.stack([row[t] if t < len(row) else blank for row in per_row]) for t in range(longest))

    output: Any = DecodersOutput  # transformers' annotations are narrower than what it fills in itself
    return output(
        sequences=sequences,
        scores=by_position(written.scores) if config.output_scores else None,
        logits=by_position(written.logits) if config.output_logits else None,
        report=written.report,
    )


class StreamAligner:
    """Hands a streamer ``[B]`` tokens per position as soon as every row has got that far or has ended.

    A row that ended early is filled with the pad token, as transformers does. A streamer that wants to know which tokens
    came out of one step may have a method ``on_step(new: list[list[int]])``, called before their ``put``.
    """

    def __init__(self, streamer: BaseStreamer, pad_token: int) -> None:
        self.streamer, self.pad_token = streamer, pad_token
        self.sent = 0

    def step(self, new: list[list[int]], written: list[list[int]], ended: list[bool]) -> None:
        """Sends the positions that are complete in `written`, all tokens of each row; `ended` rows hold the others up no longer."""
        if hasattr(self.streamer, "on_step"):
            self.streamer.on_step(new)
        going = [len(tokens) for tokens, end in zip(written, ended, strict=True) if not end]
        self._send(written, min(going, default=max(map(len, written))))

    def end(self, written: list[list[int]]) -> None:
        """Sends what is left and closes the stream."""
        self._send(written, max(map(len, written)))
        self.streamer.end()

    def _send(self, written: list[list[int]], ready: int) -> None:
        for position in range(self.sent, ready):
            tokens = [row[position] if position < len(row) else self.pad_token for row in written]
            self.streamer.put(torch.tensor(tokens))
        self.sent = max(self.sent, ready)
