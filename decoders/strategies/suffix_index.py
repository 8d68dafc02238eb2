"""Texts in which the earlier occurrences of a suffix are found: chains of equal n-grams, as compressors of the LZ77 family have them.

A suffix tree answers the same questions, and takes time and memory of its depth for every token. A chain costs a token one
entry of a dictionary per length of n-gram; how much longer than the n-gram a match is comes from comparing the texts themselves.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

#: Lengths of the n-grams that are chained, the longest first. What matches the longest is not looked up by the others.
ORDERS = (4, 2, 1)
#: Bits of a token in a key.
BITS = 22

_MASKS = tuple((1 << BITS * order) - 1 for order in ORDERS)


class Occurrence(NamedTuple):
    """A place where the suffix was met before. end: index of its last token. length: how many tokens match, in tokens."""

    length: int
    end: int


class ChainedText:
    """A text that grows and shrinks at its end, with the n-grams of every length in :data:`ORDERS` chained, the latest first.

    Attributes:
        tokens: the text. Negative ones separate texts: no n-gram goes across.
    """

    __slots__ = ("_chains", "_heads", "_key", "_run", "tokens")

    def __init__(self) -> None:
        self.tokens = array("i")
        self._heads: tuple[dict[int, int], ...] = tuple({} for _ in ORDERS)
        self._chains = tuple(array("i") for _ in ORDERS)
        self._key, self._run = 0, 0  # of the last tokens, and how many of them belong to one text

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Adds tokens at the end; about a microsecond for each."""
        key, run, position = self._key, self._run, len(self.tokens)
        text = self.tokens
        parts = tuple(zip(ORDERS, _MASKS, self._heads, self._chains, strict=True))
        for token in tokens:
            text.append(token)
            if token < 0:
                key = run = 0
            else:
                key, run = (key << BITS | token) & _MASKS[0], run + 1
            for order, mask, heads, chain in parts:
                if run < order:
                    chain.append(-1)
                else:
                    gram = key & mask
                    chain.append(heads.get(gram, -1))
                    heads[gram] = position
            position += 1
        self._key, self._run = key, run

    def truncate(self, length: int) -> None:
        """Takes back what was added behind the first `length` tokens."""
        text = self.tokens
        while len(text) > length:
            for order, mask, heads, chain in zip(ORDERS, _MASKS, self._heads, self._chains, strict=True):
                earlier = chain.pop()
                if self._run >= order:
                    if earlier < 0:
                        del heads[self._key & mask]
                    else:
                        heads[self._key & mask] = earlier
            text.pop()
            self._restore()

    def _restore(self) -> None:
        """Key and run of the present end."""
        key = run = 0
        for token in self.tokens[-ORDERS[0] :]:
            if token < 0:
                key = run = 0
            else:
                key, run = key << BITS | token, run + 1
        self._key, self._run = key, run

    def occurrences(self, suffix: array[int], most: int, before: int) -> list[Occurrence]:
        """Where the longest n-gram that ends `suffix` was met, at most `most` times, the latest first.

        Args:
            suffix: the text looked up, its last tokens; no match is longer.
            before: only occurrences that end before this index count.
        """
        text = self.tokens
        occurrences: list[Occurrence] = []
        for order, heads, chain in zip(ORDERS, self._heads, self._chains, strict=True):
            if len(suffix) < order:
                continue
            key = 0
            for token in suffix[-order:]:
                key = key << BITS | token
            end = heads.get(key, -1)
            while end >= before:
                end = chain[end]
            while end >= 0 and len(occurrences) < most:
                occurrences.append(Occurrence(_matching(text, end, suffix, order), end))
                end = chain[end]
            if occurrences:
                break
        return occurrences


def _matching(text: array[int], end: int, suffix: array[int], known: int) -> int:
    """How many tokens of `text` up to `end` equal the end of `suffix`, of which the last `known` do."""
    length, longest = known, min(len(suffix), end + 1)
    if longest > length and text[end - length] != suffix[-length - 1]:
        return length  # the usual case
    if text[end + 1 - longest : end + 1] == suffix[len(suffix) - longest :]:
        return longest  # the usual case of long ones
    # Halves of what is left: comparing slices is faster than going token by token.
    while longest - length > 1:
        middle = (length + longest) // 2
        if text[end + 1 - middle : end + 1 - length] == suffix[len(suffix) - middle : len(suffix) - length]:
            length = middle
        else:
            longest = middle
    return length


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
    if all(c[:most] == first for c in continuations[1:]):  # also where there is one alone
        support = len(continuations)
        return [DraftedNode(token, at, 1.0, support) for at, token in enumerate(first)], float(len(first))
    nodes: list[DraftedNode] = []
    score = 0.0
    # Open nodes: probability, token, parent, share, the continuations that go through it, depth.
    waiting = _children(continuations, 0, 0, 1.0, least)
    while waiting and len(nodes) < most:
        best = max(range(len(waiting)), key=lambda i: waiting[i][0])  # the first of equal ones
        probability, token, parent, share, through, depth = waiting.pop(best)
        nodes.append(DraftedNode(token, parent, share, len(through)))
        score += probability
        waiting += _children(through, depth, len(nodes), probability, least)
    return nodes, score


def path_first(nodes: Sequence[DraftedNode]) -> list[DraftedNode]:
    """The same tree with its likeliest path in front, each node in the slot of its own depth: there tokens have the bits of plain
    decoding, and need not be run again.

    Args:
        nodes: the likelier before their siblings, as :func:`expand` gives them.
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
    """The nodes that continue one node, the likeliest first, of equal ones the latest."""
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
