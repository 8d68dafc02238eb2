"""Prompts in batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..prompts.reading import Content, encode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Workload:
    """Prompts that are decoded in one call.

    Attributes:
        name: the prompt's name, or the names of the first and last prompt.
        kind: the kind of its prompts, by which results are summarised.
        input_ids: ``[B, P]`` int64, padded on the left.
        attention_mask: ``[B, P]``.
    """

    name: str
    kind: str
    input_ids: Tensor
    attention_mask: Tensor

    @property
    def rows(self) -> int:
        return self.input_ids.shape[0]


def workloads(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[tuple[str, str, Content]], rows: int = 1
) -> list[Workload]:
    """Workloads of `rows` prompts each. texts: ``(name, kind, text or messages)`` of each prompt. No workload mixes kinds.

    The last workload of a kind is filled up with the kind's first prompts, so that all workloads have the same number of rows.
    """
    workloads_made = []
    for kind in dict.fromkeys(kind for _, kind, _ in texts):
        of_kind = [(name, text) for name, other, text in texts if other == kind]
        for start in range(0, len(of_kind), rows):
            chosen = [of_kind[i % len(of_kind)] for i in range(start, start + rows)]
            encoded = [encode(tokenizer, text) for _, text in chosen]
            longest = max(map(len, encoded))
            ids = torch.tensor([[0] * (longest - len(tokens)) + tokens for tokens in encoded])
            mask = torch.tensor([[0] * (longest - len(tokens)) + [1] * len(tokens) for tokens in encoded])
            name = chosen[0][0] if rows == 1 else f"{chosen[0][0]}…{chosen[-1][0]}"
            workloads_made.append(Workload(name, kind, ids, mask))
    return workloads_made
