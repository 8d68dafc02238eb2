"""Which optimizer learns which weights."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


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
