"""A verifier: how much of a draft is kept, computed and not drawn."""

from __future__ import annotations

import torch

from decoders import Block, Outcomes, Verifier, hookimpl
from decoders.verifiers import normalised


class FirstChild(Verifier):
    """Rejection sampling down a tree, on the first child of each node: as Leviathan et al. 2023 on a chain."""

    name = "first_child"
    summary = "rejection sampling down a tree that tries the first child of each node only"

    def outcomes(self, block: Block) -> Outcomes:
        p, parents = block.target, block.tree.parents
        index = torch.arange(p.shape[1], device=p.device)
        continues = block.drafted[:, None, :] & (parents[:, None, :] == index[:, None])  # [B, parent, child]
        child = continues.long().argmax(-1)  # [B, N], the first one; the root where there is none
        root = torch.zeros_like(p[:, :1])  # was not drafted: what is left of p there is p
        q = torch.cat([root, block.draft], 1).gather(1, child[..., None].expand_as(p))
        token = block.nodes.gather(1, child).clamp(min=0)[..., None]
        ratio = (p.gather(2, token) / q.gather(2, token))[..., 0]
        accept = torch.where(child > 0, ratio.clamp(max=1), 0.0)  # [B, N], of each parent's child
        edges = torch.zeros_like(accept).scatter(1, child, accept)  # the same, by child
        return Outcomes(block.reach(edges) * (1 - accept), normalised((p - q).clamp(min=0), p))


@hookimpl
def decoders_verifiers() -> list[type[Verifier]]:
    return [FirstChild]
