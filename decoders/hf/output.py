"""What ``generate`` gives back, in transformers' form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation import GenerateDecoderOnlyOutput

from ..common.transformers_compat import pad_token_of
from ..engine.decode.request import Decoded
from ..report import Report


@dataclass
class DecodersOutput(GenerateDecoderOnlyOutput):
    """transformers' output with the call's :class:`~decoders.report.Report`."""

    report: Report | None = None


def assemble(input_ids: Tensor, decoded: Decoded, config: GenerationConfig) -> Tensor | DecodersOutput:
    """The result in transformers' form: ``[B, P + longest]`` int64 with finished rows padded, or an output object."""
    rows, longest = len(decoded.tokens), max(map(len, decoded.tokens))
    new = torch.full((rows, longest), pad_token_of(config), dtype=torch.int64)
    for row, tokens in enumerate(decoded.tokens):
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
        scores=by_position(decoded.scores) if config.output_scores else None,
        logits=by_position(decoded.logits) if config.output_logits else None,
        report=decoded.report,
    )
