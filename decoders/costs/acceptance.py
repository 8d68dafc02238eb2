"""Acceptance rates of draft tokens, by drafter, depth, rank and grade. A set of drafters is an integer with one bit per drafter.

A row writes the same tokens whatever its drafts are. So every draft, verified or not, is compared with these tokens. Trying a drafter
costs drafting time, but no forward pass.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

#: Each judged draft token (compared with the output) multiplies the weights of earlier tokens of its :data:`Kind` by `KEEP`: a weight
#: halves in about four tokens. From depth `DEEPEST` on the factor is `KEEP_DEEPEST`: there one draft can have many tokens of a kind.
KEEP, KEEP_DEEPEST = 0.85, 0.98
#: The prior acceptance rate of a first token, ``PRIOR``, weighs as much as ``PRIOR_WEIGHT`` judged tokens. A low prior does no harm,
#: because judging drafts is free.
PRIOR_WEIGHT, PRIOR = 2.0, 0.3
#: Greater depths and ranks are clipped to these values.
DEEPEST, LOWEST_RANK = 4, 3
#: A drafter's declared rates (`Strategy.grade_rates`) weigh as much as this many judged tokens.
GRADES_WEIGHT = 4.0
#: Weight of the newest step in a row's outlook (:attr:`Follower.outlook`).
OUTLOOK_WEIGHT = 1 / 8

#: A node is verified if the number of tokens that it is expected to add is at least CAUTION times the number of tokens that the call
#: writes in the time of verifying a node. The margin is needed, because nodes with too high estimates are more likely to be
#: chosen.
CAUTION = 1.15

#: The kind of a draft token: the bits of the drafters that propose it, its depth, its rank among its siblings, and its grade (a number
#: that a drafter gives a token to say how sure it is). In place of the bits, the negative of one drafter's bit stands for all tokens
#: of this drafter, also those that other drafters propose. The grade WHICHEVER stands for all grades.
Kind = tuple[int, int, int, int]
WHICHEVER = -1


class AcceptanceRates:
    """Estimates how probable it is that a draft token is right if its parent is, by :data:`Kind`. Recent tokens weigh more.

    Args:
        common: the rates of all rows, used as the prior of one row's rates; None if this object holds the rates of all rows.
        grade_rates: for each drafter's bit, the usual acceptance rate of its tokens by grade (:attr:`Strategy.grade_rates`). The prior
            of a graded token is this rate, times the number of right tokens so far divided by the number expected from these rates.
    """

    def __init__(
        self, common: AcceptanceRates | None = None, grade_rates: Mapping[int, Sequence[float]] | None = None
    ) -> None:
        self.common = common
        self.grade_rates = dict(grade_rates or {})
        self._hits: dict[Kind, float] = {}
        self._trials: dict[Kind, float] = {}
        self._graded_right: dict[int, float] = {}  # for each drafter: right graded tokens, recent ones weigh more
        self._graded_expected: dict[int, float] = {}  # for each drafter: declared rates, summed with the same weights

    def rate(self, sources: int, depth: int, rank: int = 0, grade: int = WHICHEVER) -> float:
        """The probability that a draft token is right if its parent is right. sources: bits of the drafters that propose the token."""
        return self._rate((sources, min(depth, DEEPEST), min(rank, LOWEST_RANK), grade))

    def rate_of(self, drafter: int, depth: int) -> float:
        """The acceptance rate of a drafter's best token at `depth`, also if other drafters propose it. drafter: the drafter's bit."""
        return self._rate((-drafter, min(depth, DEEPEST), 0, WHICHEVER))

    def learn(self, sources: int, depth: int, rank: int, grade: int, right: bool) -> None:
        """Updates the rates of a token's kind. right: whether the token was right, given that its parent was right."""
        depth, rank = min(depth, DEEPEST), min(rank, LOWEST_RANK)
        keep = KEEP if depth < DEEPEST else KEEP_DEEPEST
        kinds = [(sources, depth, rank, WHICHEVER)]
        if grade != WHICHEVER:
            kinds.append((sources, depth, rank, grade))
        kinds += [(-(1 << bit), depth, rank, WHICHEVER) for bit in range(sources.bit_length()) if sources >> bit & 1]
        for drafter, expected in self._declared(sources, rank, grade):
            self._graded_right[drafter] = KEEP_DEEPEST * self._graded_right.get(drafter, 0.0) + right
            self._graded_expected[drafter] = KEEP_DEEPEST * self._graded_expected.get(drafter, 0.0) + expected
        for kind in kinds:
            self._hits[kind] = keep * self._hits.get(kind, 0.0) + right
            self._trials[kind] = keep * self._trials.get(kind, 0.0) + 1
        if self.common is not None:
            self.common.learn(sources, depth, rank, grade, right)

    def _rate(self, kind: Kind) -> float:
        trials = self._trials.get(kind, 0.0)
        if trials > 6:  # enough trials: the prior is dropped
            return self._hits[kind] / trials
        return (self._hits.get(kind, 0.0) + PRIOR_WEIGHT * self._prior(kind)) / (trials + PRIOR_WEIGHT)

    def _prior(self, kind: Kind) -> float:
        if self.common is not None:
            return self.common._rate(kind)
        sources, depth, rank, grade = kind
        if grade != WHICHEVER:
            declared = [rate * self._correction(drafter) for drafter, rate in self._declared(sources, rank, grade)]
            return min(max(declared), 1.0) if declared else self._rate((sources, depth, rank, WHICHEVER))
        if depth > 1:
            return self._rate((sources, depth - 1, rank, WHICHEVER))
        if rank:
            return (1 - self._rate((sources, depth, 0, WHICHEVER))) / 2 ** (rank + 1)
        if sources < 0:
            return PRIOR
        single = [1 << bit for bit in range(sources.bit_length()) if sources >> bit & 1]
        return PRIOR if len(single) == 1 else max(self._rate((source, depth, rank, WHICHEVER)) for source in single)

    def _declared(self, sources: int, rank: int, grade: int) -> list[tuple[int, float]]:
        """Pairs ``(drafter, rate)`` for the drafters in `sources` that declare a rate for this grade. The rate falls with `rank`."""
        declared = []
        for drafter, rates in self.grade_rates.items():
            if sources & drafter and 0 <= grade < len(rates):
                rate = rates[grade]
                declared.append((drafter, min(rate, (1 - rate) / 2 ** (rank + 1)) if rank else rate))
        return declared

    def _correction(self, drafter: int) -> float:
        """The factor that corrects a drafter's declared rates: number of right tokens, divided by the number that the rates predict."""
        right, expected = self._graded_right.get(drafter, 0.0), self._graded_expected.get(drafter, 0.0)
        return (right + GRADES_WEIGHT) / (expected + GRADES_WEIGHT)


