"""Token trees: which node continues which, who sees whom, and where each node sits.

Letters used everywhere: ``N`` nodes of a block (node 0 is the last committed token, the *root*), ``B`` rows.
A node is a *candidate* if it may be accepted: the root, and every node that descends from it. Other nodes
(a lookahead window, padding) take part in the forward pass only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .deprecated import renamed, renamed_keyword
from .errors import DraftError

NO_PARENT = -1
#: Most nodes of a block, the root included: attention among them, and masks, grow with the square.
MAX_NODES = 1024


@renamed_keyword("extra_sight", "extra_visible")
@dataclass(frozen=True)
class Topology:
    """The static shape of a block of ``N`` nodes; hashable, so that its tensors are made once per device.

    Attributes:
        parents: for each node the index of its parent, smaller than its own; ``-1`` for the root and for nodes that
            can never be accepted.
        offsets: for each node its position relative to the root's (the depth, for candidates).
        extra_visible: for each node the further nodes it attends to, beyond its ancestors and itself.
    """

    parents: tuple[int, ...]
    offsets: tuple[int, ...]
    extra_visible: tuple[tuple[int, ...], ...] = ()

    extra_sight = renamed("Topology", "extra_sight", "extra_visible")

    def __post_init__(self) -> None:
        n = len(self.parents)
        if n == 0 or self.parents[0] != NO_PARENT or self.offsets[0] != 0:
            raise DraftError("node 0 must be the root: parent -1, offset 0")
        if len(self.offsets) != n or (self.extra_visible and len(self.extra_visible) != n):
            raise DraftError(
                f"{n} parents, {len(self.offsets)} offsets, {len(self.extra_visible)} extra_visible: lengths differ"
            )
        for node, parent in enumerate(self.parents):
            if not NO_PARENT <= parent < max(node, 1):
                raise DraftError(f"node {node} has parent {parent}: a parent must come before its child")
            if parent >= 0 and self.offsets[node] != self.offsets[parent] + 1:
                raise DraftError(
                    f"node {node} at offset {self.offsets[node]} continues node {parent} at offset {self.offsets[parent]}: "
                    "a child sits one position after its parent"
                )
            if parent > 0 and self.parents[parent] == NO_PARENT:
                raise DraftError(f"node {node} continues node {parent}, which can never be accepted")
        for node, seen in enumerate(self.extra_visible):
            if any(not 0 <= other < n for other in seen):
                raise DraftError(f"node {node} attends to {seen}: nodes are numbered 0 to {n - 1}")
            # A candidate's logits must be those of its own path alone, or accepted tokens would not be the target's.
            if seen and (node == 0 or self.parents[node] >= 0) and not set(seen) <= set(self.path_to(node)):
                raise DraftError(f"node {node} may be accepted, so it may see its own ancestors only, not {seen}")

    def __len__(self) -> int:
        return len(self.parents)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Looked up in every step, so made once."""
        return hash((self.parents, self.offsets, self.extra_visible))

    @cached_property
    def width(self) -> int:
        """Number of proposed nodes, ``N - 1``."""
        return len(self.parents) - 1

    @cached_property
    def max_depth(self) -> int:
        """Most tokens a step can accept from this block."""
        return max(self.offsets[i] for i, p in enumerate(self.parents) if p >= 0 or i == 0)

    @cached_property
    def max_siblings(self) -> int:
        """Most children of one node that can be accepted."""
        children = [parent for parent in self.parents if parent >= 0]
        return max((children.count(parent) for parent in children), default=0)

    def path_to(self, node: int) -> tuple[int, ...]:
        """Nodes from the first one of the branch down to `node`, both included."""
        path = [node]
        while self.parents[path[-1]] >= 0:
            path.append(self.parents[path[-1]])
        return tuple(reversed(path))

    @staticmethod
    def from_parents(parents: Sequence[int]) -> Topology:
        """A tree given by parent indices: ``[-1, 0, 1, 1]`` is a root, its child and two grandchildren."""
        offsets: list[int] = []
        if not parents or parents[0] != NO_PARENT:
            raise DraftError(f"node 0 is the root: its parent must be -1, in {list(parents)[:8]}")
        for node, parent in enumerate(parents):
            if not NO_PARENT <= parent < max(node, 1):
                raise DraftError(f"node {node} has parent {parent}: a parent must come before its child")
            offsets.append(offsets[parent] + 1 if parent >= 0 else 0)
        return Topology(tuple(parents), tuple(offsets))

    @staticmethod
    @lru_cache
    def chain(length: int) -> Topology:
        """The root followed by `length` nodes in a row."""
        return Topology.branches(1, length)

    @staticmethod
    @lru_cache
    def branches(count: int, length: int) -> Topology:
        """`count` chains of `length` nodes that all start at the root; branch ``b`` takes nodes ``1+b·length …``."""
        parents = [NO_PARENT]
        for b in range(count):
            first = 1 + b * length
            parents += [0 if j == 0 else first + j - 1 for j in range(length)]
        return Topology.from_parents(parents)

    @staticmethod
    def from_paths(paths: Sequence[Sequence[int]]) -> tuple[Topology, tuple[tuple[int, int], ...]]:
        """A tree in Medusa's notation: every path lists, level by level, which draft token (0 = best) is taken.

        Returns:
            the topology with paths sorted by depth, and for every node after the root ``(level, rank)``: take the
            `rank`-th best draft token for that level.
        """
        ordered = sorted({tuple(p) for p in paths}, key=lambda p: (len(p), p))
        index = {(): 0} | {path: i + 1 for i, path in enumerate(ordered)}
        missing = [p for p in ordered if p[:-1] not in index]
        if missing:
            raise DraftError(f"path {list(missing[0])} has no parent {list(missing[0][:-1])} in the tree")
        topology = Topology.from_parents([NO_PARENT] + [index[p[:-1]] for p in ordered])
        return topology, tuple((len(p) - 1, p[-1]) for p in ordered)

    def merge(self, other: Topology) -> Topology:
        """Both trees under one root: `other`'s nodes follow this one's and are renumbered."""
        shift = len(self) - 1

        def moved(node: int) -> int:
            return node if node <= 0 else node + shift

        extra = (self.extra_visible or ((),) * len(self)) + tuple(
            tuple(moved(s) for s in seen) for seen in (other.extra_visible or ((),) * len(other))[1:]
        )
        return Topology(
            self.parents + tuple(moved(p) for p in other.parents[1:]),
            self.offsets + other.offsets[1:],
            extra if any(extra) else (),
        )

    def head(self, nodes: int) -> Topology:
        """The first `nodes` nodes: parents come before children, so what is left is a tree."""
        return (
            self
            if nodes >= len(self)
            else Topology(
                self.parents[:nodes],
                self.offsets[:nodes],
                tuple(tuple(s for s in seen if s < nodes) for seen in self.extra_visible[:nodes]),
            )
        )

    def padded(self, nodes: int) -> Topology:
        """This block filled up to `nodes` with nodes that are never accepted."""
        extra = nodes - len(self)
        if extra <= 0:
            return self
        return Topology(
            self.parents + (NO_PARENT,) * extra,
            self.offsets + (0,) * extra,
            self.extra_visible + ((),) * extra if self.extra_visible else (),
        )

    @lru_cache(maxsize=64)  # noqa: B019 - topologies are few, small and live as long as the process
    def tensors(self, rows: int, device: torch.device) -> TreeTensors:
        """This topology as tensors for `rows` rows on `device`, made once."""
        n = len(self)
        ancestors = torch.zeros(n, n, dtype=torch.bool)
        visible = torch.zeros(n, n, dtype=torch.bool)
        for node in range(n):
            visible[node, list(self.path_to(node))] = True
            if node == 0 or self.parents[node] >= 0:
                ancestors[node, list(self.path_to(node))] = True
            if self.extra_visible:
                visible[node, list(self.extra_visible[node])] = True
        offsets, parents = torch.tensor(self.offsets), torch.tensor(self.parents).clamp(min=0)
        return TreeTensors(
            parents.expand(rows, n).contiguous().to(device),
            offsets.expand(rows, n).contiguous().to(device),
            visible.expand(rows, n, n).contiguous().to(device),
            ancestors.expand(rows, n, n).contiguous().to(device),
        )


