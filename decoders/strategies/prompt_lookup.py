"""Prompt lookup decoding (Saxena 2023): tokens that followed an earlier occurrence of the row's last tokens become the draft."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from pydantic import Field, model_validator
from torch import Tensor

from ..settings import Settings
from ..strategy import Context, Draft, Sequences, Strategy


class PromptLookupSettings(Settings):
    """The length of matches, and the size of drafts."""

    max_ngram: int = Field(
        3,
        ge=1,
        le=16,
        description="Maximum length of the suffix that is looked up, in tokens (max_matching_ngram_size in transformers, "
        "prompt_lookup_max in vLLM).",
    )
    min_ngram: int = Field(
        1, ge=1, le=16, description="Minimum length of a matching suffix, in tokens (prompt_lookup_min in vLLM)."
    )
    length: int = Field(8, ge=1, le=64, description="Number of draft tokens per branch.")
    branches: int = Field(
        1, ge=1, le=8, description="Number of different continuations proposed, as branches of one tree."
    )

    @model_validator(mode="after")
    def _ordered(self) -> PromptLookupSettings:
        if self.min_ngram > self.max_ngram:
            raise ValueError(f"min_ngram {self.min_ngram} exceeds max_ngram {self.max_ngram}")
        return self


class PromptLookup(Strategy):
    """Finds the longest suffix of the row that occurred before in prompt or output, and proposes what followed its latest occurrence.

    Each further branch of the draft proposes what followed the next best occurrence. All branches begin with different tokens. A
    continuation that reaches the end of the row is repeated periodically, so that drafts in periodic text have their full length.
    """

    name = "prompt_lookup"
    summary = "Proposes what followed the same n-gram earlier in the prompt or the output."
    settings_class = PromptLookupSettings
    auto_settings = {"length": 24}
    hints = {"prompt_lookup_num_tokens": "length", "max_matching_ngram_size": "max_ngram"}
    on_device = True
    grade_rates = (0.0, 0.35, 0.7, 0.87)  # a token's grade is the length of its match

    def start(self, context: Context) -> Callable[..., tuple[Tensor, Tensor]]:
        return context.compile(continuations)

    def rebatch(self, state: Callable[..., tuple[Tensor, Tensor]], rows: Tensor, context: Context) -> Any:
        return state  # the state is only a compiled function

    def propose(self, state: Callable[..., tuple[Tensor, Tensor]], sequences: Sequences) -> Draft:
        s: PromptLookupSettings = self.settings
        tokens, matched = state(sequences.tokens, sequences.length, s.max_ngram, s.min_ngram, s.length, s.branches)
        return replace(Draft.branches(tokens), grades=matched)


def continuations(
    tokens: Tensor, length: Tensor, max_ngram: int, min_ngram: int, count: int, branches: int
) -> tuple[Tensor, Tensor]:
    """Finds earlier occurrences of each row's last tokens in the row, and returns the tokens that followed there.

    Args:
        tokens: ``[B, L]`` int64.
        length: ``[B]`` int64, number of valid tokens per row.
        max_ngram, min_ngram: greatest and least length of a match in tokens.
        count: number of tokens per branch.

    Returns:
        the continuations ``[B, branches, count]`` int64, ``-1`` for branches without a match; and for every token the length of its
        branch's match, ``[B, branches * count]`` int64, 0 for branches without a match.
    """
    rows, slots = tokens.shape
    end = torch.arange(slots, device=tokens.device)[None]  # candidate position of the suffix's last token
    last = length[:, None] - 1
    matched = torch.zeros(rows, slots, dtype=torch.int64, device=tokens.device)
    unbroken = end < last
    for back in range(max_ngram):
        wanted = tokens.gather(1, (last - back).clamp(min=0))
        shifted = torch.nn.functional.pad(tokens, (back, 0))[:, :slots]  # shifted[p] = tokens[p - back]
        unbroken = unbroken & (shifted == wanted) & (end >= back) & (last >= back)
        matched = matched + unbroken
    # Ranks occurrences by the length of the match, then by their position.
    score = torch.where(matched >= min_ngram, matched * slots + end, -1)
    follower = tokens.roll(-1, 1)
    steps = torch.arange(count, device=tokens.device)[None]
    branches_found, lengths = [], []
    for _ in range(branches):
        best, ends = score.max(1, keepdim=True)
        period = (last - ends).clamp(min=1)
        draft_token = tokens.gather(1, ends + 1 + steps % period)
        branches_found.append(torch.where(best >= 0, draft_token, -1))
        lengths.append((best.clamp(min=0) // slots).expand(-1, count))
        score = torch.where(follower == draft_token[:, :1], -1, score)
    return torch.stack(branches_found, 1), torch.cat(lengths, 1)
