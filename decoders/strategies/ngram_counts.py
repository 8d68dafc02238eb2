"""Counts of the n-grams of one text on the host, updated as the text grows, for :mod:`.ngram` on a CPU."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

#: Stupid back-off: for each token by which a follower's context is shorter than the longest context, its score is multiplied by this.
BACK_OFF = 0.4
#: Number of binary places of a score that are compared. Further places may differ by rounding.
SCORE_BITS = 40


class _Followers:
    """The followers of one context.

    Attributes:
        slots: for each token that followed the context, the token's positions in the text, in ascending order.
        total: number of positions of all tokens together.
        most: largest number of positions that one token has had so far, an upper bound after :meth:`NgramCounts.truncate`.
    """

    __slots__ = ("most", "slots", "total")

    def __init__(self) -> None:
        self.slots: dict[int, list[int]] = {}
        self.total = self.most = 0


class RankedFollower(NamedTuple):
    """A token and the longest context that it followed. Ranked followers are compared by `score`, then by `slot`.

    Attributes:
        score: the token's score, in units of ``2 ** -SCORE_BITS``.
        slot: the last position in the text at which the token followed this context.
        token: the token's id.
        order: number of tokens in this context.
    """

    score: int
    slot: int
    token: int
    order: int


class NgramCounts:
    """A text that grows and shrinks at its end, with the followers of each context of up to ``max_ngram - 1`` tokens.

    Adding a token takes about a microsecond per length of n-grams; finding a draft token takes tens of microseconds.

    Attributes:
        tokens: the text.
    """

    __slots__ = ("_by_count", "_orders", "tokens")

    def __init__(self, max_ngram: int) -> None:
        self.tokens = array("i")
        self._orders: list[dict[tuple[int, ...], _Followers]] = [{} for _ in range(max_ngram)]
        # For each number of occurrences, the tokens that occur so often, the latest token last. None if `truncate` made it outdated.
        self._by_count: dict[int, dict[int, None]] | None = {}

    def extend(self, tokens: Iterable[int]) -> None:
        """Adds tokens at the end."""
        text, orders = self.tokens, self._orders
        longest = len(orders) - 1
        context = tuple(text[len(text) - longest :]) if longest else ()
        for token in tokens:
            slot, known = len(text), len(context)
            for order in range(known + 1):
                key = context[known - order :]
                followers = orders[order].get(key)
                if followers is None:
                    followers = orders[order][key] = _Followers()
                slots = followers.slots.setdefault(token, [])
                slots.append(slot)
                followers.total += 1
                followers.most = max(followers.most, len(slots))
                if not order:
                    self._note(token, len(slots))
            text.append(token)
            context = (*context, token)[-longest:] if longest else ()

    def truncate(self, length: int) -> None:
        """Keeps the first `length` tokens, and removes all others."""
        text = self.tokens
        while len(text) > length:
            token = text.pop()
            for order in range(min(len(self._orders) - 1, len(text)) + 1):
                key = tuple(text[len(text) - order :])
                followers = self._orders[order][key]
                slots = followers.slots[token]
                slots.pop()
                followers.total -= 1
                if not slots:
                    del followers.slots[token]
                if not followers.total:
                    del self._orders[order][key]
            self._by_count = None

    def spine(self, widths: Sequence[int]) -> tuple[list[int], list[int]]:
        """The likeliest followers at each depth, and their n-gram orders: the results of :func:`~.ngram.mini_tree`, as lists."""
        longest = len(self._orders) - 1
        context = tuple(self.tokens[len(self.tokens) - longest :]) if longest else ()
        first: list[tuple[int, int]] = []
        others: list[tuple[int, int]] = []
        for width in widths:
            best = [(follower.token, follower.order) for follower in self.followers(context, width)]
            best += [(-1, 0)] * (width - len(best))
            first.append(best[0])
            others += best[1:]
            if longest and best[0][0] >= 0:
                context = (*context, best[0][0])[-longest:]
        tokens, orders = zip(*first, *others, strict=True)
        return list(tokens), list(orders)

    def followers(self, context: tuple[int, ...], width: int) -> list[RankedFollower]:
        """The likeliest followers of a context, at most `width`, best first.

        A follower is scored by the longest suffix of `context` that it followed. Its score is its share of this suffix's followers,
        times :data:`BACK_OFF` for each token by which the suffix is shorter than ``max_ngram - 1`` tokens. Among equal scores, the
        follower that came latest in the text is first.
        """
        longest = len(self._orders) - 1
        best: list[RankedFollower] = []
        longer: list[_Followers] = []
        for order in range(len(context), 0, -1):
            followers = self._orders[order].get(context[len(context) - order :])
            if followers is None:
                continue
            # No follower of this context can score more than the context's most frequent follower.
            if len(best) < width or _score(followers.most, followers.total, longest - order) >= best[-1].score:
                for token, slots in followers.slots.items():
                    if not any(token in other.slots for other in longer):
                        best.append(
                            RankedFollower(
                                _score(len(slots), followers.total, longest - order), slots[-1], token, order
                            )
                        )
                best.sort(reverse=True)
                del best[width:]
            longer.append(followers)
        for token in self._by_frequency():
            if any(token in other.slots for other in longer):
                continue
            slots = self._orders[0][()].slots[token]
            follower = RankedFollower(_score(len(slots), len(self.tokens), longest), slots[-1], token, 0)
            if len(best) == width and follower < best[-1]:
                break
            best.append(follower)
            best.sort(reverse=True)
            del best[width:]
        return best

    def _note(self, token: int, count: int) -> None:
        """Updates `_by_count` after the `count`-th occurrence of `token`."""
        if self._by_count is None:
            return
        if count > 1:
            before = self._by_count[count - 1]
            del before[token]
            if not before:
                del self._by_count[count - 1]
        self._by_count.setdefault(count, {})[token] = None

    def _by_frequency(self) -> Iterator[int]:
        """All tokens of the text, the most frequent first; among equally frequent tokens the latest first."""
        if self._by_count is None:
            self._by_count = {}
            slots = self._orders[0][()].slots if self.tokens else {}
            for token in sorted(slots, key=lambda token: slots[token][-1]):
                self._by_count.setdefault(len(slots[token]), {})[token] = None
        for count in sorted(self._by_count, reverse=True):
            yield from reversed(self._by_count[count])


def _score(count: int, total: int, back: int) -> int:
    """``count / total * BACK_OFF**back`` in units of ``2**-SCORE_BITS``, rounded down. :mod:`.ngram` computes the same on tensors."""
    score = count / total
    for _ in range(back):
        score = BACK_OFF * score
    return int(score * 2.0**SCORE_BITS)
