"""Typical acceptance: keeps what the target finds plausible, whether or not it would have drawn it. Lossy."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from ..settings import Settings
from .verifier import Block, Outcomes, Verifier


class TypicalSettings(Settings):
    """What counts as plausible."""

    epsilon: float = Field(
        0.09, gt=0, le=1, description="ε, the probability that always suffices. Larger: fewer draft tokens are kept."
    )
    delta: float = Field(
        0.3, gt=0, description="δ, scale of the threshold exp(-entropy) where the target's distribution is spread out."
    )


class TypicalAcceptance(Verifier):
    """Cai et al. 2024, "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads", section 2.3.1.

    A draft token x is accepted if ``p(x) > min(ε, δ·exp(-H(p)))`` with the entropy H of the target's distribution p in its place,
    and all draft tokens before it are: where the target is sure little passes, where anything could follow much does. The
    longest accepted path is kept, of equally long ones the likeliest (as the authors' code does); the token after it is
    drawn from p. Nothing is drawn for the path itself, so the text follows the drafter's taste within what is plausible:
    the output is *not* distributed as the target's.

    In greedy decoding p has all its mass on one token, and this is the exact rule; the report says lossy all the same.
    """

    name = "typical"
    summary = (
        "LOSSY: keeps every draft token that the target finds plausible; more tokens per step, another distribution"
    )
    exact = False
    settings_class = TypicalSettings

    def outcomes(self, block: Block) -> Outcomes:
        p, tree = block.target, block.tree
        index = torch.arange(block.nodes.shape[1], device=p.device)
        root = index == 0
        threshold = (self.settings.delta * torch.exp(-entropy(p))).clamp(max=self.settings.epsilon)  # [B, N]
        tokens = block.nodes.clamp(min=0)
        # p of every node's token, given its parent: where it stands in the flattened target.
        probability = p.flatten(1).gather(1, tree.parents * p.shape[2] + tokens)
        plausible = (probability > threshold.gather(1, tree.parents)) & (block.nodes >= 0)
        accepted = tree.candidates & (~tree.ancestors | (plausible | root)[:, None]).all(-1)
        depth = torch.where(accepted, tree.offsets, -1)
        longest = accepted & (depth == depth.amax(-1, keepdim=True))
        surprise = torch.where(plausible & ~root, -probability.clamp(min=torch.finfo(p.dtype).tiny).log(), 0.0)
        along = torch.where(tree.ancestors, surprise[:, None], 0.0).sum(-1)
        along = torch.where(longest, along, float("inf"))
        least = along == along.amin(-1, keepdim=True)
        end = torch.where(least, index, len(index)).amin(-1, keepdim=True)
        return Outcomes((index == end).to(p.dtype), p)


def entropy(p: Tensor) -> Tensor:
    """In nats over the last axis; what has no probability adds nothing."""
    return -torch.where(p > 0, p * p.clamp(min=torch.finfo(p.dtype).tiny).log(), 0.0).sum(-1)
