"""A verifier: it computes the probability of every outcome of a step."""

from __future__ import annotations

import torch

from decoders import Block, Outcomes, Verifier, hookimpl
from decoders.verifiers import normalised


class FirstChild(Verifier):
    """Rejection sampling of Leviathan et al. 2023, along the chain of first children in a tree."""

    name = "first_child"
    summary = "rejection sampling in a tree that tries only the first child of each node"

    def outcomes(self, block: Block) -> Outcomes:
        p, parents = block.target, block.tree.parents
        index = torch.arange(p.shape[1], device=p.device)
        continues = block.drafted[:, None, :] & (parents[:, None, :] == index[:, None])  # [B, parent, child]
        child = continues.long().argmax(-1)  # [B, N], each node's first child; the root if there is no child
        root = torch.zeros_like(p[:, :1])  # without a draft token, the residual of p is p
        q = torch.cat([root, block.draft], 1).gather(1, child[..., None].expand_as(p))
        token = block.nodes.gather(1, child).clamp(min=0)[..., None]
        ratio = (p.gather(2, token) / q.gather(2, token))[..., 0]
        accept = torch.where(
            child > 0, ratio.clamp(max=1), 0.0
        )  # [B, N], at each parent the acceptance probability of its first child
        edges = torch.zeros_like(accept).scatter(1, child, accept)  # the same probabilities, at the children
        return Outcomes(block.reach(edges) * (1 - accept), normalised((p - q).clamp(min=0), p))


@hookimpl
def decoders_verifiers() -> list[type[Verifier]]:
    return [FirstChild]
