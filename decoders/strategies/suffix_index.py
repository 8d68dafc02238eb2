"""The trees of what followed the end of a text, and the texts of rows in which it is looked up."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

from ..text_memory import ChainedText
from .followed_text import FollowedText

#: Number of prompt tokens that are remembered in front of an output, so that its beginning can be found.
LEAD = 16


class DraftedNode(NamedTuple):
    """A node of a speculation tree. share: of its parent's occurrences that go on with it, 0 to 1. support: how many do."""

    token: int
    parent: int
    share: float
    support: int


def expand(continuations: Sequence[Sequence[int]], most: int, least: float) -> tuple[list[DraftedNode], float]:
    """The likeliest nodes of the tree that the continuations of a match form (the paper's greedy expansion), at most `most`.

    Args:
        continuations: what followed each occurrence, the latest first.
        least: probability below which nodes are left out.

    Returns:
        the nodes, each after its parent, nodes of the root with parent 0; and the score, the sum of their probabilities.
    """
    first = continuations[0][:most]
    if all(c[:most] == first for c in continuations[1:]):  # even for a single occurrence
        support = len(continuations)
        return [DraftedNode(token, at, 1.0, support) for at, token in enumerate(first)], float(len(first))
    nodes: list[DraftedNode] = []
    score = 0.0
    # Open nodes: probability, token, parent, share, the continuations that go through it, depth.
    waiting = _children(continuations, 0, 0, 1.0, least)
    while waiting and len(nodes) < most:
        best = max(range(len(waiting)), key=lambda i: waiting[i][0])  # ties go to the first
        probability, token, parent, share, through, depth = waiting.pop(best)
        nodes.append(DraftedNode(token, parent, share, len(through)))
        score += probability
        waiting += _children(through, depth, len(nodes), probability, least)
    return nodes, score


def path_first(nodes: Sequence[DraftedNode]) -> list[DraftedNode]:
    """The same tree with its likeliest path in front, each node in the slot of its own depth: there tokens have the bits of plain
    decoding, and need not be run again.

    Args:
        nodes: sorted so that the likelier come before their siblings, as :func:`expand` returns them.
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
    """The children of a node, the likeliest first, among equally likely ones the latest."""
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
    """The text of one row of a call, with its own occurrences."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(ChainedText())

    def output(self) -> array[int]:
        """The generated tokens with the end of the prompt; empty if nothing was generated."""
        text = self.index.tokens
        return text[max(self.prompt - LEAD, 0) :] if len(text) > self.prompt else array("i")
