"""Finds the tokens that processors keep, without sorting the vocabulary. It is used on CPUs, where Python reads values at no cost.

The result must equal the reference, :data:`~decoders.sampling.processors.OPERATIONS`. This file first selects the few tokens that may
be kept, then applies the reference's rules to these tokens. A token is unsure if rounding, or the order of equal scores (torch's sort
is not stable), decides whether the reference keeps it. If the result depends on an unsure token, the reference processes the row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .largest import first_largest, largest
from .processors import OPERATIONS, at_temperature

#: Number of largest scores tried first; in most steps they suffice.
FIRST = 64
#: Largest relative error of one float32 operation: half the distance from 1 to the next float32.
_ROUNDING = 2.0**-24
#: Number of float32 values in a vector register, and so of partial sums in torch's softmax; at least 4 on any CPU.
_LANES = {"AVX512": 16, "AVX2": 8}.get(torch.backends.cpu.get_cpu_capability(), 4)
NEVER = float("-inf")

#: Pairs of an operation's name and its value ``[]``. The operations are not in :data:`~decoders.sampling.processors.FIRST`.
Operations = list[tuple[str, Tensor]]


@dataclass(frozen=True)
class Selection:
    """The tokens of ``R`` rows that the operations keep or may keep.

    Attributes:
        scores: ``[R, K]`` float32, ``-inf`` for removed tokens.
        tokens: ``[R, K]`` int64, -1 in unused columns.
        unsure: ``[R, K]`` bool, tokens that the reference may keep or remove.
        open: ``[R]`` bool, rows that only the reference can decide.
    """

    scores: Tensor
    tokens: Tensor
    unsure: Tensor
    open: Tensor

    @property
    def settled(self) -> Tensor:
        """``[R]`` bool: the rows in which the reference certainly keeps the same tokens."""
        return ~(self.open | self.unsure.any(-1))

    def put(self, index: Tensor, better: Selection) -> Selection:
        """A copy in which the rows `index` ``[Q]`` are replaced by the ``Q`` rows of `better`."""
        width = max(self.scores.shape[1], better.scores.shape[1])

        def merged(name: str, fill: float) -> Tensor:
            own, new = getattr(self, name), getattr(better, name)
            own, new = (torch.nn.functional.pad(t, (0, width - t.shape[1]), value=fill) for t in (own, new))
            return own.index_copy(0, index, new)

        open_rows = self.open.index_copy(0, index, better.open)
        return Selection(merged("scores", NEVER), merged("tokens", -1), merged("unsure", False), open_rows)


def _sure(scores: Tensor, tokens: Tensor) -> Selection:
    unsure = torch.zeros_like(tokens, dtype=torch.bool)
    return Selection(scores, tokens, unsure, unsure.new_zeros(len(scores)))


def select(scores: Tensor, operations: Operations, at_least: int) -> Selection:
    """The tokens that the operations keep, given ``[R, V]`` scores. At least one operation must be other than ``temperature``.

    at_least: least number of columns ``K``; the size of the vocabulary if that is smaller.
    """
    first = next(i for i, (name, _) in enumerate(operations) if name != "temperature")
    scale, (name, value) = [value for _, value in operations[:first]], operations[first]
    if name in ("top_k", "large_top_k"):
        selection = _top_k_of(scores, scale, int(value), at_least)
    else:
        selection = _WHOLE[name](_scaled(scores, scale), value, at_least)
    for name, value in operations[first + 1 :]:
        if name == "temperature":
            selection = replace(selection, scores=at_temperature(selection.scores, value))
            continue
        unsettled = ~selection.settled
        selection = _AMONG[name](selection, value)
        selection = replace(selection, open=selection.open | unsettled)
    return selection


def by_reference(scores: Tensor, operations: Operations, at_least: int) -> Selection:
    """The result of :func:`select`, computed by the reference operations."""
    dense = scores.float()
    for name, value in operations:
        if name in ("top_k", "large_top_k"):  # the k-th largest score needs no full sort
            kth = largest(dense, min(max(int(value), 1), dense.shape[-1]))[0][:, -1:]
            dense = dense.masked_fill(dense < kth, NEVER)
        else:
            dense = OPERATIONS[name](dense, value)
    count = max(int((dense > NEVER).sum(-1).amax()), min(at_least, dense.shape[-1]))
    return _sure(*largest(dense, count))


def _scaled(scores: Tensor, scale: list[Tensor]) -> Tensor:
    scores = scores.float()
    for value in scale:
        scores = at_temperature(scores, value)
    return scores


def _top_k_of(scores: Tensor, scale: list[Tensor], k: int, at_least: int) -> Selection:
    """Selects all scores from the k-th largest up. Division by the temperature is monotone, so only selected scores are divided."""
    vocab = scores.shape[-1]
    k = min(max(k, 1), vocab)
    count = max(FIRST, at_least, k + k // 8 + 8)
    while True:
        values, tokens = largest(scores, count)
        values = _scaled(values, scale)
        kth = values[:, k - 1 : k]
        # If the last column equals the k-th score, tokens outside of the columns may equal it, too. Scores of -inf are never kept.
        if count >= vocab or bool(((values[:, -1:] < kth) | (kth == NEVER)).all()):
            return _sure(values.masked_fill(values < kth, NEVER), tokens)
        count *= 4


def _top_k(selection: Selection, value: Tensor) -> Selection:
    scores = selection.scores
    k = min(max(int(value), 1), scores.shape[1])
    return replace(selection, scores=scores.masked_fill(scores < scores.topk(k).values[:, -1:], NEVER))


def _enough(
    whole: Tensor, order: Tensor, probabilities: Tensor, wanted: float, at_least: int,
    decide: Callable[[Tensor, Tensor, Tensor, bool], Selection],
) -> Selection:  # fmt: skip
    """Selects among the tokens with the largest values in `order` ``[R, V]``: first among a few tokens, then among more tokens in rows
    that are still open (undecided).

    Args:
        wanted: total probability of tokens that suffice to decide a row.
        decide: returns the selection for some rows. It takes the rows' scores and tokens ``[Q, K]``, the rows' indices ``[Q, 1]``, and
            whether K is the whole vocabulary. Unused columns have the score ``-inf`` and the token -1.
    """
    vocab = whole.shape[-1]
    count = min(max(FIRST, at_least), vocab)
    tokens = largest(order, count)[1]
    index = torch.arange(len(whole))[:, None]
    selection = decide(whole[index, tokens], tokens, index, count == vocab)
    if count < vocab and bool(selection.open.any()):
        index = selection.open.nonzero()
        rows = [_first(order[row], probabilities[row], wanted) for row in index[:, 0].tolist()]
        tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)
        scores = whole[index, tokens.clamp(min=0)].masked_fill(tokens < 0, NEVER)
        selection = selection.put(index[:, 0], decide(scores, tokens, index, False))
    return selection


def _first(order: Tensor, probabilities: Tensor, wanted: float) -> Tensor:
    """The tokens ``[K]`` with the largest values in `order` ``[V]``, descending; their total probability is at least `wanted`."""
    bins = (order - order.amax()).mul_(32).add_(1023).clamp_(min=0).int()
    mass = torch.bincount(bins, weights=probabilities, minlength=1024)
    last = 1023 - int((mass.flip(0).cumsum(0) < wanted).sum())
    tokens = (bins >= last - 1).nonzero()[:, 0]  # with one more bin, tokens after the border are selected, too
    return tokens[order[tokens].argsort(descending=True)]


def _top_p_of(whole: Tensor, value: Tensor, at_least: int) -> Selection:
    vocab = whole.shape[-1]
    probabilities = whole.softmax(-1)
    # Sums row by row, because a float64 copy of all rows would not fit the processor's cache.
    total = torch.stack([row.sum(dtype=torch.float64) for row in probabilities])

    def decide(scores: Tensor, tokens: Tensor, index: Tensor, everything: bool) -> Selection:
        share = probabilities[index, tokens.clamp(min=0)].masked_fill(tokens < 0, 0).double() / total[index]
        return _nucleus(scores, tokens, share, 0 if everything else vocab, value)

    return _enough(whole, whole, probabilities, 1 - float(value) + 1e-4, at_least, decide)


def _top_p(selection: Selection, value: Tensor) -> Selection:
    ordered = selection.scores.sort(-1, descending=True)
    share = ordered.values.softmax(-1).double()
    share = share / share.sum(-1, keepdim=True)
    return _nucleus(ordered.values, selection.tokens.gather(1, ordered.indices), share, 0, value)


def _nucleus(scores: Tensor, tokens: Tensor, share: Tensor, outside: int, value: Tensor) -> Selection:
    """Selects the tokens that top_p keeps, given the largest scores ``[R, K]`` in descending order.

    The reference sums probabilities from the smallest score on, and drops tokens as long as the sum is at most ``value = 1 - p``. The
    sum up to a token is the total minus the probabilities of larger scores. Here these probabilities are known in double precision,
    except for the float32 sum S by which softmax divides. An addition has an error of at most 2^-24 of its result, and the r-th largest
    score is part of about r / lanes additions. So the relative error of S is at most 2^-24 (E[r] / lanes + a few), where E[r] is the
    mean rank under the probabilities. The ranks of the top K are known, and all other ranks are at most V.

    Args:
        share: ``[R, K]`` float64, probabilities.
        outside: upper bound of the rank of a token that is not among the K; 0 if there is none.
    """
    count = scores.shape[1]
    cumulative = share.cumsum(-1)
    up_to = 1 - (cumulative - share)  # total probability of the token and all tokens with smaller scores
    rank = torch.arange(1, count + 1, dtype=torch.float64)
    mean_rank = (share * rank).sum(-1, keepdim=True) + (1 - cumulative[:, -1:]).clamp(min=0) * outside
    limit = value.double()
    # 16 covers the addition of the lanes, the rounding of probabilities here and in the reference, and the reference's running sum.
    margin = limit * _ROUNDING * (mean_rank / _LANES + 16) + 1e-12
    certain, dropped = up_to > limit + margin, up_to <= limit - margin
    certain[:, 0], dropped[:, 0] = True, False  # the best token is always kept
    unsure = ~certain & ~dropped
    left_open = torch.zeros(len(scores), dtype=torch.bool)
    if outside:
        left_open = ~dropped[:, -1]
    # If equal scores lie on both sides of a border, the reference's sort decides which of them are dropped. There are two borders: the
    # last certain token, and the last token that is not dropped.
    ends = certain.sum(-1, keepdim=True).clamp(max=count - 1), (~dropped).sum(-1, keepdim=True) - 1
    for border in [scores.gather(1, end) for end in ends]:
        equal = (scores == border) & (border > NEVER)
        split = (equal & ~certain).any(-1, keepdim=True) & (equal & ~dropped).any(-1, keepdim=True)
        unsure = unsure | (equal & split)
        if outside:
            left_open = left_open | (split & equal[:, -1:])[:, 0]  # equal scores may be outside of the selection
    scores = scores.masked_fill(dropped & ~unsure, NEVER)
    return Selection(scores, tokens, unsure & (scores > NEVER), left_open)


def _min_p_of(whole: Tensor, value: Tensor, at_least: int) -> Selection:
    # Compares all tokens as the reference does, and sorts only the kept tokens.
    vocab = whole.shape[-1]
    probabilities = whole.softmax(-1)
    limit = value * probabilities.amax(-1, keepdim=True)
    dropped = probabilities < limit
    dropped.scatter_(1, first_largest(whole)[:, None], False)
    count = vocab - int(dropped.sum(-1).amin())
    values, tokens = largest(whole, max(count, min(at_least, vocab)))
    return _sure(values.masked_fill(dropped.gather(1, tokens), NEVER), tokens)


def _min_p(selection: Selection, value: Tensor) -> Selection:
    scores = selection.scores
    probabilities = scores.softmax(-1)
    limit = value * probabilities.amax(-1, keepdim=True)
    best = torch.zeros_like(scores, dtype=torch.bool).scatter(1, scores.argmax(-1, keepdim=True), True)
    above = (probabilities >= limit) | best
    # Both sides of the comparison are divided by the same sum, here and in the reference, so only the quotients' rounding can differ.
    close = ((probabilities - limit).abs() <= 1e-6 * limit) & ~best & (scores > NEVER)
    return replace(selection, scores=scores.masked_fill(~(above | close), NEVER), unsure=selection.unsure | close)


def _typical_p_of(whole: Tensor, value: Tensor, at_least: int) -> Selection:
    vocab = whole.shape[-1]
    logp = whole.log_softmax(-1)
    probabilities = logp.exp()
    entropy = -(logp * probabilities).nansum(-1, keepdim=True)
    near = (-logp - entropy).abs().neg()  # computed as in the reference

    def decide(scores: Tensor, tokens: Tensor, index: Tensor, everything: bool) -> Selection:
        share = probabilities[index, tokens.clamp(min=0)].masked_fill(tokens < 0, 0).double()
        # In the worst case the largest probability comes first, and every addition has an error of up to 2^-24 of the total.
        margin = value.double() * _ROUNDING * (2 * vocab / _LANES + 64)
        surprise = -near[index, tokens.clamp(min=0)].masked_fill(tokens < 0, NEVER)
        return _typical(scores, tokens, surprise, torch.zeros(1), share, margin, everything, value)

    return _enough(whole, near, probabilities, float(value) + 2e-3, at_least, decide)


def _typical_p(selection: Selection, value: Tensor) -> Selection:
    logp = selection.scores.double().log_softmax(-1)
    share = logp.exp()
    finite = logp.masked_fill(share == 0, 0)
    entropy = -(finite * share).sum(-1, keepdim=True)
    surprise, order = (-logp - entropy).abs().sort(-1)
    # The reference computes surprises in float32, so surprises that differ by less than this may be in another order there.
    blur = 2.0**-16 * (1 + finite.abs().amax(-1, keepdim=True))
    margin = value.double() * _ROUNDING * (surprise.shape[1] + 64)
    scores, tokens = selection.scores.gather(1, order), selection.tokens.gather(1, order)
    return _typical(scores, tokens, surprise, blur, share.gather(1, order), margin, True, value)


def _typical(
    scores: Tensor, tokens: Tensor, surprise: Tensor, blur: Tensor, share: Tensor, margin: Tensor, everything: bool,
    value: Tensor,
) -> Selection:  # fmt: skip
    """Selects the tokens that typical_p keeps, from tokens ``[R, K]`` in ascending order of `surprise`. The border is the first token
    at which the running sum of probabilities reaches `value`. All tokens up to the border, and all equally surprising tokens, are kept.

    Args:
        surprise: ``[R, K]``, ``abs(-log(p) - entropy)`` of each token, with an error of at most `blur` ``[R, 1]``.
        share: ``[R, K]`` float64 probabilities; their sums have an error of at most `margin`.
        everything: whether the K tokens include every token that may be kept.
    """
    count = scores.shape[1]
    mass, limit = share.cumsum(-1), value.double()
    # The index of the border token lies between `first` and `last`.
    first, last = ((mass < bound).sum(-1, keepdim=True) for bound in (limit - margin, limit + margin))
    low, high = (surprise.gather(1, index.clamp(max=count - 1)) for index in (first, last))
    alone = ~(((surprise - low).abs() <= 2 * blur) & (surprise != low)).any(-1, keepdim=True)
    sure = (surprise <= low - 2 * blur) | (alone & (surprise <= low))
    possible = surprise <= high + 2 * blur
    sure[:, 0] = possible[:, 0] = True
    left_open = torch.zeros(len(scores), dtype=torch.bool)
    if not everything:
        left_open = (last >= count)[:, 0] | possible[:, -1]
    scores = scores.masked_fill(~possible, NEVER)
    return Selection(scores, tokens, ~sure & (scores > NEVER), left_open)


_WHOLE = {"top_p": _top_p_of, "min_p": _min_p_of, "typical_p": _typical_p_of}
_AMONG = {"top_k": _top_k, "large_top_k": _top_k, "top_p": _top_p, "min_p": _min_p, "typical_p": _typical_p}
