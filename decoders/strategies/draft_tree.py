"""Draft trees: their settings, their shapes, and the code that fills a tree with tokens from a drafter.

Letters: ``B`` rows, ``Q`` nodes that one pass expands, ``C`` continuations of a node, ``N`` nodes of a tree, root included, ``M``
nodes found on all levels together, ``K`` nodes that the drafter has run, ``W`` nodes that are expanded on one level.
"""

from __future__ import annotations

import heapq
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Annotated, Literal, Protocol, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from ..costs import draft_budget
from ..drafters import Expansion
from ..errors import UnsupportedError
from ..sampling import in_64_bits
from ..settings import Settings
from ..strategy import Context, Draft
from ..tree import Topology, TreeTensors

__all__ = [
    "GRADES", "GRADE_RATES", "Beam", "Children", "DraftTree", "DynamicTree", "Expands", "NodeBudget", "StaticTree", "TREE_NODES",
    "TreeForm", "TreeForms", "TreeSettings", "best_nodes", "depth_bound", "grades_of", "levels_of", "likely_paths",
    "require_coupled", "shape_of",
]  # fmt: skip

#: A draft token's grade is the number of thresholds in GRADES that its probability exceeds. GRADE_RATES lists the usual acceptance rate
#: of each grade.
GRADES = (0.3, 0.6, 0.9, 0.98)
GRADE_RATES = (0.45, 0.8, 0.92, 0.98, 1.0)

#: Number of nodes of a tree, root excluded, if the costs of a step have not been measured.
TREE_NODES = 24

#: Assumed probabilities that the target chooses the best, the second best … draft token. They shape the default tree
#: (Chen et al. 2024, "Sequoia", measure such a vector and build the best tree for it).
RANK_SHARES = (0.66, 0.14, 0.06, 0.035, 0.02, 0.015, 0.01, 0.01)

# Settings of strategies with trees; each strategy has its own defaults.
TreeForm = Annotated[
    Literal["none", "static", "dynamic"],
    Field(
        description="Shape of a draft. none: a chain. static: a tree of fixed shape. dynamic: a tree of the likeliest nodes, "
        "chosen in every step."
    ),
]
NodeBudget = Annotated[
    int | None,
    Field(
        ge=1,
        le=256,
        description="Maximum number of draft tokens (nodes) in a tree. None: as many as the measured costs of a step allow, "
        "or 24 without measured costs.",
    ),
]
Children = Annotated[int, Field(ge=1, le=32, description="Maximum number of children of a tree node.")]
Beam = Annotated[int, Field(ge=1, le=32, description="Number of nodes of a dynamic tree expanded per level.")]


class TreeForms(Settings):
    """Base of settings with `tree` (or `template`), `nodes`, `children` and `beam`. Warns about settings that the tree ignores."""

    @model_validator(mode="after")
    def _used(self) -> Self:
        tree, template = getattr(self, "tree", "dynamic"), getattr(self, "template", None) is not None
        idle = ("nodes", "children", "beam") if tree == "none" or template else ("beam",) if tree == "static" else ()
        changed = [name for name in idle if getattr(self, name) != type(self).model_fields[name].default]
        if changed:  # a warning only, so that users can try every form of a tree with the same settings
            given = ", ".join(f"{name}={getattr(self, name)}" for name in changed)
            verb, where = "has" if len(changed) == 1 else "have", "a template" if template else f"tree={tree!r}"
            warnings.warn(f"{type(self).__name__}: {given} {verb} no effect with {where}", stacklevel=2)
        return self


class TreeSettings(TreeForms):
    """Settings of strategies that draft trees level by level. A subclass adds ``tree: TreeForm = …``."""

    nodes: NodeBudget = None
    children: int = Field(4, ge=2, le=32, description="Maximum number of children of a tree node.")
    beam: Beam = 4


def likely_paths(depth: int, children: int, nodes: int) -> tuple[tuple[int, ...], ...]:
    """The likeliest paths of a tree, at most `nodes`, the likeliest first.

    A path lists one rank per level (Medusa's notation): at most `depth` ranks, each less than `children`. A path's probability is the
    product of its ranks' :data:`RANK_SHARES`.
    """
    shares = RANK_SHARES[:children]
    waiting: list[tuple[float, tuple[int, ...]]] = [(-share, (rank,)) for rank, share in enumerate(shares)]
    heapq.heapify(waiting)
    chosen: list[tuple[int, ...]] = []
    while waiting and len(chosen) < nodes:
        share, path = heapq.heappop(waiting)
        chosen.append(path)
        if len(path) < depth:
            for rank, own in enumerate(shares):
                heapq.heappush(waiting, (share * own, (*path, rank)))
    return tuple(chosen)


