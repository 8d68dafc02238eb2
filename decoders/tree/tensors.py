"""The trees of a block as tensors on the device, one tree per row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..common.host_reads import host_reads
from ..errors import DraftError, amount

#: In lists of parents, the value for a root.
NO_PARENT = -1
#: Greatest number of nodes of a block, the root included. It is limited, because masks and attention grow with its square.
MAX_NODES = 1024


@dataclass(frozen=True)
class TreeTensors:
    """The trees of a block on the device; rows may have trees of different shape.

    Attributes:
        parents: ``[B, N]`` int64; 0 for nodes without a parent.
        offsets: ``[B, N]`` int64, position of each node relative to the root.
        visible: ``[B, N, N]`` bool, ``visible[b, q, k]``: node ``q`` attends to node ``k``.
        ancestors: ``[B, N, N]`` bool, ``ancestors[b, q, k]``: ``q`` is a candidate, and node ``k`` lies on the path from the root to
            ``q``, both ends included.
    """

    parents: Tensor
    offsets: Tensor
    visible: Tensor
    ancestors: Tensor

    def __len__(self) -> int:
        return self.offsets.shape[1]

    @property
    def candidates(self) -> Tensor:
        """``[B, N]`` bool: whether each node may be accepted; True for the root."""
        return self.ancestors.any(-1)

    def candidate_parents(self) -> Tensor:
        """``[B, N]`` int64: the parent of each node; -1 for the root and for nodes that are never accepted."""
        index = torch.arange(len(self), device=self.parents.device)
        return torch.where(self.candidates & (index > 0), self.parents, NO_PARENT)

    def of_rows(self, begin: int, end: int) -> TreeTensors:
        """Views of the trees of rows `begin` to `end`."""
        rows = slice(begin, end)
        return TreeTensors(self.parents[rows], self.offsets[rows], self.visible[rows], self.ancestors[rows])

    def check(self, rows: int) -> None:
        """Raises DraftError unless the tensors have the right dtypes, and shapes for `rows` rows."""
        n = self.offsets.shape[-1] if isinstance(self.offsets, Tensor) and self.offsets.dim() else 0
        for name, dtype, shape in (
            ("parents", torch.int64, (rows, n)), ("offsets", torch.int64, (rows, n)),
            ("visible", torch.bool, (rows, n, n)), ("ancestors", torch.bool, (rows, n, n)),
        ):  # fmt: skip
            tensor = getattr(self, name)
            if not isinstance(tensor, Tensor) or tensor.dtype != dtype or tensor.shape != shape:
                given = f"{tensor.dtype} {list(tensor.shape)}" if isinstance(tensor, Tensor) else type(tensor).__name__
                raise DraftError(
                    f"{name} of trees for {amount(rows, 'row')} of {amount(n, 'node')} must be {dtype} {list(shape)}, not {given}"
                )

    def sound(self, wait: bool = False) -> Tensor:
        """``[B]`` bool: whether offset, visibility and ancestors of every candidate follow from the candidate's parent.

        A candidate must be at the position after its parent and attend only to its path, because otherwise its logits would belong to
        another text. Nodes that are never accepted may attend to any node. wait: whether the host may wait for the device.
        """
        tensors = self.parents, self.offsets, self.visible, self.ancestors
        rows, nodes = self.parents.shape
        if wait and self.parents.device.type == "cpu":  # for such small tensors numpy takes a fifth of torch's time
            return torch.from_numpy(_sound([t.numpy() for t in tensors], np.arange(rows)[:, None], np.arange(nodes)))
        row, index = (torch.arange(n, device=self.parents.device) for n in (rows, nodes))
        return _sound(tensors, row[:, None], index)

    @staticmethod
    def from_parents(parents: Tensor, depth: int | None = None) -> TreeTensors:
        """Builds a tree per row on the device, without a sync. Invalid parents give trees that are not :meth:`sound`.

        Args:
            parents: ``[B, N]`` int64; ``-1`` for the root (node 0) and for nodes that are never accepted. A parent comes before
                its child.
            depth: an upper bound of the trees' depth, if less than ``N - 1``.

        Raises:
            DraftError: `parents` has another shape or type.
        """
        if (
            not isinstance(parents, Tensor)
            or parents.dim() != 2
            or parents.dtype != torch.int64
            or not parents.shape[1]
        ):
            raise DraftError(
                f"parents of trees must be an int64 tensor [B, N] with N from 1 up, not {described(parents)}"
            )
        n = parents.shape[1]
        if host_reads(parents):
            return TreeTensors(*map(torch.from_numpy, _of_parents(parents.numpy())))
        index = torch.arange(n, device=parents.device)
        reach = (index[:, None] == index) | (parents[..., None] == index)
        # `reach` relates a node to itself and to its parent. Each squaring doubles the number of generations that it covers.
        for _ in range(max(1, (n - 1 if depth is None else depth).bit_length())):
            reach = (reach.float() @ reach.float()) > 0
        ordered = (parents < index) & (parents >= NO_PARENT) & ((parents == NO_PARENT) | (index > 0))
        candidate = reach[:, :, 0] & ordered.all(1, keepdim=True)
        return TreeTensors(parents.clamp(0, n - 1), reach.sum(-1) - 1, reach, reach & candidate.unsqueeze(-1))

    def padded(self, nodes: int) -> TreeTensors:
        """The trees padded to `nodes` nodes. Padding nodes attend only to themselves and are never accepted."""
        n = len(self)
        extra = nodes - n
        if extra <= 0:
            return self
        pad = torch.nn.functional.pad
        visible = pad(self.visible, (0, extra, 0, extra))
        visible = visible | torch.diag(torch.arange(nodes, device=visible.device) >= n)
        return TreeTensors(
            pad(self.parents, (0, extra)),
            pad(self.offsets, (0, extra)),
            visible,
            pad(self.ancestors, (0, extra, 0, extra)),
        )

    def head(self, nodes: int) -> TreeTensors:
        """The first `nodes` nodes of every row."""
        return TreeTensors(
            self.parents[:, :nodes], self.offsets[:, :nodes],
            self.visible[:, :nodes, :nodes], self.ancestors[:, :nodes, :nodes],
        )  # fmt: skip

    def merge(self, other: TreeTensors) -> TreeTensors:
        """Joins both trees of each row at the root: the nodes of `other` come last and are renumbered."""
        n, shift = len(self), len(self) - 1
        parents = torch.where(other.parents > 0, other.parents + shift, 0)[:, 1:]

        def joined(own: Tensor, theirs: Tensor) -> Tensor:
            """Joins a relation ``[B, N, N]`` of both trees: a node is related only to nodes of its own tree and to the common root."""
            wide = torch.nn.functional.pad(theirs, (shift, 0, shift, 0))[:, n:]
            wide[:, :, shift] = False
            wide[:, :, 0] = theirs[:, 1:, 0]
            return torch.cat([torch.nn.functional.pad(own, (0, len(other) - 1)), wide], dim=1)

        return TreeTensors(
            torch.cat([self.parents, parents], dim=1),
            torch.cat([self.offsets, other.offsets[:, 1:]], dim=1),
            joined(self.visible, other.visible),
            joined(self.ancestors, other.ancestors),
        )


def described(value: object) -> str:
    """A description of a wrong value for an error message: its dtype and shape, or its type."""
    if isinstance(value, Tensor):
        return f"{value.dtype} {list(value.shape)}"
    return f"a {type(value).__name__}"


def _of_parents(parents: np.ndarray) -> tuple[np.ndarray, ...]:
    """Computes the fields of :meth:`TreeTensors.from_parents`, in order, with numpy: on a CPU, in a third of torch's time."""
    rows, n = parents.shape
    index = np.arange(n)
    reach = np.zeros((rows, n, n), dtype=bool)
    reach[:, index, index] = True
    for visible, row in zip(reach, parents.tolist(), strict=True):
        for node, parent in enumerate(row):
            if 0 <= parent < node:
                visible[node, :node] = visible[parent, :node]
    ordered = (parents < index) & (parents >= NO_PARENT) & ((parents == NO_PARENT) | (index > 0))
    candidate = reach[:, :, 0] & ordered.all(1, keepdims=True)
    return parents.clip(0, n - 1), reach.sum(-1) - 1, reach, reach & candidate[..., None]


def _sound(tree: Sequence[Any], row: Any, index: Any) -> Any:
    """Computes :meth:`TreeTensors.sound` for arrays or tensors. tree: the fields of TreeTensors, in order. row: ``[B, 1]``, 0 … B-1;
    index: ``[N]``, 0 … N-1.
    """
    parents, offsets, visible, ancestors = tree
    candidate = ancestors[..., :1]
    before = (parents < index) | ~candidate[..., 0] | (index == 0)
    inside = (parents >= 0) & (parents < len(index)) & before
    parents = parents * inside
    path = ancestors[row, parents]
    path[:, index, index] = True
    path[:, 0, 1:] = False
    depth = offsets[row, parents] + 1
    depth[:, 0] = 0
    # Ancestors are stored for candidates only.
    wrong = (candidate & ((ancestors ^ path) | (visible ^ path))) | (~candidate & ancestors)
    return (
        ~wrong.any(-1).any(-1) & ~(candidate[..., 0] & (depth != offsets)).any(-1) & inside.all(-1) & candidate[:, 0, 0]
    )
