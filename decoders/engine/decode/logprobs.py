"""Log-probabilities of generated tokens and of the likeliest other tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenLogprobs:
    """The log-probability of a token from the model's own logits, before temperature, filters, penalties and grammar.

    Attributes:
        token: the token's id.
        logprob: natural logarithm of the token's probability.
        top: ids and log-probabilities of the likeliest tokens at the token's position, best first.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def logprobs_of(tokens: list[int], logits: Tensor, top: int) -> list[TokenLogprobs]:
    """Log-probabilities of ``T`` generated `tokens` and of the `top` likeliest tokens at each position, from `logits` ``[T, V]``."""
    every = logits.float().log_softmax(-1)
    own = every.gather(1, torch.tensor(tokens, device=every.device)[:, None])[:, 0].tolist()
    best = every.topk(min(top, every.shape[-1]), dim=-1)
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [
        TokenLogprobs(token, logprob, tuple(zip(ids, values, strict=True)))
        for token, logprob, (ids, values) in zip(tokens, own, pairs, strict=True)
    ]