class Expands(Protocol):
    """A drafter that can fill a tree: a :class:`~decoders.drafters.Drafter`, or a network that reads the target's hidden states."""

    def root(self) -> Expansion:
        """The best continuations of every row's last token. ``Q`` is 1."""

    def expand(self, nodes: Tensor, tree: TreeTensors) -> Expansion:
        """The best continuations of `nodes` ``[B, Q]``, which are the last ``Q`` nodes of `tree`."""


class DraftTree(ABC):
    """The shape of drafts, or a rule that chooses the shape. Draft tokens get grades, see :func:`grades_of`.

    Attributes:
        depth: number of levels.
        ahead: greatest number of cache slots that a draft model fills after a row's last token.
        children: number of continuations per node that the tree requests from the drafter.
        least_children: least number of continuations per node with which the tree can be filled.
    """

    depth: int
    ahead: int
    children: int
    least_children: int

    @abstractmethod
    def draft(self, drafter: Expands) -> Draft:
        """A tree of draft tokens ``[B, N-1]`` for every row. Calls ``root`` once, and ``expand`` once for each further level."""

    @abstractmethod
    def of_rows(self, rows: int, device: torch.device) -> DraftTree:
        """Returns a tree of this shape for a batch of `rows` rows. Used by :meth:`decoders.Strategy.rebatch`."""


class StaticTree(DraftTree):
    """A tree of fixed shape. One pass of the draft model runs all inner nodes of a level.

    The shape does not depend on drawn tokens, so drafts are exact with every verifier.

    Args:
        paths: the tree in Medusa's notation, see :meth:`Topology.from_paths`.
    """

    def __init__(self, paths: Sequence[Sequence[int]], rows: int, device: torch.device) -> None:
        self.paths = paths
        self.topology, picks = Topology.from_paths(paths)
        self.children = self.least_children = max(rank for _, rank in picks) + 1
        self.depth = self.topology.max_depth
        self.ahead = len(self.topology)
        parents, offsets = self.topology.parents, self.topology.offsets
        inner = [0, *sorted(set(parents[1:]) - {0})]  # in the order of depth, like the nodes
        inner_tree = Topology.from_parents([-1] + [inner.index(parents[node]) for node in inner[1:]])
        self._levels: list[tuple[Tensor, Tensor, Tensor, TreeTensors]] = []
        for depth in range(self.depth):
            frontier = [node for node in inner if offsets[node] == depth]
            children = [node for node in range(1, len(self.topology)) if offsets[node] == depth + 1]
            run = inner_tree.head(sum(offsets[node] <= depth for node in inner)).tensors(rows, device)
            where = [frontier.index(parents[node]) for node in children]
            ranks = [picks[node - 1][1] for node in children]
            expanded, above, taken = (torch.tensor(x, device=device) for x in (frontier, where, ranks))
            self._levels.append((expanded, above, taken, run))

    def of_rows(self, rows: int, device: torch.device) -> StaticTree:
        return StaticTree(self.paths, rows, device)

    def draft(self, drafter: Expands) -> Draft:
        """Fills the tree for every row, level by level."""
        tokens: list[Tensor] = []
        scores: list[Tensor] = []
        weights: list[Tensor] = []
        for depth, (frontier, where, ranks, run) in enumerate(self._levels):
            if depth == 0:
                expansion = drafter.root()
            else:
                expansion = drafter.expand(torch.cat(tokens, dim=1)[:, frontier - 1], run)
            tokens.append(expansion.tokens[:, where, ranks])
            weights.append(expansion.weights[:, where, ranks])
            if expansion.scores is not None:
                scores.append(expansion.scores[:, where])
        return Draft(
            torch.cat(tokens, dim=1), self.topology, torch.cat(scores, dim=1) if scores else None,
            grades=grades_of(torch.cat(weights, dim=1)),
        )  # fmt: skip