class Proposals:
    """The proposals of all drafters for a row, merged into a tree without duplicates. Each attribute has one entry per node.

    Attributes:
        tokens: tokens of the nodes; node 0 is the row's last token.
        parents, depths: parents and depths of the nodes.
        sources: bits of the drafters that propose the node.
        ranks: the best rank that a drafter gives the node among the node's siblings; 0 is the first.
        grades: the greatest grade (:data:`Kind`) that a drafter gives the node; -1 if no drafter grades it.
        children: the node's children: token → the child's index.
    """

    __slots__ = ("children", "depths", "grades", "parents", "ranks", "sources", "tokens")

    def __init__(self) -> None:
        self.tokens, self.parents, self.depths = [-1], [-1], [0]
        self.sources, self.ranks, self.grades = [0], [0], [WHICHEVER]
        self.children: list[dict[int, int]] = [{}]

    def __len__(self) -> int:
        return len(self.tokens)

    def add(
        self, source: int, tokens: Sequence[int], parents: Sequence[int], grades: Sequence[int] | None = None
    ) -> dict[int, int]:
        """Adds a drafter's tree.

        Args:
            source: the drafter's bit.
            tokens: tokens of the drafter's nodes 1, 2, …; -1 if the branch has ended before this node.
            parents: parents of nodes 0, 1, 2, …
            grades: for nodes 1, 2, …, how sure the drafter is: integers, 0 or more.

        Returns:
            for each node of the merged tree that this drafter proposes, the first index in `tokens` that became this node.
        """
        place = [0] + [-1] * len(tokens)
        siblings: dict[int, int] = {}
        origins: dict[int, int] = {}
        for node, token in enumerate(tokens, 1):
            parent = place[parents[node]]
            if token < 0 or parent < 0:
                continue
            grade = WHICHEVER if grades is None else grades[node - 1]
            rank = siblings.get(parent, 0)
            siblings[parent] = rank + 1
            known = self.children[parent].get(token)
            if known is None:
                known = self.children[parent][token] = len(self.tokens)
                self.tokens.append(token)
                self.parents.append(parent)
                self.depths.append(self.depths[parent] + 1)
                self.sources.append(source)
                self.ranks.append(rank)
                self.grades.append(grade)
                self.children.append({})
            else:
                self.sources[known] |= source
                self.ranks[known] = min(self.ranks[known], rank)
                self.grades[known] = max(self.grades[known], grade)
            place[node] = known
            origins.setdefault(known, node - 1)
        return origins

    def path(self, tokens: Sequence[int]) -> list[int]:
        """Follows `tokens` from the root, as far as they are in the tree. Returns, for each token found, the bits of its drafters."""
        node, sources = 0, []
        for token in tokens:
            child = self.children[node].get(token)
            if child is None:
                break
            sources.append(self.sources[child])
            node = child
        return sources

    def ranked(self, rates: AcceptanceRates, least: float = 0.01) -> list[tuple[float, int]]:
        """Returns ``(probability, node)``, likeliest first, for nodes whose whole path is right with a probability of at least `least`.

        Every node comes after its parent. The probabilities of siblings sum to at most their parent's, because at most one sibling is
        right.
        """
        likely = [1.0] + [0.0] * (len(self.tokens) - 1)
        ranked = []
        for node, children in enumerate(self.children):
            if not children or likely[node] < least:
                continue
            own = [
                rates.rate(self.sources[c], self.depths[c], self.ranks[c], self.grades[c]) for c in children.values()
            ]
            shares = max(sum(own), 1.0)
            for child, rate in zip(children.values(), own, strict=True):
                likely[child] = likely[node] * rate / shares
                if likely[child] >= least:
                    ranked.append((-likely[child], child))
        ranked.sort()  # ties: the smaller index first, so a parent before its child
        return [(-negative, node) for negative, node in ranked]


