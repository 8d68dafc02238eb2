"""What stands between a call and the compiled step: drafts of any shape as blocks, rows as views of rounded size."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import DraftError
from ..strategy import Draft, Sequences
from ..tree import Topology, TreeTensors
from .core import Rows
from .target import Target

#: Attention looks at a multiple of this many slots.
VIEW_STEP = 64
#: Smaller blocks are padded: sizes 0 and 1 would get graphs of their own, and two nodes more cost nothing.
MIN_GUESSES = 2
#: Blocks up to this size fit behind the longest row without growing the cache.
BLOCK_MARGIN = 64


class Blocks:
    """Drafts as the core wants them: checked, at least three nodes, topology per row. One for each call and model."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self.rows, self.device = rows, device
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
        guesses, missing = draft.tokens, MIN_GUESSES - draft.tokens.shape[1]
        if missing > 0:
            guesses = torch.cat([guesses, self.no_guess[:, :missing]], dim=1) if guesses.shape[1] else self.no_guess
        tree = draft.topology
        return guesses, self.tensors(tree) if isinstance(tree, Topology) else tree.padded(MIN_GUESSES + 1)

    def tensors(self, tree: Topology) -> TreeTensors:
        """`tree`, padded, on the device; made once."""
        if tree not in self._trees:
            self._trees[tree] = tree.padded(MIN_GUESSES + 1).tensors(self.rows, self.device)
        return self._trees[tree]


class Views:
    """The rows' slots up to a length, rounded up so that sizes change seldom.

    FlexAttention skips unused blocks by itself and wants static sizes: it gets all slots.
    """

    def __init__(self, rows: Rows, whole: bool) -> None:
        self.rows, self.whole = rows, whole
        self._made: dict[int, tuple[Tensor, Sequences]] = {}

    def at(self, length: int) -> tuple[Tensor, Sequences]:
        """``range`` of the slots that attention looks at to cover `length`, and the rows' tokens in them."""
        view = self.rows.tokens.shape[1] if self.whole else -(-length // VIEW_STEP) * VIEW_STEP
        if view not in self._made:
            self._made[view] = (self.rows.range[:view], self.rows.sequences(view))
        return self._made[view]

    def covering(self, length: int) -> Views:
        """These views, or those of rows with more room if a block that ends at `length` would not fit."""
        # A view must stay smaller than the cache: the graph was made with two different sizes.
        if length < self.rows.tokens.shape[1] - VIEW_STEP:
            return self
        return Views(self.rows.grown(2 * (length + VIEW_STEP)), self.whole)


def capacity(tokens: int, block: int, whole: bool) -> int:
    """Slots per row for `tokens` and a block behind them; on CUDA a power of two, since each size is a graph."""
    slots = tokens + max(block, BLOCK_MARGIN) + VIEW_STEP
    return 1 << (slots - 1).bit_length() if whole else slots


def prefill(target: Target, views: Views, length: int, chunk: int) -> None:
    """Stores keys and values of all prompt tokens but the last, which is node 0 of the first block."""
    rows = views.rows
    for start in range(0, length - 1, chunk):
        stop = min(start + chunk, length - 1)
        at = torch.full_like(rows.length, start)
        target.prefill(rows.tokens[:, start:stop], at, rows.buffers, views.at(stop)[0].shape[0])
