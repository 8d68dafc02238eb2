"""Learning rates by step, which optimizer learns which weights, and the loss against a teacher's distribution."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn


def warmup_stable_decay(step: int, steps: int, peak: float, *, warmup_steps: int, decay_share: float) -> float:
    """Warm-up, stable, linear decay to zero over the last `decay_share` of the steps.

    The stable part does not depend on `steps`: a run can be resumed with another length and then decays earlier or later.
    """
    warmup = min(1.0, (step + 1) / warmup_steps)
    decay = min(1.0, (steps - step) / max(1.0, decay_share * steps))
    return peak * warmup * decay


def warmup_cosine(step: int, steps: int, peak: float, *, warmup_share: float) -> float:
    """Warm-up over the first `warmup_share` of the steps, and half a cosine down to zero over all of them."""
    warmup = min(1.0, (step + 1) / max(1.0, warmup_share * steps))
    return peak * warmup * 0.5 * (1 + math.cos(math.pi * step / steps))


def muon_and_adamw(
    model: nn.Module, rate: float, outer: Iterable[Tensor], decay: float = 0.01
) -> list[torch.optim.Optimizer]:
    """Muon for the hidden matrices, AdamW for all else; Muon's updates are scaled to AdamW's, so that one rate serves both.

    Args:
        outer: embeddings and output matrices, which Muon is not defined for.
        decay: of the hidden matrices.
    """
    apart = {id(weight) for weight in outer}
    learnt = [p for p in model.parameters() if p.requires_grad]
    hidden = [p for p in learnt if p.dim() == 2 and id(p) not in apart]
    others = [p for p in learnt if p.dim() != 2 or id(p) in apart]
    optimizers: list[torch.optim.Optimizer] = []
    if hidden:
        optimizers.append(torch.optim.Muon(hidden, lr=rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw"))
    if others:
        optimizers.append(torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.95), weight_decay=0.0))
    return optimizers


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