class Follower:
    """Compares the proposals for a row with the tokens that the row writes, and updates `rates`, the row's acceptance rates.

    Attributes:
        outlook: running mean of the expected number of right draft tokens per step.
    """

    def __init__(self, rates: AcceptanceRates) -> None:
        self.rates = rates
        self.outlook = 0.0
        self._expected = 0
        self._open: list[tuple[Proposals, int]] = []

    def write(self, token: int) -> int:
        """Compares the proposals with the row's next token. Returns the bits of the drafters that proposed this token."""
        still, right = [], 0
        for proposals, node in self._open:
            children = proposals.children[node]
            for text, child in children.items():
                sources = proposals.sources[child]
                self.rates.learn(
                    sources, proposals.depths[child], proposals.ranks[child], proposals.grades[child], text == token
                )
                right |= sources if text == token else 0
            if token in children and proposals.children[children[token]]:
                still.append((proposals, children[token]))
        self._open = still
        return right

    def expect(self, tokens: float) -> None:
        """Updates :attr:`outlook`. tokens: expected number of right draft tokens in this step."""
        self._expected += 1
        self.outlook += max(OUTLOOK_WEIGHT, 1 / self._expected) * (tokens - self.outlook)

    def follow(self, proposals: Proposals) -> None:
        """Starts to compare `proposals` with the row's next tokens. The proposals must continue the row's current text."""
        if len(proposals) > 1:
            self._open.append((proposals, 0))


#: A row is e times less likely to finish last than the longest row if it needs fewer steps by this share of the longest row's steps.
LAST_ROW_SPREAD = 1 / 8


def row_weights(tokens: Sequence[int], outlooks: Sequence[float]) -> list[float]:
    """The weight of each row's tokens, 1 on average: proportional to the probability that the row finishes last and so ends the call.

    Args:
        tokens: number of tokens that each row may still write.
        outlooks: expected number of right draft tokens per step of each row (:attr:`Follower.outlook`).
    """
    if not tokens:
        return []
    left = [count / (1 + outlook) for count, outlook in zip(tokens, outlooks, strict=True)]
    longest = max(left)
    spread = max(LAST_ROW_SPREAD * longest, 1.0)
    likely = [math.exp((steps - longest) / spread) for steps in left]
    return [share * len(left) / sum(likely) for share in likely]