class DynamicTree(DraftTree):
    """The likeliest nodes by cumulative draft probability, found level by level (as in Spector & Ré 2023; Li et al. 2024, "EAGLE-2").

    Each pass expands a beam: the likeliest nodes of the deepest level. At the end the likeliest nodes of all levels are kept. Each
    row gets a tree of its own shape. When sampling, the probability of a node comes from ``softmax(log q + noise)``, with the noise
    with which the target draws. The choice of nodes then depends on drawn tokens, which would bias rejection rules. So the tree is
    exact with the coupled verifier only.

    Args:
        depth: number of levels.
        beam: number of nodes expanded per level.
        nodes: greatest number of nodes of the tree, root excluded.
        children: greatest number of continuations per node; fewer if the draft model's vocabulary is smaller.
        compile: see :class:`~decoders.strategy.Context`.
    """

    least_children = 1

    def __init__(
        self, depth: int, beam: int, nodes: int, children: int, compile: Callable[[Callable], Callable]
    ) -> None:
        self.depth, self.beam, self.nodes, self.children = depth, beam, nodes, children
        self.ahead = beam * depth + 1
        self._bound = depth_bound(depth)
        self._frontier, self._expanded, self._best = compile(frontier), compile(expanded), compile(best_nodes)

    def of_rows(self, rows: int, device: torch.device) -> DynamicTree:
        return self

    def draft(self, drafter: Expands) -> Draft:
        """Expands a tree for every row, and returns the draft."""
        return self.weighted(drafter)[0]

    def weighted(self, drafter: Expands, floor: Tensor | None = None) -> tuple[Draft, Tensor]:
        """Expands a tree for every row.

        Args:
            floor: ``[B]``, least cumulative log-probability of nodes that are expanded. With a floor, expansion ends when no row has a
                node to expand, and the host waits for the device once per level.

        Returns:
            the draft and the cumulative log-probabilities of its nodes, ``[B, N-1]``.
        """
        expansion = drafter.root()
        tokens, weights = expansion.tokens[:, 0], expansion.weights[:, 0]
        nowhere = torch.zeros_like(tokens)
        level = (tokens, weights, nowhere - 1, nowhere)  # tokens, weights, parents, the parents' places in the cache
        levels, count = [level], tokens.shape[1]
        # The root. `parents` and `offsets` are new tensors because Dynamo (torch 2.13) fails on guards about the strides of a slice.
        parents, offsets = nowhere.new_zeros(len(nowhere), 1), nowhere.new_zeros(len(nowhere), 1)
        visible = torch.ones_like(offsets[:, :, None], dtype=torch.bool)
        for _ in range(1, self.depth):
            if floor is not None and not bool((level[1] >= floor[:, None]).any()):
                break
            width = min(self.beam, level[0].shape[1])
            nodes, reached, chosen, parents, offsets, visible = self._frontier(
                level[0], level[1], level[3], parents, offsets, visible, floor, width
            )
            # A draft token sees exactly its ancestors, so `visible` is also the tensor of ancestors.
            expansion = drafter.expand(nodes, TreeTensors(parents, offsets, visible, visible))
            start = count - level[0].shape[1]
            level = self._expanded(expansion.tokens, expansion.weights, reached, chosen + start, offsets)
            levels.append(level)
            count += level[0].shape[1]
        tokens, weights, above, _ = (torch.cat(parts, dim=1) for parts in zip(*levels, strict=True))
        tokens, weights, *tree = self._best(tokens, weights, above, min(self.nodes, count), self._bound)
        shape = TreeTensors(*tree)
        above = torch.nn.functional.pad(weights, (1, 0)).gather(1, shape.parents[:, 1:].clamp(min=0))
        # If a node and its parent are absent, their difference -inf - -inf is nan. It becomes -inf, as for all absent nodes.
        own = (weights - above).nan_to_num(nan=float("-inf"))
        return Draft(tokens, shape, depth=self.depth, grades=grades_of(own)), weights


def grades_of(weights: Tensor) -> Tensor:
    """Grades 0 … 4 of draft tokens, int64. :data:`GRADE_RATES` lists the usual acceptance rate of each grade.

    Args:
        weights: each token's log-probability given its path, float32 of the same shape.
    """
    return sum(((weights > math.log(bound)).long() for bound in GRADES), torch.zeros_like(weights, dtype=torch.int64))


def require_coupled(context: Context, strategy: str) -> None:
    """Checks that the call has the coupled verifier. With other verifiers, drafts whose shape depends on drawn tokens are not exact.

    Raises:
        UnsupportedError: the call has another verifier.
    """
    if not context.coupled:
        raise UnsupportedError(
            f"{strategy}: the nodes of a dynamic tree depend on drawn tokens, so the tree is exact with the coupled verifier only: "
            "take a static tree, or verifier='coupled'"
        )


def levels_of(context: Context, chosen: int | None, otherwise: int) -> int:
    """Number of levels of a draft: the user's setting `chosen`; for None as many as the costs of a step allow, at most `otherwise`."""
    return chosen or min(otherwise, draft_budget(context.costs, None, otherwise))


def shape_of(
    strategy: str, tree: str, depth: int, children: int, nodes: int | None, beam: int, context: Context
) -> DraftTree:
    """The tree for the setting `tree`: ``"none"``: a chain; ``"static"``: a fixed shape; ``"dynamic"``: a shape chosen in every step.

    Args:
        strategy: name of the strategy, for the error message.
        tree: a value of :data:`TreeForm`.
        depth: number of levels of the tree.
        children: greatest number of continuations of a node.
        nodes: greatest number of nodes of a tree, root excluded; None: as many as the measured costs of a step allow.
        beam: number of nodes of a dynamic tree expanded per level.
        context: the call's context.

    Raises:
        UnsupportedError: the tree is dynamic, and the verifier is not the coupled verifier.
    """
    nodes = draft_budget(context.costs, nodes, TREE_NODES)
    if tree == "dynamic":
        require_coupled(context, strategy)
        return DynamicTree(depth, beam, nodes, children, context.compile)
    paths = [(0,) * (level + 1) for level in range(depth)] if tree == "none" else likely_paths(depth, children, nodes)
    return StaticTree(paths, context.rows, context.device)


