"""What stands between a draft and the step that verifies it: a block of nodes of a size that kernels like."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import DraftError
from ..strategy import Draft
from ..tree import Topology, TreeTensors
from .invariance import round_up
from .sampling import Masks

#: Smaller blocks are padded: sizes 0 and 1 would get graphs of their own, and two nodes more cost nothing.
MIN_GUESSES = 2


@dataclass(frozen=True)
class NodeBlock:
    """What one step verifies.

    Attributes:
        guesses: ``[B, N-1]`` int64, the draft tokens, -1 where there is none.
        tree: of the ``N`` nodes; node 0 is each row's last committed token.
        view: ``[view]`` int64, ``range`` of the slots that attention looks at.
        masks: what a grammar allows after each node, if there is one.
        text: how many tokens in front of node 0 are still to be read, and the largest slot of the first of them; the end of
            the prompts is read by the first step.
    """

    guesses: Tensor
    tree: TreeTensors
    view: Tensor
    masks: Masks | None = None
    text: tuple[int, int] = (0, 0)


class Blocks:
    """Drafts as the core wants them: checked, at least three nodes, topology per row. One for each call and model.

    Args:
        multiple: the number of nodes is a multiple of this.
    """

    def __init__(self, rows: int, device: torch.device, multiple: int = 1) -> None:
        self.rows, self.device, self.multiple = rows, device, multiple
        self.no_guess = torch.full((rows, MIN_GUESSES), -1, dtype=torch.int64, device=device)
        self._trees: dict[Topology, TreeTensors] = {}

    def of(self, draft: Draft, proposer: str) -> tuple[Tensor, TreeTensors]:
        """Guesses ``[B, N-1]`` and the tree of ``N >= 3`` nodes.

        Raises:
            DraftError: `proposer` broke the contract.
        """
        if not isinstance(draft, Draft):
            raise DraftError(f"propose of {proposer!r} must return a Draft, not {type(draft).__name__}")
        draft.check(self.rows)
        guesses, tree = draft.tokens, draft.topology
        missing = self.nodes(guesses.shape[1] + 1) - 1 - guesses.shape[1]
        if missing > 0:
            guesses = torch.cat([guesses, self.no_guess[:, :1].expand(-1, missing)], dim=1)
        return guesses, self.tensors(tree) if isinstance(tree, Topology) else tree.padded(self.nodes(len(tree)))

    def nodes(self, nodes: int) -> int:
        """Size of the block that holds so many nodes, the root included."""
        return round_up(max(nodes, MIN_GUESSES + 1), self.multiple)

    def tensors(self, tree: Topology) -> TreeTensors:
        """`tree`, padded, on the device; made once."""
        if tree not in self._trees:
            self._trees[tree] = tree.padded(self.nodes(len(tree))).tensors(self.rows, self.device)
        return self._trees[tree]
