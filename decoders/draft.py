"""What a strategy proposes: draft tokens and the tree that they stand in, checked before anything is run on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import DraftError
from .tree import MAX_NODES, NO_PARENT, Topology, TreeTensors, described, parents_by_row


@dataclass(frozen=True)
class Draft:
    """A small tree of draft tokens for every row.

    Attributes:
        tokens: ``[B, N-1]`` int64, the draft tokens of nodes 1 … N-1 (node 0 is the last committed token). ``-1`` means "no
            draft token here": such a node and whatever continues it is never accepted.
        topology: the block's shape, one for all rows (:class:`Topology`) or one per row (:class:`TreeTensors`).
        scores: ``[B, N-1, V]`` float32, what each draft token was drawn from (``softmax``), given its parent; siblings are drawn
            without replacement, in node order. None: the draft tokens were not drawn by chance. The coupled verifier needs
            none.
        depth: most draft tokens on a path, for trees per row whose proposer knows it; see :attr:`levels`.
        grades: ``[B, N-1]`` int64, 0 or more: how sure the strategy is of each draft token, by a measure of its own with few
            values. Tokens of one grade should be right about equally often; ``auto`` counts how often that is.
    """

    tokens: Tensor
    topology: Topology | TreeTensors
    scores: Tensor | None = None
    depth: int | None = None
    grades: Tensor | None = None

    @property
    def levels(self) -> int:
        """Upper bound of the depth; the grammar guide on the device walks this many levels."""
        if isinstance(self.topology, Topology):
            return self.topology.max_depth
        return len(self.topology) - 1 if self.depth is None else self.depth

    @property
    def parents(self) -> Sequence[Sequence[int]]:
        """Of every row the parent of each node; -1 for the root and for nodes that are never accepted. Waits for the device."""
        return parents_by_row(self.topology, len(self.tokens))

    @property
    def has_draft_tokens_only(self) -> bool:
        """Whether its nodes may be left out: none is run for what it gives, whatever becomes of it."""
        tree = self.topology
        return isinstance(tree, TreeTensors) or not (tree.extra_visible or NO_PARENT in tree.parents[1:])

    def head(self, count: int) -> Draft:
        """The first `count` draft tokens of every row: parents come before their children, so what is left are trees."""
        if count >= self.tokens.shape[1]:
            return self
        return Draft(
            self.tokens[:, :count], self.topology.head(count + 1),
            scores=self.scores[:, :count] if self.scores is not None else None,
            depth=min(self.levels, count), grades=self.grades[:, :count] if self.grades is not None else None,
        )  # fmt: skip

    @staticmethod
    def chain(tokens: Tensor, scores: Tensor | None = None) -> Draft:
        """One continuation per row: ``tokens`` is ``[B, K]``.

        Raises:
            DraftError: `tokens` is something else.
        """
        if not isinstance(tokens, Tensor) or tokens.dim() != 2:
            raise DraftError(f"a chain is made of a tensor [rows, length], not {described(tokens)}")
        return Draft(tokens, Topology.chain(tokens.shape[1]), scores)

    @staticmethod
    def branches(tokens: Tensor) -> Draft:
        """Several continuations per row, all from the root: ``tokens`` is ``[B, branches, K]``.

        Raises:
            DraftError: `tokens` is something else.
        """
        if not isinstance(tokens, Tensor) or tokens.dim() != 3:
            raise DraftError(f"branches are made of a tensor [rows, branches, length], not {described(tokens)}")
        return Draft(tokens.flatten(1), Topology.branches(tokens.shape[1], tokens.shape[2]))

    @staticmethod
    def nothing(rows: int, device: torch.device) -> Draft:
        """No draft token at all: plain decoding."""
        return Draft(torch.empty(rows, 0, dtype=torch.int64, device=device), Topology.chain(0))

    def check(self, rows: int) -> None:
        """Raises DraftError if shapes or dtype break the contract (values are never trusted anyway)."""
        if not isinstance(self.tokens, Tensor):
            raise DraftError(f"draft tokens must be int64 [{rows}, N-1], not {described(self.tokens)}")
        if self.tokens.dtype != torch.int64 or self.tokens.dim() != 2 or self.tokens.shape[0] != rows:
            raise DraftError(
                f"draft tokens must be int64 [{rows}, N-1], not {self.tokens.dtype} {list(self.tokens.shape)}"
            )
        if self.tokens.shape[1] + 1 > MAX_NODES:
            raise DraftError(f"a draft may have {MAX_NODES - 1} tokens per row at most, not {self.tokens.shape[1]}")
        if isinstance(self.topology, TreeTensors):
            self.topology.check(rows)
        elif not isinstance(self.topology, Topology):
            raise DraftError(f"a draft's topology is a Topology or TreeTensors, not {described(self.topology)}")
        if len(self.topology) != self.tokens.shape[1] + 1:
            raise DraftError(
                f"{self.tokens.shape[1]} draft tokens need a topology of {self.tokens.shape[1] + 1} nodes (the root counts), "
                f"not {len(self.topology)}"
            )
        if self.grades is not None and (
            not isinstance(self.grades, Tensor)
            or self.grades.dtype != torch.int64
            or self.grades.shape != self.tokens.shape
        ):
            raise DraftError(
                f"draft grades must be int64 {list(self.tokens.shape)}, as the tokens, not {described(self.grades)}"
            )
        if self.scores is not None:
            fits = (
                isinstance(self.scores, Tensor)
                and self.scores.dim() == 3
                and self.scores.shape[:2] == self.tokens.shape
            )
            if not fits or self.scores.dtype != torch.float32:
                wanted = ", ".join(map(str, (*self.tokens.shape, "V")))
                raise DraftError(f"draft scores must be float32 [{wanted}], not {described(self.scores)}")


def check_draft(draft: object, proposer: str, rows: int) -> None:
    """Raises DraftError if what `proposer` proposed is no draft for so many rows; values are never trusted anyway."""
    if not isinstance(draft, Draft):
        raise DraftError(f"propose of {proposer!r} must return a Draft, not {type(draft).__name__}")
    try:
        draft.check(rows)
    except DraftError as error:
        raise DraftError(f"propose of {proposer!r}: {error}") from None