def depth_bound(depth: int) -> int:
    """`depth`, rounded up to one of few values, because Dynamo compiles :func:`best_nodes` once for each value."""
    return (1 << depth.bit_length()) - 1 | 31


def frontier(
    tokens: Tensor, weights: Tensor, places: Tensor, parents: Tensor, offsets: Tensor, visible: Tensor, floor: Tensor | None,
    width: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Chooses the `width` likeliest nodes of a level, and appends them to the tree of the ``K`` nodes that the draft model has run.

    Args:
        tokens, weights, places: ``[B, n]``, the level's tokens, cumulative log-probabilities, and indices of their parents in the tree.
        parents, offsets, visible: ``[B, K]``, ``[B, K]`` and ``[B, K, K]``, the tree's parents, depths and visibility.
        floor: ``[B]``, cumulative log-probability below which nodes count as absent; None: no bound.

    Returns:
        the chosen nodes' tokens, cumulative log-probabilities and indices in the level, ``[B, W]``; then parents, offsets and
        visibility of the tree of ``K + W`` nodes.
    """
    if floor is not None:
        weights = weights.masked_fill(weights < floor[:, None], float("-inf"))
    best = weights.topk(width)
    place = places.gather(1, best.indices)
    rows, k = offsets.shape
    inherited = visible.gather(1, place[:, :, None].expand(-1, -1, k))
    own = torch.eye(width, dtype=torch.bool, device=tokens.device).expand(rows, -1, -1)
    below = torch.cat([inherited, own], dim=2)
    return (
        tokens.gather(1, best.indices), best.values, best.indices,
        torch.cat([parents, place], dim=1),
        torch.cat([offsets, offsets.gather(1, place) + 1], dim=1),
        torch.cat([torch.nn.functional.pad(visible, (0, width)), below], dim=1),
    )  # fmt: skip


def expanded(
    tokens: Tensor, weights: Tensor, reached: Tensor, parents: Tensor, offsets: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The next level of the tree: all continuations of the ``W`` nodes that the last pass expanded.

    Args:
        tokens, weights: ``[B, W, C]``, the continuations, and the log-probability of each given its path.
        reached, parents: ``[B, W]``, the ``W`` nodes' cumulative log-probabilities, and their indices among the ``M`` nodes found.
        offsets: ``[B, K]``; only its size is used, to compute the nodes' places in the cache.

    Returns:
        the level's tokens, cumulative log-probabilities, parents, and the parents' places in the cache, each ``[B, W·C]``.
    """
    width, children = tokens.shape[1:]
    places = torch.arange(width, device=tokens.device) + offsets.shape[1] - width
    places = places[None, :, None].expand(tokens.shape[0], -1, children).contiguous()
    return (
        tokens.flatten(1), (reached[..., None] + weights).flatten(1),
        parents[..., None].expand(-1, -1, children).flatten(1), places.flatten(1),
    )  # fmt: skip


def best_nodes(tokens: Tensor, weights: Tensor, parents: Tensor, nodes: int, depth: int) -> tuple[Tensor, ...]:
    """Selects the `nodes` likeliest of all ``M`` nodes found, and builds their tree.

    Args:
        depth: greatest number of levels of the tree, from :func:`depth_bound`.
        tokens: ``[B, M]``.
        weights: ``[B, M]``, cumulative log-probabilities, ``-inf`` for absent nodes.
        parents: ``[B, M]``, indices of earlier nodes, -1 for the root.

    Returns:
        tokens and weights ``[B, nodes]`` (token -1 for absent nodes), then the fields of :class:`TreeTensors`.
    """
    # The sort is stable, unlike topk, because parents must come before their children even if both are equally likely.
    order = in_64_bits(weights).sort(dim=1, descending=True, stable=True).indices
    chosen = order[:, :nodes].sort(1).values.to(weights.device)
    place = torch.full_like(parents, -1).scatter(
        1, chosen, torch.arange(1, nodes + 1, device=tokens.device).expand_as(chosen)
    )
    above = parents.gather(1, chosen)
    within = torch.where(above < 0, 0, place.gather(1, above.clamp(min=0)))
    tree = TreeTensors.from_parents(torch.nn.functional.pad(within, (1, 0), value=-1), depth)
    weights = weights.gather(1, chosen)
    tokens = torch.where(weights > float("-inf"), tokens.gather(1, chosen), -1)
    return tokens, weights, tree.parents, tree.offsets, tree.visible, tree.ancestors
