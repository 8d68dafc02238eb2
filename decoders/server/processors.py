"""What OpenAI's fields ask of every token, for the loop: penalties and biases, and stop strings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedTokenizerBase, StoppingCriteria

from ..serving.pieces import TextPieces


class TokenPenalties(LogitsProcessor):
    """``frequency_penalty``, ``presence_penalty`` and ``logit_bias``: ``score - count · frequency - (count > 0) · presence + bias``.

    Counts are those of a token in the new text.

    Args:
        prompt: tokens of the prompt.
    """

    def __init__(self, prompt: int, frequency: float, presence: float, bias: Mapping[int, float]) -> None:
        self.prompt, self.frequency, self.presence = prompt, frequency, presence
        self.ids, self.values = torch.tensor(list(bias), dtype=torch.int64), torch.tensor(list(bias.values()))

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        new = input_ids[:, self.prompt :]
        counts = torch.zeros_like(scores).scatter_add_(1, new, torch.ones_like(new, dtype=scores.dtype))
        scores = scores - counts * self.frequency - (counts > 0) * self.presence
        if len(self.ids):
            device = scores.device
            scores = scores.index_add(
                1, self.ids.to(device), self.values.to(device, scores.dtype).expand(len(scores), -1)
            )
        return scores


class StopStrings(StoppingCriteria):
    """Ends a text, of one row, where a stop string is complete in the new text.

    transformers' own criterion also finds strings that begin in the prompt, and takes the vocabulary apart for every new list of
    strings, which is seconds for a large one.

    Args:
        prompt: tokens of the prompt.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: Sequence[str], prompt: int) -> None:
        self.tokenizer, self.stops, self.prompt = tokenizer, tuple(stops), prompt
        self.longest = max(map(len, stops))
        self._begin([])

    def _begin(self, prompt: list[int]) -> None:
        self._pieces, self._tokens, self._tail = TextPieces(self.tokenizer, prompt), list[int](), ""

    def __call__(self, input_ids: Tensor, scores: Any, **more: Any) -> Tensor:
        count = input_ids.shape[1] - self.prompt
        if count == 1 or count != len(self._tokens) + 1:  # a new text, or another place
            self._begin(input_ids[0, : self.prompt].tolist())
        self._tokens += input_ids[0, self.prompt + len(self._tokens) :].tolist()
        piece = self._pieces.next(self._tokens, False)
        text = self._tail + piece
        stops_here = any(stop in text + self._pieces.held for stop in self.stops)
        self._tail = text[-self.longest :]
        return torch.full((len(input_ids),), stops_here, device=input_ids.device)