@dataclass(frozen=True)
class TreeTensors:
    """A block's topology on the device, per row, so that rows may hold trees of different shape.

    Attributes:
        parents: ``[B, N]`` int64; 0 where there is none.
        offsets: ``[B, N]`` int64, position of each node relative to the root's.
        visible: ``[B, N, N]`` bool, ``visible[b, q, k]``: node ``q`` attends to node ``k``.
        ancestors: ``[B, N, N]`` bool, ``ancestors[b, q, k]``: ``k`` lies on the path from the root to candidate ``q``,
            itself included; the row of a node that is no candidate is all false.
    """

    parents: Tensor
    offsets: Tensor
    visible: Tensor
    ancestors: Tensor

    def __len__(self) -> int:
        return self.offsets.shape[1]

    @property
    def candidates(self) -> Tensor:
        """``[B, N]`` bool: nodes that may be accepted, the root among them."""
        return self.ancestors.any(-1)

    def of_rows(self, begin: int, end: int) -> TreeTensors:
        """Views of those of some rows."""
        rows = slice(begin, end)
        return TreeTensors(self.parents[rows], self.offsets[rows], self.visible[rows], self.ancestors[rows])

    def check(self, rows: int) -> None:
        """Raises DraftError if shapes or dtypes are not those of trees for `rows` rows."""
        n = self.offsets.shape[-1] if isinstance(self.offsets, Tensor) and self.offsets.dim() else 0
        for name, dtype, shape in (
            ("parents", torch.int64, (rows, n)), ("offsets", torch.int64, (rows, n)),
            ("visible", torch.bool, (rows, n, n)), ("ancestors", torch.bool, (rows, n, n)),
        ):  # fmt: skip
            tensor = getattr(self, name)
            if not isinstance(tensor, Tensor) or tensor.dtype != dtype or tensor.shape != shape:
                given = f"{tensor.dtype} {list(tensor.shape)}" if isinstance(tensor, Tensor) else type(tensor).__name__
                raise DraftError(
                    f"{name} of trees for {rows} rows of {n} nodes must be {dtype} {list(shape)}, not {given}"
                )

    def sound(self, wait: bool = False) -> Tensor:
        """``[B]`` bool, without a sync unless `wait` allows it: whether what is said of every candidate follows from its parent.

        A candidate comes one position after its parent, and sees what lies on its path and nothing else: otherwise its
        logits would not be those of its own text. Nodes that are never accepted may see anything.
        """
        tensors = self.parents, self.offsets, self.visible, self.ancestors
        rows, nodes = self.parents.shape
        if wait and self.parents.device.type == "cpu":  # numpy takes a fifth of the time for tensors this small
            return torch.from_numpy(_sound([t.numpy() for t in tensors], np.arange(rows)[:, None], np.arange(nodes)))
        row, index = (torch.arange(n, device=self.parents.device) for n in (rows, nodes))
        return _sound(tensors, row[:, None], index)

    @staticmethod
    def from_parents(parents: Tensor, depth: int | None = None) -> TreeTensors:
        """Topology of dynamic trees, on the device and without a sync.

        Args:
            parents: ``[B, N]`` int64; ``-1`` for the root (node 0) and for nodes that are never accepted. A parent
                comes before its child.
            depth: bound of the trees' depth, if one is known that is smaller than ``N - 1``.

        Trees of other parents have no candidate, not even the root: they are not :meth:`sound`.

        Raises:
            DraftError: another shape or type.
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
        index = torch.arange(n, device=parents.device)
        reach = (index[:, None] == index) | (parents[..., None] == index)
        # Squaring the one-step relation doubles the depth that is covered each time.
        for _ in range(max(1, (n - 1 if depth is None else depth).bit_length())):
            reach = (reach.float() @ reach.float()) > 0
        ordered = (parents < index) & (parents >= NO_PARENT) & ((parents == NO_PARENT) | (index > 0))
        candidate = reach[:, :, 0] & ordered.all(1, keepdim=True)
        return TreeTensors(parents.clamp(0, n - 1), reach.sum(-1) - 1, reach, reach & candidate.unsqueeze(-1))

    def padded(self, nodes: int) -> TreeTensors:
        """These trees filled up to `nodes` with nodes that are never accepted and see themselves alone."""
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
        """Both trees of every row under one root: `other`'s nodes follow these and are renumbered."""
        n, shift = len(self), len(self) - 1
        parents = torch.where(other.parents > 0, other.parents + shift, 0)[:, 1:]

        def joined(own: Tensor, theirs: Tensor) -> Tensor:
            """Visibility within each tree, and of the common root."""
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


def parents_by_row(tree: Topology | TreeTensors, rows: int) -> Sequence[Sequence[int]]:
    """Of every row the parent of each node; -1 for the root and for nodes that are never accepted. Waits for the device."""
    if isinstance(tree, Topology):
        return [tree.parents] * rows
    index = torch.arange(len(tree), device=tree.parents.device)
    return torch.where(tree.candidates & (index > 0), tree.parents, NO_PARENT).tolist()


def described(value: object) -> str:
    """What was given, for a message."""
    if isinstance(value, Tensor):
        return f"{value.dtype} {list(value.shape)}"
    return f"a {type(value).__name__}"


def _sound(tree: Sequence[Any], row: Any, index: Any) -> Any:
    """:meth:`TreeTensors.sound` of arrays or tensors. tree: as the fields there. row: ``[B, 1]``, index: ``[N]``, each 0, 1, …"""
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
    # What is no candidate must not be on a path to one either.
    wrong = (candidate & ((ancestors ^ path) | (visible ^ path))) | (~candidate & ancestors)
    return (
        ~wrong.any(-1).any(-1) & ~(candidate[..., 0] & (depth != offsets)).any(-1) & inside.all(-1) & candidate[:, 0, 0]
    )
