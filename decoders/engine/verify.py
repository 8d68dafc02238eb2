"""One rule for all trees: follow the children whose token is the one the target chose at their parent."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..tree import TreeTensors


@dataclass(frozen=True)
class Acceptance:
    """What became of a block of ``N`` nodes.

    Attributes:
        path: ``[B, N]`` int64; entry ``d`` is the accepted node at depth ``d`` (0 is the root). Entries past the
            accepted depth are ``d`` itself, so that moving slots along the path leaves them where they are.
        depth: ``[B]`` int64, number of accepted proposals; ``depth + 1`` tokens come out of the step.
    """

    path: Tensor
    depth: Tensor


def follow_matches(nodes: Tensor, chosen: Tensor, tree: TreeTensors) -> Acceptance:
    """Finds the deepest node all of whose path the target would have produced itself.

    Exact for greedy and for sampling with position-keyed noise (Daliri et al. 2024, "Coupling without Communication
    and Drafter-Invariant Speculative Decoding"): the target's choice at a position does not depend on the draft.

    Args:
        nodes: ``[B, N]`` int64, proposed tokens; node 0 is the last committed one, ``-1`` marks "no proposal".
        chosen: ``[B, N]`` int64, the target's token after each node.
    """
    n = nodes.shape[1]
    index = torch.arange(n, device=nodes.device)
    match = nodes == chosen.gather(1, tree.parents)
    match = match | (index == 0)
    on_branch = tree.ancestors
    accepted = (~on_branch | match[:, None]).all(-1) & on_branch.any(-1)
    # Deepest first, then the lower index: ties (equal siblings) must not depend on how argmax breaks them.
    best = torch.where(accepted, tree.offsets * n + (n - 1 - index), -1).argmax(-1, keepdim=True)  # [B, 1]
    deepest = tree.offsets.gather(1, best)  # [B, 1]
    on_path = on_branch.gather(1, best[:, :, None].expand(-1, 1, n))  # [B, 1, N]
    at_depth = tree.offsets[:, None, :] == index[None, :, None]  # [B, depth, node]
    path = torch.where(on_path & at_depth, index, 0).sum(-1)
    return Acceptance(torch.where(index[None] <= deepest, path, index), deepest[:, 0])
