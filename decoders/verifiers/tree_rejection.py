"""Rejection sampling down a tree: siblings are tried one after the other, each on what its elders left."""

from __future__ import annotations

import torch
from torch import Tensor

from .verifier import Block, Outcomes, Verifier, normalised


class TreeRejection(Verifier):
    """Miao et al. 2024, "SpecInfer", Algorithm 2 (multi-step speculative sampling), for siblings drawn without
    replacement as in Chen et al. 2024, "Sequoia: Scalable, Robust, and Hardware-aware Speculative Decoding", Algorithm 2.

    At a node with distribution p, with its children ``x_1, x_2, …`` in node order, ``r = p`` at first (Sequoia's R) and
    ``q`` the draft's distribution (its D): ``x_j`` is accepted with probability ``min(1, r(x_j) / q(x_j))``; if it is
    not, ``r`` becomes ``norm(max(r - q, 0))``, and ``q`` loses ``x_j`` and is scaled to sum to 1 again. After the last
    child the token comes from ``r``. Where Sequoia's draft has run out of tokens and drafts uniformly, ours proposes
    nothing. A tree of draft tokens made without chance (one-hot ``q``) is decided as
    :class:`~decoders.verifiers.Coupled` decides.

    The loop runs over the rank among siblings, all parents at once; each turn reads and writes ``[B, N, V]`` a few times.
    """

    name = "tree_rejection"
    summary = "speculative sampling down a tree, siblings drawn without replacement"

    def outcomes(self, block: Block) -> Outcomes:
        p, draft, drafted, parents = block.target, block.draft, block.drafted, block.tree.parents
        n = block.nodes.shape[1]
        if n == 1:
            return Outcomes(torch.ones_like(p[..., 0]), p)
        index = torch.arange(n, device=p.device)
        vocabulary = torch.arange(p.shape[2], device=p.device)
        elder = drafted[:, None, :] & (parents[:, :, None] == parents[:, None, :]) & (index[None, :] < index[:, None])
        rank = elder.sum(-1)  # [B, N], which of its parent's children a draft token is
        is_child = drafted[:, None, :] & (parents[:, None, :] == index[None, :, None])  # [B, parent, child]

        r = p
        tried = torch.zeros_like(p, dtype=torch.bool)
        stay = torch.ones_like(p[..., 0])  # [B, N], probability that no child so far was accepted
        edges = torch.zeros_like(stay)
        for turn in range(n - 1 if block.siblings is None else block.siblings):
            on_turn = is_child & (rank[:, None, :] == turn)
            child = torch.where(on_turn, index, 0).sum(-1)  # [B, N] of each parent; 0: it has no further one
            token = block.nodes.gather(1, child).clamp(min=0)[..., None]
            q = draft.gather(1, (child - 1).clamp(min=0)[..., None].expand_as(p))
            if turn > 0:  # before, scaling would only add rounding: p equal to q must stay equal
                q = self.left(q, tried)
            drawn = q.gather(2, token)
            proposed = (child > 0)[..., None] & (drawn > 0)  # [B, N, 1]
            accept = torch.where(proposed, (r.gather(2, token) / drawn).clamp(max=1), 0.0)
            edges = edges + torch.where(on_turn, (stay[..., None] * accept), 0.0).sum(1)
            stay = stay * (1 - accept[..., 0])
            r = torch.where(proposed, normalised((r - q).clamp(min=0), r), r)
            tried = tried | (proposed & (vocabulary == token))
        return Outcomes(block.reach(edges) * stay, r)

    @staticmethod
    def left(q: Tensor, tried: Tensor) -> Tensor:
        """What `q` becomes once some tokens are drawn, and none without them: ``[B, N, V]``."""
        return normalised(q.masked_fill(tried, 0.0), 0.0)
