"""The tree of a block (the nodes that one forward pass runs), the same in all rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch

from ..common.host_reads import kept
from ..errors import DraftError
from .tensors import NO_PARENT, TreeTensors


@dataclass(frozen=True)
class Topology:
    """The tree of a block of ``N`` nodes, the same in all rows; hashable, so that its tensors are created once per device.

    Attributes:
        parents: index of each node's parent, which comes before the node; ``-1`` for the root and for nodes that are never accepted.
        offsets: position of each node relative to the root; for candidates, the depth.
        extra_visible: nodes that each node attends to, besides its ancestors and itself.
    """

    parents: tuple[int, ...]
    offsets: tuple[int, ...]
    extra_visible: tuple[tuple[int, ...], ...] = ()

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
            # If a candidate attended to other nodes, its logits, and so the accepted tokens, would not be the target's.
            if seen and (node == 0 or self.parents[node] >= 0) and not set(seen) <= set(self.path_to(node)):
                raise DraftError(f"node {node} may be accepted, so it may see its own ancestors only, not {seen}")

    def __len__(self) -> int:
        return len(self.parents)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.parents, self.offsets, self.extra_visible))

    @cached_property
    def max_depth(self) -> int:
        """Greatest number of draft tokens that a step can accept from the block."""
        return max(self.offsets[i] for i, p in enumerate(self.parents) if p >= 0 or i == 0)

    @cached_property
    def max_siblings(self) -> int:
        """Greatest number of children of a node."""
        children = [parent for parent in self.parents if parent >= 0]
        return max((children.count(parent) for parent in children), default=0)

    @cached_property
    def in_place(self) -> bool:
        """Whether every path from the root consists of the block's first nodes (a chain), so that accepting a path moves no slots."""
        return all(parent in (NO_PARENT, node) for node, parent in enumerate(self.parents[1:]))

    def path_to(self, node: int) -> tuple[int, ...]:
        """The nodes from the root (or from another node without a parent) down to `node`, both ends included."""
        path = [node]
        while self.parents[path[-1]] >= 0:
            path.append(self.parents[path[-1]])
        return tuple(reversed(path))

    @staticmethod
    def from_parents(parents: Sequence[int]) -> Topology:
        """Builds a tree from parent indices: ``[-1, 0, 1, 1]`` is a root, its child and two grandchildren."""
        offsets: list[int] = []
        if not parents or parents[0] != NO_PARENT:
            raise DraftError(f"node 0 is the root: its parent must be -1; parents are {list(parents)[:8]}, …")
        for node, parent in enumerate(parents):
            if not NO_PARENT <= parent < max(node, 1):
                raise DraftError(f"node {node} has parent {parent}: a parent must come before its child")
            offsets.append(offsets[parent] + 1 if parent >= 0 else 0)
        return Topology(tuple(parents), tuple(offsets))

    @staticmethod
    @lru_cache
    def chain(length: int) -> Topology:
        """A root followed by a chain of `length` nodes."""
        return Topology.branches(1, length)

    @staticmethod
    @lru_cache
    def branches(count: int, length: int) -> Topology:
        """A root with `count` chains of `length` nodes; branch ``b`` begins at node ``1 + b·length``."""
        parents = [NO_PARENT]
        for b in range(count):
            first = 1 + b * length
            parents += [0 if j == 0 else first + j - 1 for j in range(length)]
        return Topology.from_parents(parents)

    @staticmethod
    def from_paths(paths: Sequence[Sequence[int]]) -> tuple[Topology, tuple[tuple[int, int], ...]]:
        """Builds a tree from Medusa's notation: each node is given as the ranks (0 = best) of the draft tokens on the path to it.

        Returns:
            the topology, with nodes sorted by depth, and ``(level, rank)`` for every node after the root. The node's draft token has
            this rank among the draft tokens of its level. The root's children are on level 0.
        """
        ordered = sorted({tuple(p) for p in paths}, key=lambda p: (len(p), p))
        index = {(): 0} | {path: i + 1 for i, path in enumerate(ordered)}
        missing = [p for p in ordered if p[:-1] not in index]
        if missing:
            raise DraftError(f"path {list(missing[0])} has no parent {list(missing[0][:-1])} in the tree")
        topology = Topology.from_parents([NO_PARENT] + [index[p[:-1]] for p in ordered])
        return topology, tuple((len(p) - 1, p[-1]) for p in ordered)

    def merge(self, other: Topology) -> Topology:
        """Joins two trees at the root: the nodes of `other` come last and are renumbered."""
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
        """The first `nodes` nodes; they are a tree, because parents come before children."""
        if nodes >= len(self):
            return self
        extra = tuple(tuple(s for s in seen if s < nodes) for seen in self.extra_visible[:nodes])
        return Topology(self.parents[:nodes], self.offsets[:nodes], extra)

    def padded(self, nodes: int) -> Topology:
        """The tree padded to `nodes` nodes; padding nodes are never accepted."""
        extra = nodes - len(self)
        if extra <= 0:
            return self
        return Topology(
            self.parents + (NO_PARENT,) * extra,
            self.offsets + (0,) * extra,
            self.extra_visible + ((),) * extra if self.extra_visible else (),
        )

    def tensors(self, rows: int, device: torch.device) -> TreeTensors:
        """The tree as tensors on `device`, repeated for `rows` rows; cached."""
        return kept(self._tensors(rows, device))

    @lru_cache(maxsize=64)  # noqa: B019 - topologies are few, small and live as long as the process
    def _tensors(self, rows: int, device: torch.device) -> TreeTensors:
        n = len(self)
        ancestors = torch.zeros(n, n, dtype=torch.bool, device="cpu")
        visible = torch.zeros(n, n, dtype=torch.bool, device="cpu")
        for node in range(n):
            visible[node, list(self.path_to(node))] = True
            if node == 0 or self.parents[node] >= 0:
                ancestors[node, list(self.path_to(node))] = True
            if self.extra_visible:
                visible[node, list(self.extra_visible[node])] = True
        offsets, parents = (
            torch.tensor(self.offsets, device="cpu"),
            torch.tensor(self.parents, device="cpu").clamp(min=0),
        )
        return TreeTensors(
            parents.expand(rows, n).contiguous().to(device),
            offsets.expand(rows, n).contiguous().to(device),
            visible.expand(rows, n, n).contiguous().to(device),
            ancestors.expand(rows, n, n).contiguous().to(device),
        )


def parents_by_row(tree: Topology | TreeTensors, rows: int) -> Sequence[Sequence[int]]:
    """Per row, the parent of each node; -1 for the root and for nodes that are never accepted. Syncs with the device."""
    if isinstance(tree, Topology):
        return [tree.parents] * rows
    return tree.candidate_parents().tolist()
