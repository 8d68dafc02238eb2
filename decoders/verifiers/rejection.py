"""Rejection sampling along a chain, one token at a time."""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from .verifier import Block, Outcomes, Verifier, normalised


class Rejection(Verifier):
    """Leviathan, Kalman & Matias 2023, "Fast Inference from Transformers via Speculative Decoding", Algorithm 1;
    Chen et al. 2023, "Accelerating Large Language Model Decoding with Speculative Sampling", Algorithm 2.

    Leviathan's letters are ours (Chen swaps p and q). Draft token ``x_i`` is accepted with probability
    ``min(1, p_i(x_i) / q_i(x_i))``; after the first rejection the token comes from ``norm(max(0, p_i - q_i))``, after a
    chain that was accepted in full from p.
    """

    name = "rejection"
    summary = "speculative sampling: each draft token of a chain is accepted with probability min(1, p/q)"
    trees = False

    def outcomes(self, block: Block) -> Outcomes:
        p, q, chain = block.target[:, :-1], block.draft, block.chain
        probability = p.gather(2, block.nodes[:, 1:, None].clamp(min=0))[..., 0]
        accept = torch.where(chain, (probability / block.drawn).clamp(max=1), 0.0)  # [B, N-1], of node i+1
        reach = pad(accept, (1, 0), value=1.0).cumprod(1)
        residual = torch.where(chain[..., None], normalised((p - q).clamp(min=0), p), p)
        return Outcomes(reach * (1 - pad(accept, (0, 1))), torch.cat([residual, block.target[:, -1:]], 1))
