"""Which nodes a Medusa tree holds: the authors' choice, or the best ones for given heads by what they got right."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import DecodersError
from ..tree import Topology

Tree = tuple[tuple[int, ...], ...]

#: The authors' sparse tree of 63 nodes (their ``mc_sim_7b_63``, found for Vicuna-7B), best first. A path lists, level by
#: level, which draft token of that level's head is taken (0 is the best).
DEFAULT_TREE: Tree = (
    (0,), (0, 0), (1,), (0, 1), (2,), (0, 0, 0), (1, 0), (0, 2), (3,), (0, 3), (4,), (0, 4), (2, 0), (0, 5), (0, 0, 1),
    (5,), (0, 6), (6,), (0, 7), (0, 1, 0), (1, 1), (7,), (0, 8), (0, 0, 2), (3, 0), (0, 9), (8,), (9,), (1, 0, 0),
    (0, 2, 0), (1, 2), (0, 0, 3), (4, 0), (2, 1), (0, 0, 4), (0, 0, 5), (0, 0, 0, 0), (0, 1, 1), (0, 0, 6), (0, 3, 0),
    (5, 0), (1, 3), (0, 0, 7), (0, 0, 8), (0, 0, 9), (6, 0), (0, 4, 0), (1, 4), (7, 0), (0, 1, 2), (2, 0, 0), (3, 1),
    (2, 2), (8, 0), (0, 5, 0), (1, 5), (1, 0, 1), (0, 2, 1), (9, 0), (0, 6, 0), (0, 0, 0, 1), (1, 6), (0, 7, 0),
)  # fmt: skip


def search_tree(ranks: Tensor, nodes: int, widest: int = 16) -> Tree:
    """The tree of `nodes` nodes with the longest mean accepted path on calibration data, its paths best first.

    At every position the heads' draft tokens are right at certain ranks, and a tree accepts as much of that path of ranks as it
    holds. So a node adds to the mean length the share of positions whose path goes through it, whatever else the tree
    holds; a parent never has less than its child, and taking the most frequent nodes greedily is the best tree there is.
    (The paper multiplies the accuracies of single heads instead, as if they were independent.)

    Args:
        ranks: ``[P, K]`` int64, the rank of the right token among each head's draft tokens, 0 for the best; -1: not known.
        widest: most draft tokens of one head that are considered.

    Raises:
        DecodersError: no position is ever predicted right.
    """
    counts: Counter[tuple[int, ...]] = Counter()
    for row, count in zip(*(t.tolist() for t in torch.unique(ranks, dim=0, return_counts=True)), strict=True):
        for depth, rank in enumerate(row):
            if not 0 <= rank < widest:
                break
            counts[tuple(row[: depth + 1])] += count
    if not counts:
        raise DecodersError("no tree can be found: on the calibration data no draft token of any head is right")
    # Of equal nodes the shallower first: so a parent comes before its child.
    return tuple(sorted(counts, key=lambda path: (-counts[path], len(path), path))[:nodes])


def accepted_length(ranks: Tensor, tree: Sequence[Sequence[int]]) -> float:
    """Mean tokens per step that `tree` gives on calibration data, the bonus token included. ranks: as in :func:`search_tree`."""
    paths = {tuple(path) for path in tree}
    tokens = 0
    for row, count in zip(*(t.tolist() for t in torch.unique(ranks, dim=0, return_counts=True)), strict=True):
        depth = 0
        while depth < len(row) and tuple(row[: depth + 1]) in paths:
            depth += 1
        tokens += count * (depth + 1)
    return tokens / len(ranks)


def picture(tree: Sequence[Sequence[int]]) -> str:
    """The attention mask of a tree's block as text: a row per node, which sees the columns marked ``■``."""
    topology, _ = Topology.from_paths(tree)
    ordered = [(), *sorted({tuple(path) for path in tree}, key=lambda path: (len(path), path))]
    names = ["root" if not path else "head " + str(len(path)) + " " + "·".join(map(str, path)) for path in ordered]
    width = max(map(len, names))
    visible = topology.tensors(1, torch.device("cpu")).visible[0].tolist()
    lines = [
        f"{name:<{width}}  " + " ".join("■" if s else "·" for s in row)
        for name, row in zip(names, visible, strict=True)
    ]
    return "\n".join(lines)
