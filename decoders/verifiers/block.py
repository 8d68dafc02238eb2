"""Block verification: the chain is judged as a whole, from its end."""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from .verifier import Block, Outcomes, Verifier, normalised


class BlockVerification(Verifier):
    """Sun et al. 2024, "Block Verification Accelerates Speculative Decoding" (arXiv 2403.10444), Algorithm 2.

    A later draft token that the target likes more than the draft does can pay for an earlier one that it likes less. The paper
    proves the rule optimal in the expected number of tokens of a step, so never worse than the token rule.

    Our letters: p, q for the paper's ``M_b``, ``M_s``; its ``p_i`` is `weight`, with ``p_0 = 1`` and
    ``p_i = min(p_{i-1} · p(x_i) / q(x_i), 1)``. With ``S_i = Σ_x max(p_i · p(x | x_1 … x_i) - q(x | x_1 … x_i), 0)`` the
    chain may end at i with probability ``h_i = S_i / (S_i + 1 - p_i)``, at its last token γ with ``h_γ = p_γ``, and it
    ends at the largest such i. What follows comes from ``norm(max(p_i · p - q, 0))``, after γ from p. γ differs from row
    to row.
    """

    name = "block"
    summary = "speculative sampling that judges a chain as a whole: accepts at least as much as rejection"
    trees = False

    def outcomes(self, block: Block) -> Outcomes:
        p, q, chain = block.target[:, :-1], block.draft, block.chain
        probability = p.gather(2, block.nodes[:, 1:, None].clamp(min=0))[..., 0]
        # min(… min(r_1, 1) · r_2 …, 1) is the smallest product r_j … r_i of any tail, or 1: in logarithms a running sum
        # less its running maximum. No loop, so the number of nodes may stay dynamic in a compiled graph.
        ratio = pad(torch.where(chain, probability.log() - block.drawn.log(), 0.0), (1, 0)).cumsum(1)
        weight = (ratio - ratio.cummax(1).values).exp()  # [B, N]

        excess = (weight[:, :-1, None] * p - q).clamp(min=0)
        s = excess.sum(-1)
        # 1 - p_i first: S_i + 1 would round a small S_i away. 0/0 is p_i = 1 and p = q: the next draft token is certain.
        allowed = s + (1 - weight[:, :-1])
        h = torch.where(chain, torch.where(allowed > 0, s / allowed, 1.0), weight[:, :-1])
        h = torch.cat([h, weight[:, -1:]], 1)
        later = torch.where(chain, h[:, 1:], 0.0)  # of nodes 1 to N-1
        none_later = pad((1 - later).flip(1).cumprod(1).flip(1), (0, 1), value=1.0)
        end = torch.cat([h[:, :1], later], 1) * none_later
        residual = torch.where(chain[..., None], normalised(excess, p), p)
        return Outcomes(end, torch.cat([residual, block.target[:, -1:]], 1))
