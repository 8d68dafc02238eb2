"""The matrix of token recycling: of every token the successors that the target thought likely when it was last verified.

``[V + 1, k + 1]`` int32 for a vocabulary of ``V``: the ``k`` likeliest, best first, -1 where there are none, and their grade. The
last row is that of no token, and knows nothing. Filling a tree and learning are there twice: for tensors of any device, and for
values that Python may look at, where few operations cost less than fast ones: after a pass nothing else is in a processor's caches.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from ..sampling import largest

#: Grades: how far the target preferred the best successor to the second, in whole units of its logits up to this one; and that of
#: successors that the target was not asked about, but that followed in the prompt.
SUREST, FOLLOWED = 3, 4

#: Of a tree, level by level: which nodes of the level before its nodes continue, and with which rank, int64.
Levels = list[tuple[Tensor, Tensor]]


def fill(matrix: Tensor, last: Tensor, levels: Levels, parents: Tensor) -> tuple[Tensor, Tensor]:
    """The tree's draft tokens, level by level, -1 where nothing is known of a parent, and their grades, both ``[B, N-1]`` int64.

    Args:
        last: ``[B, 1]`` int64, the rows' last tokens.
        parents: ``[N-1]`` int64, of the draft tokens.
    """
    tokens, level = [last], last
    for above, ranks in levels:
        level = matrix[level[:, above], ranks].long()  # what continues no token, -1, is in the last row: none
        tokens.append(level)
    nodes = torch.cat(tokens, 1)
    return nodes[:, 1:], matrix[nodes[:, parents], -1].long()


def filled(
    matrix: Tensor, last: Sequence[int], parents: Sequence[int], ranks: Sequence[int]
) -> tuple[list[list[int]], list[list[int]]]:
    """What :func:`fill` gives, on the host.

    Args:
        parents, ranks: of the draft tokens.
    """
    successors = matrix.numpy()
    all_tokens, all_grades = [], []
    for root in last:
        rows: dict[int, list[int]] = {}
        nodes, grades = [root], []
        for parent, rank in zip(parents, ranks, strict=True):
            token = nodes[parent]
            if token not in rows:
                rows[token] = successors[token].tolist()
            nodes.append(rows[token][rank])
            grades.append(rows[token][-1])
        all_tokens.append(nodes[1:])
        all_grades.append(grades)
    return all_tokens, all_grades


def learn(matrix: Tensor, nodes: Tensor, logits: Tensor, worth: Tensor) -> None:
    """Writes the likeliest successors of all `nodes` into `matrix`, in place.

    Where a token is there more than once, the node that is worth most counts, of equal ones the last: one writer per row of the
    matrix, so that every device writes the same.

    Args:
        nodes: ``[B, N]`` int64, -1 where there is none.
        logits: ``[B, N, V]``.
        worth: ``[B, N]`` int64.
    """
    tokens = nodes.flatten()
    scores, k = logits.flatten(0, 1), matrix.shape[1] - 1
    values, best = (largest if scores.device.type == "cpu" else torch.topk)(scores, max(k, 2))
    margin = values[:, :1] - values[:, 1:2]
    grade = torch.where(margin > 0, margin, 0).clamp(max=SUREST)  # nor is the difference of two infinities one
    place = torch.arange(len(tokens), device=tokens.device)
    order = worth.flatten() * len(tokens) + place
    beaten = ((tokens[:, None] == tokens) & (order[:, None] < order)).any(1)
    nothing = matrix.shape[0] - 1
    rows = torch.where(beaten | (tokens < 0), nothing, tokens)
    learnt = torch.where((rows == nothing)[:, None], -1, torch.cat([best[:, :k], grade.long()], 1)).int()
    matrix.index_put_((rows,), learnt)  # all that is beaten writes the same into the row of no token


def learn_listed(matrix: Tensor, nodes: Sequence[tuple[int, int, int]], logits: Tensor) -> None:
    """What :func:`learn` does, on the host.

    Args:
        nodes: ``(worth, place, token)`` of those that there are, `place` that of its logits.
        logits: ``[R, V]``.
    """
    if not nodes:
        return
    places = {token: place for _, place, token in sorted(nodes)}
    k, shown = matrix.shape[1] - 1, max(places.values()) + 1
    values, best = (part.tolist() for part in largest(logits[:shown], max(k, 2)))
    successors = matrix.numpy()
    for token, place in places.items():
        margin = max(0.0, values[place][0] - values[place][1])
        successors[token] = [*best[place][:k], int(min(margin, SUREST))]


def follow(matrix: Tensor, texts: list[list[int]], lengths: list[int]) -> None:
    """Gives the tokens of `texts` of which nothing is known the last different ones that followed them, the latest first."""
    successors: dict[int, dict[int, None]] = {}
    for text, length in zip(texts, lengths, strict=True):
        for token, successor in itertools.pairwise(text[:length]):
            known = successors.setdefault(token, {})
            known.pop(successor, None)
            known[successor] = None
    if not successors:
        return
    k = matrix.shape[1] - 1
    latest = [[*(list(reversed(known)) + [-1] * k)[:k], FOLLOWED] for known in successors.values()]
    rows = torch.tensor(list(successors), device=matrix.device)
    values = torch.tensor(latest, dtype=torch.int32, device=matrix.device)
    present = matrix[rows]
    matrix[rows] = torch.where(present[:, :1] < 0, values, present)
