"""The heads as a module (Cai et al. 2024, "Medusa", section 2.1): a few residual blocks each, and a vocabulary projection.

Letters: ``K`` heads, ``H`` hidden size, ``V`` vocabulary, ``R`` rank of a low-rank projection.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from .config import HeadsConfig


class HeadWeights(NamedTuple):
    """The tensors of all heads, stacked: what compiled code is given. None: a projection that has no such part.

    Attributes:
        linear: ``[K, layers, H, H]``.
        bias: ``[K, layers, H]``.
        projection: ``[K, V, H]``.
        down: ``[K, R, H]``.
        up: ``[K, V, R]``.
    """

    linear: Tensor
    bias: Tensor
    projection: Tensor | None
    down: Tensor | None
    up: Tensor | None


class MedusaHeads(nn.Module):
    """``K`` heads beside a model whose weights stay as they are.

    Head k maps a hidden state x to ``proj_k(block(… block(x)))`` with ``block(x) = x + SiLU(W·x + b)``. W and b begin as
    zero and the projection as the model's, so that an untrained head says what the output head says. Every block has
    weights of its own (the authors' code repeats one object).

    Args:
        lm_head: ``[V, H]``, the model's output projection; needed for new heads with a full projection only.
    """

    def __init__(self, config: HeadsConfig, lm_head: Tensor | None = None) -> None:
        super().__init__()
        self.config = config
        k, h, v, r = config.heads, config.hidden_size, config.vocab_size, config.rank
        self.linear = nn.Parameter(torch.zeros(k, config.layers, h, h))
        self.bias = nn.Parameter(torch.zeros(k, config.layers, h))
        self.projection = self.down = self.up = None
        if config.projection == "full":
            start = torch.zeros(v, h) if lm_head is None else lm_head.detach().float().cpu()
            self.projection = nn.Parameter(start.expand(k, v, h).clone())
        elif config.projection == "low_rank":
            # One factor random, the other zero: the product is zero, and its gradient is not.
            generator = torch.Generator().manual_seed(0)
            self.down = nn.Parameter(torch.randn(k, r, h, generator=generator) * h**-0.5)
            self.up = nn.Parameter(torch.zeros(k, v, r))

    def weights(self) -> HeadWeights:
        """All tensors, for compiled code."""
        return HeadWeights(self.linear, self.bias, self.projection, self.down, self.up)

    def forward(self, hidden: Tensor, lm_head: Tensor, lm_bias: Tensor | None = None) -> Tensor:
        """``hidden`` ``[P, H]`` to scores ``[P, K, V]``, before softmax. lm_head, lm_bias: the model's, ``[V, H]``, ``[V]``."""
        return head_scores(hidden, self.weights(), lm_head, lm_bias)

    def of_head(self, k: int, hidden: Tensor, lm_head: Tensor, lm_bias: Tensor | None = None) -> Tensor:
        """Scores ``[P, V]`` of head `k` alone: all heads at once can be too much for memory."""
        stacked, head = self.weights(), slice(k, k + 1)
        projection, down, up = (None if part is None else part[head] for part in stacked[2:])
        weights = HeadWeights(stacked.linear[head], stacked.bias[head], projection, down, up)
        return head_scores(hidden, weights, lm_head, lm_bias)[:, 0]


def head_scores(hidden: Tensor, weights: HeadWeights, lm_head: Tensor, lm_bias: Tensor | None) -> Tensor:
    """What :class:`MedusaHeads` computes, as a function of tensors: ``[P, H]`` to ``[P, K, V]``."""
    states = hidden[:, None].expand(-1, weights.linear.shape[0], -1).to(weights.linear.dtype)
    for linear, bias in zip(weights.linear.unbind(1), weights.bias.unbind(1), strict=True):
        states = states + nn.functional.silu(torch.einsum("pkh,kgh->pkg", states, linear) + bias)
    if weights.projection is not None:
        return torch.einsum("pkh,kvh->pkv", states, weights.projection)
    scores = states @ lm_head.to(states.dtype).T
    if lm_bias is not None:
        scores = scores + lm_bias
    if weights.down is not None and weights.up is not None:
        scores = scores + torch.einsum("pkr,kvr->pkv", torch.einsum("pkh,krh->pkr", states, weights.down), weights.up)
    return scores
