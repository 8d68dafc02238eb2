"""Losses against a teacher's distribution."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def soft_cross_entropy(scores: Tensor, target: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """``Σ weights · CE(target, softmax(scores))`` and its gradient with respect to `scores`, in few passes over what is large.

    Args:
        scores, target: ``[B, S, D]`` float32, target a distribution.
        weights: ``[B, S]``.
    """
    right = torch.matmul(target[..., None, :], scores[..., None])[..., 0, 0]
    loss = (weights * (scores.logsumexp(-1) - right)).sum()
    return loss, scores.softmax(-1).sub_(target).mul_(weights[..., None])
