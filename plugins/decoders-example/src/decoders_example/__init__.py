"""Bigram drafting: each token is followed by what followed it last time. A template for plugins of hf-decoders."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from pydantic import Field
from torch import Tensor

from decoders import Context, Draft, Sequences, Settings, Strategy, hookimpl

__all__ = ["Bigram", "BigramSettings"]


class BigramSettings(Settings):
    """How many tokens to draft per step."""

    length: int = Field(4, ge=1, le=64, description="Tokens proposed per step.")


@dataclass
class BigramState:
    """What is remembered during one call.

    Attributes:
        seen: ``[B, V]`` int64, the last position at which each token stands with a follower; -1 if there is none.
    """

    seen: Tensor


class Bigram(Strategy):
    """Follows the most recent follower of each token.

    It never waits for the device: no ``.item()``, no ``if`` on a tensor. What it drafts is only ever *proposed*, so a
    bad draft token costs time and changes nothing. A strategy that learns from the target's logits or hidden states, or from
    what was accepted, would also define ``observe``.
    """

    name = "bigram"
    summary = "Chains each token's most recent follower in prompt and output."
    settings_class = BigramSettings
    on_device = True

    def start(self, context: Context) -> BigramState:
        return BigramState(torch.full((context.rows, context.vocab_size), -1, device=context.device))

    def propose(self, state: BigramState, sequences: Sequences) -> Draft:
        tokens = sequences.tokens
        position = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        followed = position < sequences.length[:, None] - 1  # behind a row's end the tokens are undefined
        # amax keeps the most recent place of a token that occurs often; the rest of the table stays as it is.
        state.seen.scatter_reduce_(1, torch.where(followed, tokens, 0), torch.where(followed, position, -1), "amax")
        draft_token, draft_tokens = sequences.last, []
        for _ in range(self.settings.length):
            place = state.seen.gather(1, draft_token.clamp(min=0))
            place = torch.where(draft_token < 0, -1, place)  # after "no draft token" (-1) comes no draft token
            draft_token = torch.where(place < 0, -1, tokens.gather(1, (place + 1).clamp(max=tokens.shape[1] - 1)))
            draft_tokens.append(draft_token)
        return Draft.chain(torch.cat(draft_tokens, 1))


@hookimpl
def decoders_strategies() -> list[type[Strategy]]:
    return [Bigram]
