"""The target draws as if nothing had been proposed; a draft token is kept if it holds the token that was drawn."""

from __future__ import annotations

import torch

from .verifier import Block, Outcomes, Verifier, normalised


class Coupled(Verifier):
    """Token matching, the rule of :func:`decoders.engine.decode.verify.follow_matches`.

    There the target's draw takes its noise from the seed and the position alone, and a draft that adds the same noise
    tends to draw the same token: Daliri, Musco & Suresh 2024, "Coupling without Communication and Drafter-Invariant
    Speculative Decoding" (arXiv 2408.07978). Here is the outcome distribution for drafts made without that noise, so that rules can be
    compared: the target draws from p, and a child that holds the drawn token is followed. Of children that hold equal
    tokens the outcome distribution follows the first; the compiled rule follows the one with the longest accepted path, which emits the
    same tokens with the same probability.
    """

    name = "coupled"
    summary = (
        "keeps a draft token if it is the token that the target draws from the seed; same tokens under every strategy"
    )
    coupled = True

    def outcomes(self, block: Block) -> Outcomes:
        p, parents, drafted = block.target, block.tree.parents, block.drafted
        rows, n, vocab = p.shape
        tokens = block.nodes.clamp(min=0)
        index = torch.arange(n, device=p.device)
        earlier_twin = (
            drafted[:, None, :]
            & (parents[:, :, None] == parents[:, None, :])
            & (tokens[:, :, None] == tokens[:, None, :])
            & (index[None, :] < index[:, None])
        ).any(-1)
        probability = parents * vocab + tokens  # where p of a node's token stands in the flattened target
        edges = torch.where(drafted & ~earlier_twin, p.flatten(1).gather(1, probability), 0.0)
        keep = torch.ones_like(p).flatten(1).scatter_reduce(1, probability, (~drafted).to(p.dtype), "amin")
        undrafted = p * keep.view(rows, n, vocab)
        return Outcomes(block.reach(edges) * undrafted.sum(-1), normalised(undrafted, p))
