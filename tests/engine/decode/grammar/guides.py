"""What guides read of a step and of the rows, made by hand."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from decoders.engine.decode.core import StepOutput
from decoders.sampling.processors import Masks
from decoders.strategy import Sequences


def output(new: list[list[int]], counts: list[int], path: list[list[int]] | None = None) -> StepOutput:
    """A step in which row ``b`` got the first ``counts[b]`` of ``new[b]``; path: ``[B, N]``, by default of a chain."""
    nothing, width = torch.zeros(0), max(map(len, new))
    path = path if path is not None else [[*range(width)] for _ in new]
    padded = torch.tensor([row + [0] * (width - len(row)) for row in new])
    return StepOutput(nothing, nothing, torch.tensor(path), padded, torch.tensor([counts] * 4), nothing, None, nothing)


def allowed_by(masks: Masks, rows: int, nodes: int, vocabulary: int) -> torch.Tensor:
    """``[B, N, V]`` bool; masks that forbid nothing are not made."""
    return masks.allow(torch.zeros(rows, nodes, vocabulary)) == 0


def sequences(texts: Sequence[Sequence[int]]) -> Sequences:
    """Rows with these tokens; behind a row's end lies what would be seen if it were read."""
    length = torch.tensor([len(text) for text in texts])
    tokens = torch.full((len(texts), max(map(len, texts)) + 3), 1)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = torch.tensor(text)
    nothing = torch.zeros(len(texts), dtype=torch.int64)
    return Sequences(tokens, length, nothing, nothing.bool(), nothing)
