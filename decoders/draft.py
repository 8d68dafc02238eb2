"""A draft: the tree of draft tokens that a strategy proposes for every row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .common.devices import moved_together
from .errors import DraftError, amount
from .tree.tensors import MAX_NODES, NO_PARENT, TreeTensors, described
from .tree.topology import Topology, parents_by_row


@dataclass(frozen=True)
class Draft:
    """A small tree of draft tokens for every row.

    Attributes:
        tokens: ``[B, N-1]`` int64, the draft tokens of nodes 1 … N-1 (node 0 is the last committed token). ``-1`` means "no draft
            token": the node and its descendants are never accepted.
        topology: the tree of the nodes: one for all rows (:class:`Topology`), or one per row (:class:`TreeTensors`).
        scores: ``[B, N-1, V]`` float32. Each draft token was sampled from the ``softmax`` of its scores. Siblings were sampled without
            replacement, in node order. None if no token was sampled. The default verifier, "coupled", needs no scores.
        depth: for one tree per row, the greatest number of draft tokens on a path, or None if it is unknown; see :attr:`levels`.
        grades: ``[B, N-1]`` int64, the strategy's confidence in each draft token, 0 or more (at -1 tokens, any value). The strategy
            defines the scale, which should have few values. Tokens of the same grade should be correct about equally often, as ``auto``
            measures one acceptance rate per grade.
        drafters: for reports, the name of the strategy that proposed each draft token of every row; None if one strategy drafted.
        on_host: whether the tensors are on the CPU, as :meth:`listed` creates them. The loop then checks and pads the draft on the CPU,
            and moves it to the device in one copy, with `scores` if the verifier uses them.
    """

    tokens: Tensor
    topology: Topology | TreeTensors
    scores: Tensor | None = None
    depth: int | None = None
    grades: Tensor | None = None
    drafters: Sequence[Sequence[str]] | None = None
    on_host: bool = False

    @property
    def levels(self) -> int:
        """Upper bound of the tree's depth. On a GPU, the loop computes the masks of grammars for this number of tree levels."""
        if isinstance(self.topology, Topology):
            return self.topology.max_depth
        return len(self.topology) - 1 if self.depth is None else self.depth

    @property
    def in_place(self) -> bool:
        """The topology's :attr:`~decoders.tree.topology.Topology.in_place`; False (unknown) if each row has its own tree."""
        return isinstance(self.topology, Topology) and self.topology.in_place

    @property
    def parents(self) -> Sequence[Sequence[int]]:
        """For every row, the parent of each node. -1 for the root and for nodes that are never accepted. Waits for the device."""
        return parents_by_row(self.topology, len(self.tokens))

    @property
    def has_draft_tokens_only(self) -> bool:
        """Whether every node may be accepted. If not, some nodes run only for their outputs, such as the window of ``lookahead``, and
        the loop must not drop nodes.
        """
        tree = self.topology
        return isinstance(tree, TreeTensors) or not (tree.extra_visible or NO_PARENT in tree.parents[1:])

    def head(self, count: int) -> Draft:
        """The draft with only the first `count` draft tokens of each row. They form a tree, because parents come before children."""
        if count >= self.tokens.shape[1]:
            return self
        return replace(
            self, tokens=self.tokens[:, :count], topology=self.topology.head(count + 1),
            scores=self.scores[:, :count] if self.scores is not None else None,
            depth=min(self.levels, count), grades=self.grades[:, :count] if self.grades is not None else None,
        )  # fmt: skip

    def read(self) -> tuple[list[list[int]], Sequence[Sequence[int]], list[list[int]] | None]:
        """Tokens, :attr:`parents` and grades (None without grades) as lists. Waits for the device once, unless :attr:`on_host`."""
        tree = self.topology
        tensors = [self.tokens, *([] if self.grades is None else [self.grades])]
        if isinstance(tree, TreeTensors):
            tensors.append(tree.candidate_parents())
        widths = [tensor.shape[1] for tensor in tensors]
        rows = torch.cat(tensors, dim=1).tolist()
        parts = [[row[sum(widths[:n]) : sum(widths[: n + 1])] for row in rows] for n in range(len(widths))]
        grades = None if self.grades is None else parts[1]
        return parts[0], parts[-1] if isinstance(tree, TreeTensors) else self.parents, grades

    def moved(self, device: torch.device) -> Draft:
        """Moves a draft that is :attr:`on_host` to `device` in one copy. Returns other drafts as they are."""
        if not self.on_host:
            return self
        tree = self.topology
        parts = [tree.parents, tree.offsets, tree.visible, tree.ancestors] if isinstance(tree, TreeTensors) else []
        optional = {name: held for name in ("grades", "scores") if (held := getattr(self, name)) is not None}
        tensors = [self.tokens, *optional.values(), *parts]
        tokens, *others = tensors if device.type == "cpu" else moved_together(tensors, device)
        topology = TreeTensors(*others[len(optional) :]) if isinstance(tree, TreeTensors) else tree
        there = dict(zip(optional, others, strict=False))
        return replace(self, tokens=tokens, topology=topology, on_host=False, **there)

    @staticmethod
    def chain(tokens: Tensor, scores: Tensor | None = None) -> Draft:
        """A draft with one continuation per row: ``tokens`` is ``[B, K]``.

        Raises:
            DraftError: `tokens` has another shape.
        """
        if not isinstance(tokens, Tensor) or tokens.dim() != 2:
            raise DraftError(f"a chain needs a tensor [rows, length], not {described(tokens)}")
        return Draft(tokens, Topology.chain(tokens.shape[1]), scores)

    @staticmethod
    def branches(tokens: Tensor) -> Draft:
        """A draft with several continuations per row, all from the root: ``tokens`` is ``[B, branches, K]``.

        Raises:
            DraftError: `tokens` has another shape.
        """
        if not isinstance(tokens, Tensor) or tokens.dim() != 3:
            raise DraftError(f"branches need a tensor [rows, branches, length], not {described(tokens)}")
        return Draft(tokens.flatten(1), Topology.branches(tokens.shape[1], tokens.shape[2]))

    @staticmethod
    def listed(
        tokens: Sequence[Sequence[int]], parents: Sequence[Sequence[int]] | None = None, depth: int | None = None,
        grades: Sequence[Sequence[int]] | None = None,
    ) -> Draft:  # fmt: skip
        """A draft from lists, for strategies that work on the host.

        Args:
            tokens: the draft tokens of every row, the same number in all rows.
            parents: for every row, the parents of its nodes, root included, as in :meth:`TreeTensors.from_parents`. None: every row is
                a chain.
            depth, grades: see :class:`Draft`.

        Raises:
            DraftError: the rows have different numbers of tokens.
        """
        if not all(hasattr(row, "__len__") for row in tokens):
            raise DraftError(f"Draft.listed needs a list of tokens for every row, not {tokens!r}")
        if len({len(row) for row in tokens}) > 1:
            raise DraftError(
                f"rows must have equally many draft tokens, not {[len(row) for row in tokens]}: pad with -1"
            )
        own = torch.tensor(tokens, dtype=torch.int64, device="cpu")
        topology = (
            Topology.chain(own.shape[1])
            if parents is None
            else TreeTensors.from_parents(torch.tensor(parents, dtype=torch.int64, device="cpu"), depth)
        )
        graded = None if grades is None else torch.tensor(grades, dtype=torch.int64, device="cpu")
        return Draft(own, topology, depth=None if parents is None else depth, grades=graded, on_host=True)

    @staticmethod
    def nothing(rows: int, device: torch.device) -> Draft:
        """A draft without tokens for `rows` rows. These rows are then decoded plainly."""
        return Draft(torch.empty(rows, 0, dtype=torch.int64, device=device), Topology.chain(0))

    def check(self, rows: int) -> None:
        """Raises DraftError if shapes or dtypes break the contract. The loop checks values on the device."""
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
            nodes = len(self.topology)
        elif isinstance(self.topology, Topology):
            nodes = len(self.topology.parents)
        else:
            raise DraftError(f"a draft's topology must be a Topology or TreeTensors, not {described(self.topology)}")
        if nodes != self.tokens.shape[1] + 1:
            raise DraftError(
                f"the topology of {amount(self.tokens.shape[1], 'draft token')} must have {self.tokens.shape[1] + 1} nodes, not {nodes}"
            )
        if self.grades is not None and not _is(self.grades, torch.int64, self.tokens.shape):
            raise DraftError(
                f"draft grades must be int64 {list(self.tokens.shape)}, as the tokens, not {described(self.grades)}"
            )
        if self.scores is not None:
            vocab = self.scores.shape[-1:] if isinstance(self.scores, Tensor) else ()
            if not _is(self.scores, torch.float32, (*self.tokens.shape, *vocab)):
                wanted = ", ".join(map(str, (*self.tokens.shape, "V")))
                raise DraftError(f"draft scores must be float32 [{wanted}], not {described(self.scores)}")


def _is(value: object, dtype: torch.dtype, shape: Sequence[int]) -> bool:
    return isinstance(value, Tensor) and value.dtype == dtype and tuple(value.shape) == tuple(shape)


def check_draft(draft: object, proposer: str, rows: int) -> None:
    """Checks type, shapes and dtypes of a draft from the strategy named `proposer`. The loop checks values on the device.

    Raises:
        DraftError: `draft` is no :class:`Draft` for `rows` rows.
    """
    if not isinstance(draft, Draft):
        raise DraftError(f"propose of {proposer!r} must return a Draft, not {type(draft).__name__}")
    try:
        draft.check(rows)
    except DraftError as error:
        raise DraftError(f"propose of {proposer!r}: {error}") from None
