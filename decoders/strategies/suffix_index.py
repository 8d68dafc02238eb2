"""Parts of suffix decoding: the indexed text of a row, and draft trees of the tokens that followed earlier occurrences."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

from ..text_memory import ChainedText
from .followed_text import FollowedText

#: An output is remembered together with the last LEAD tokens of its prompt. If a later prompt ends with these tokens, its first draft
#: is the beginning of the output.
LEAD = 16


class DraftedNode(NamedTuple):
    """A node of a draft tree.

    Attributes:
        share: share of the parent's occurrences that continue with this token, 0 to 1.
        support: number of occurrences that continue with this token.
    """

    token: int
    parent: int
    share: float
    support: int


def expand(continuations: Sequence[Sequence[int]], most: int, least: float) -> tuple[list[DraftedNode], float]:
    """Builds the tree of a match's continuations by greedy expansion, as in the paper, with at most `most` nodes.

    Args:
        continuations: for each occurrence of the match, the tokens that followed it; the latest occurrence first.
        least: probability below which nodes are left out.

    Returns:
        the likeliest nodes, each after its parent (0 is the root); and the tree's score, the sum of its nodes' probabilities.
    """
    first = continuations[0][:most]
    if all(c[:most] == first for c in continuations[1:]):  # true for a single occurrence, too
        support = len(continuations)
        return [DraftedNode(token, at, 1.0, support) for at, token in enumerate(first)], float(len(first))
    nodes: list[DraftedNode] = []
    score = 0.0
    # Nodes that can be added next, as (probability, token, parent, share, the continuations through the node, depth).
    waiting = _children(continuations, 0, 0, 1.0, least)
    while waiting and len(nodes) < most:
        best = max(range(len(waiting)), key=lambda i: waiting[i][0])  # ties go to the first
        probability, token, parent, share, through, depth = waiting.pop(best)
        nodes.append(DraftedNode(token, parent, share, len(through)))
        score += probability
        waiting += _children(through, depth, len(nodes), probability, least)
    return nodes, score


def path_first(nodes: Sequence[DraftedNode]) -> list[DraftedNode]:
    """Reorders the tree `nodes` so that its likeliest path comes first.

    Each token of the path then has the cache slot that plain decoding would give it, so its keys and values have the same bits as in
    plain decoding. If the token is accepted, the target need not run it again.

    Args:
        nodes: from :func:`expand`, so that the likeliest node comes before its siblings.
    """
    path = [0]
    for number, node in enumerate(nodes, 1):
        if node.parent == path[-1]:
            path.append(number)
    order = [*path, *sorted(set(range(len(nodes) + 1)) - set(path))]
    place = {number: index for index, number in enumerate(order)}
    return [nodes[number - 1]._replace(parent=place[nodes[number - 1].parent]) for number in order[1:]]


_Open = tuple[float, int, int, float, Sequence[Sequence[int]], int]


def _children(
    continuations: Sequence[Sequence[int]], depth: int, parent: int, probability: float, least: float
) -> list[_Open]:
    """A node's children, the likeliest first, among equally likely children the latest first. The tuples are for :func:`expand`."""
    groups: dict[int, list[Sequence[int]]] = {}
    for continuation in continuations:
        if len(continuation) > depth:
            groups.setdefault(continuation[depth], []).append(continuation)
    count = len(continuations)
    children: list[_Open] = [
        (probability * len(through) / count, token, parent, len(through) / count, through, depth + 1)
        for token, through in groups.items()
        if probability * len(through) >= least * count
    ]
    children.sort(key=lambda child: -child[0])
    return children


class RowText(FollowedText[ChainedText]):
    """The text of one row, with an index of its n-grams."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(ChainedText())

    def output(self) -> array[int]:
        """The last :data:`LEAD` tokens of the prompt, followed by the generated tokens. Empty if nothing was generated."""
        text = self.index.tokens
        return text[max(self.prompt - LEAD, 0) :] if len(text) > self.prompt else array("i")
