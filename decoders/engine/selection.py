"""Which tokens the processors keep, found without sorting the vocabulary: for devices that Python may read at no cost.

The functions of :data:`~decoders.engine.sampling.OPERATIONS` say what is kept. Here the few tokens that can be kept are
selected first and the same decisions are taken among them. A decision that hangs on how the reference rounds a sum, or on
the order in which its sort leaves equal scores (torch's is not stable), is not guessed: the token is marked as unsure,
and the reference decides about the row if anything comes to depend on it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .sampling import OPERATIONS

#: How many tokens are tried, one after the other, before a row goes to the reference.
SIZES = (64, 1024, 8192)
#: Tokens that share one maximum in the search for the largest.
BLOCK = 64
#: Half the distance from 1 to the next float32: the largest relative error of one operation.
_ROUNDING = 2.0**-24
#: float32 numbers that a vector register holds: as many partial sums softmax adds up. 4 is the least of any CPU.
_LANES = {"AVX512": 16, "AVX2": 8}.get(torch.backends.cpu.get_cpu_capability(), 4)
NEVER = float("-inf")

#: Names out of :data:`OPERATIONS`, but for ``min_new_tokens``, with their values ``[]``.
Operations = list[tuple[str, Tensor]]


@dataclass(frozen=True)
class Selection:
    """Tokens of ``R`` rows that are kept, or may be.

    Attributes:
        scores: ``[R, K]`` float32, ``-inf`` for what is not kept.
        tokens: ``[R, K]`` int64, -1 in columns that a row does not use.
        unsure: ``[R, K]`` bool, tokens that are kept for all that is known.
        open: ``[R]`` bool, rows about which nothing is known: the reference has to decide.
    """

    scores: Tensor
    tokens: Tensor
    unsure: Tensor
    open: Tensor

    @property
    def settled(self) -> Tensor:
        """``[R]`` bool, whether the row is what the reference gives."""
        return ~(self.open | self.unsure.any(-1))

    def put(self, index: Tensor, better: Selection) -> Selection:
        """`self` with its rows `index` ``[Q]`` taken from `better`."""
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


def largest(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of every row of ``[R, V]``, in descending order, and their tokens: what ``topk`` gives.

    The `count` largest lie in the `count` blocks with the largest maxima, and maxima are taken at the speed of memory.
    """
    vocab = scores.shape[-1]
    blocks = vocab // BLOCK
    if 2 * count >= blocks:
        top = scores.topk(min(count, vocab))
        return top.values, top.indices
    blocked = scores[:, : blocks * BLOCK].unflatten(-1, (blocks, BLOCK))
    best = blocked.amax(-1).topk(count, sorted=False).indices  # [R, count]
    pool = blocked.gather(1, best[..., None].expand(-1, -1, BLOCK)).flatten(1)
    tokens = (best[..., None] * BLOCK + torch.arange(BLOCK)).flatten(1)
    rest = torch.arange(blocks * BLOCK, vocab).expand(len(scores), -1)
    pool, tokens = torch.cat([pool, scores[:, blocks * BLOCK :]], -1), torch.cat([tokens, rest], -1)
    top = pool.topk(count)
    return top.values, tokens.gather(1, top.indices)


def first_largest(scores: Tensor) -> Tensor:
    """``argmax`` over the last axis of ``[..., V]``: of equals the first."""
    vocab = scores.shape[-1]
    blocks = vocab // BLOCK
    if blocks < BLOCK:
        return scores.argmax(-1)
    blocked = scores[..., : blocks * BLOCK].unflatten(-1, (blocks, BLOCK))
    maxima = blocked.amax(-1)
    block = maxima.argmax(-1, keepdim=True)  # [..., 1]
    inside = blocked.gather(-2, block[..., None].expand(*block.shape, BLOCK))[..., 0, :]
    best = block[..., 0] * BLOCK + inside.argmax(-1)
    if blocks * BLOCK == vocab:
        return best
    rest = scores[..., blocks * BLOCK :]
    return torch.where(rest.amax(-1) > maxima.amax(-1), blocks * BLOCK + rest.argmax(-1), best)


def select(scores: Tensor, operations: Operations, at_least: int) -> Selection:
    """What the operations leave of ``[R, V]`` scores; at least one of them must truncate.

    Args:
        at_least: fewest columns ``K``, should there be as many tokens.
    """
    first = next(i for i, (name, _) in enumerate(operations) if name != "temperature")
    scale, (name, value) = [value for _, value in operations[:first]], operations[first]
    if name == "top_k":
        selection = _top_k_of(scores, scale, int(value), at_least)
    else:
        selection = _WHOLE[name](_scaled(scores, scale), value, at_least)
    for name, value in operations[first + 1 :]:
        if name == "temperature":
            selection = replace(selection, scores=selection.scores / value)
            continue
        unsettled = ~selection.settled
        selection = _AMONG[name](selection, value)
        selection = replace(selection, open=selection.open | unsettled)
    return selection


def by_reference(scores: Tensor, operations: Operations, at_least: int) -> Selection:
    """What :func:`select` finds, from the operations' own definitions."""
    dense = scores.float()
    for name, value in operations:
        dense = OPERATIONS[name](dense, value)
    count = max(int((dense > NEVER).sum(-1).amax()), min(at_least, dense.shape[-1]))
    return _sure(*largest(dense, count))


def _scaled(scores: Tensor, scale: list[Tensor]) -> Tensor:
    scores = scores.float()
    for value in scale:
        scores = scores / value
    return scores


def _top_k_of(scores: Tensor, scale: list[Tensor], k: int, at_least: int) -> Selection:
    """Everything that ties with the k-th is kept. Dividing is monotone, so it can follow the selection."""
    vocab = scores.shape[-1]
    k = min(max(k, 1), vocab)
    count = max(SIZES[0], at_least, k + k // 8 + 8)
    while True:
        values, tokens = largest(scores, count)
        values = _scaled(values, scale)
        kth = values[:, k - 1 : k]
        # A tie with the last column may go on outside; of -inf nothing is kept anyway.
        if count >= vocab or bool(((values[:, -1:] < kth) | (kth == NEVER)).all()):
            return _sure(values.masked_fill(values < kth, NEVER), tokens)
        count *= 4


def _top_k(selection: Selection, value: Tensor) -> Selection:
    scores = selection.scores
    k = min(max(int(value), 1), scores.shape[1])
    return replace(selection, scores=scores.masked_fill(scores < scores.topk(k).values[:, -1:], NEVER))


def _try_sizes(
    whole: Tensor, order: Tensor, at_least: int, decide: Callable[[Tensor, Tensor, Tensor, bool], Selection]
) -> Selection:
    """Decides among the first of `order` ``[R, V]``, larger ones first, and among more of them for rows left open.

    Args:
        decide: takes the scores ``[Q, K]`` and tokens of some rows, their index ``[Q]``, and whether that is all there is.
    """
    vocab = whole.shape[-1]
    index = torch.arange(len(whole))
    selection: Selection | None = None
    for size in SIZES:
        count = min(max(size, at_least), vocab)
        tokens = largest(order if selection is None else order[index], count)[1]
        decided = decide(whole[index[:, None], tokens], tokens, index, count == vocab)
        selection = decided if selection is None else selection.put(index, decided)
        index = selection.open.nonzero()[:, 0]
        if not len(index) or count == vocab:
            break
    assert selection is not None
    return selection


def _top_p_of(whole: Tensor, value: Tensor, at_least: int) -> Selection:
    vocab = whole.shape[-1]
    probabilities = whole.softmax(-1)
    # Row by row: casting all of it at once is memory that the cache does not hold.
    total = torch.stack([row.sum(dtype=torch.float64) for row in probabilities])

    def decide(scores: Tensor, tokens: Tensor, index: Tensor, everything: bool) -> Selection:
        share = probabilities[index[:, None], tokens].double() / total[index, None]
        return _nucleus(scores, tokens, share, 0 if everything else vocab, value)

    return _try_sizes(whole, whole, at_least, decide)


def _top_p(selection: Selection, value: Tensor) -> Selection:
    ordered = selection.scores.sort(-1, descending=True)
    share = ordered.values.softmax(-1).double()
    share = share / share.sum(-1, keepdim=True)
    return _nucleus(ordered.values, selection.tokens.gather(1, ordered.indices), share, 0, value)


def _nucleus(scores: Tensor, tokens: Tensor, share: Tensor, outside: int, value: Tensor) -> Selection:
    """What top_p keeps of the largest scores ``[R, K]``, descending.

    The reference adds up softmax from the smallest score on and drops what does not get beyond ``value = 1 - p``. Its sum
    up to a token is what all of them have less what the larger ones have, known here in double precision but for one
    factor: the float32 sum S that softmax divides by. An addition is off by at most 2^-24 of its result, and a score that
    is r-th from the top goes through about r / lanes of them; so S is off by at most 2^-24 (E[r] / lanes + a few), E[r]
    being the mean rank under the probabilities, of which the top K are known and the rest are at most V.

    Args:
        share: ``[R, K]`` float64, probabilities. outside: most tokens that may follow these.
    """
    count = scores.shape[1]
    cumulative = share.cumsum(-1)
    up_to = 1 - (cumulative - share)  # what it has with all that is smaller
    rank = torch.arange(1, count + 1, dtype=torch.float64)
    mean_rank = (share * rank).sum(-1, keepdim=True) + (1 - cumulative[:, -1:]).clamp(min=0) * outside
    limit = value.double()
    # The 16: adding up the lanes, rounding of the probabilities here and there, and of the reference's running sum.
    margin = limit * _ROUNDING * (mean_rank / _LANES + 16) + 1e-12
    kept, dropped = up_to > limit + margin, up_to <= limit - margin
    kept[:, 0], dropped[:, 0] = True, False  # the best stays
    unsure = ~kept & ~dropped
    left_open = torch.zeros(len(scores), dtype=torch.bool)
    if outside:
        left_open = ~dropped[:, -1]
    # Which of the equal scores at the border are dropped is for the reference's sort to say.
    border = scores.gather(1, (~dropped).sum(-1, keepdim=True) - 1)
    equal = scores == border
    split = (equal & dropped).any(-1, keepdim=True) & (border > NEVER)
    unsure = unsure | (equal & split)
    if outside:
        left_open = left_open | (split & equal[:, -1:])[:, 0]  # equals may go on outside
    scores = scores.masked_fill(dropped & ~unsure, NEVER)
    return Selection(scores, tokens, unsure & (scores > NEVER), left_open)


def _min_p_of(whole: Tensor, value: Tensor, at_least: int) -> Selection:
    probabilities = whole.softmax(-1)
    limit = value * probabilities.amax(-1, keepdim=True)

    def decide(scores: Tensor, tokens: Tensor, index: Tensor, everything: bool) -> Selection:
        own = probabilities[index[:, None], tokens]  # the reference's own numbers
        kept = own >= limit[index]
        kept[:, 0] = True
        # exp is monotone but for its last bits.
        more = own[:, -1] >= limit[index, 0] * (1 - 1e-5)
        return replace(_sure(scores.masked_fill(~kept, NEVER), tokens), open=more & (not everything))

    return _try_sizes(whole, whole, at_least, decide)


def _min_p(selection: Selection, value: Tensor) -> Selection:
    scores = selection.scores
    probabilities = scores.softmax(-1)
    limit = value * probabilities.amax(-1, keepdim=True)
    best = torch.zeros_like(scores, dtype=torch.bool).scatter(1, scores.argmax(-1, keepdim=True), True)
    kept = (probabilities >= limit) | best
    # Both sides are divided by one sum, here and there: what differs is how the quotients are rounded.
    close = ((probabilities - limit).abs() <= 1e-6 * limit) & ~best & (scores > NEVER)
    return replace(
        selection, scores=scores.masked_fill(~(kept | close), NEVER), unsure=selection.unsure | close
    )


def _typical_p_of(whole: Tensor, value: Tensor, at_least: int) -> Selection:
    vocab = whole.shape[-1]
    logp = whole.log_softmax(-1)
    probabilities = logp.exp()
    entropy = -(logp * probabilities).nansum(-1, keepdim=True)
    near = (-logp - entropy).abs().neg()  # the reference's own numbers

    def decide(scores: Tensor, tokens: Tensor, index: Tensor, everything: bool) -> Selection:
        share = probabilities[index[:, None], tokens].double()
        # The largest may come first in this order: then every addition is off by up to 2^-24 of the whole.
        margin = value.double() * _ROUNDING * (2 * vocab / _LANES + 64)
        surprise = -near[index[:, None], tokens]
        return _typical(scores, tokens, surprise, torch.zeros(1), share, margin, everything, value)

    return _try_sizes(whole, near, at_least, decide)


def _typical_p(selection: Selection, value: Tensor) -> Selection:
    logp = selection.scores.double().log_softmax(-1)
    share = logp.exp()
    finite = logp.masked_fill(share == 0, 0)
    entropy = -(finite * share).sum(-1, keepdim=True)
    surprise, order = (-logp - entropy).abs().sort(-1)
    # The reference's surprises are float32: two within this distance may stand in the other order there.
    blur = 2.0**-16 * (1 + finite.abs().amax(-1, keepdim=True))
    margin = value.double() * _ROUNDING * (surprise.shape[1] + 64)
    scores, tokens = selection.scores.gather(1, order), selection.tokens.gather(1, order)
    return _typical(scores, tokens, surprise, blur, share.gather(1, order), margin, True, value)


def _typical(
    scores: Tensor, tokens: Tensor, surprise: Tensor, blur: Tensor, share: Tensor, margin: Tensor, everything: bool,
    value: Tensor,
) -> Selection:  # fmt: skip
    """What typical_p keeps of the least surprising ``[R, K]``, ascending.

    Kept is what surprises no more than the token whose probability brings the sum to `value`.

    Args:
        surprise: ``[R, K]``, off by at most `blur` ``[R, 1]``. share: ``[R, K]`` float64, whose sums are off by `margin`.
        everything: nothing that could be kept is outside.
    """
    count = scores.shape[1]
    mass, limit = share.cumsum(-1), value.double()
    # The token at the border is one of those from `first` to `last`.
    first, last = ((mass < bound).sum(-1, keepdim=True) for bound in (limit - margin, limit + margin))
    low, high = (surprise.gather(1, at.clamp(max=count - 1)) for at in (first, last))
    alone = ~(((surprise - low).abs() <= 2 * blur) & (surprise != low)).any(-1, keepdim=True)
    sure = (surprise <= low - 2 * blur) | (alone & (surprise <= low))
    kept = surprise <= high + 2 * blur
    sure[:, 0] = kept[:, 0] = True
    left_open = torch.zeros(len(scores), dtype=torch.bool)
    if not everything:
        left_open = (last >= count)[:, 0] | kept[:, -1]
    scores = scores.masked_fill(~kept, NEVER)
    return Selection(scores, tokens, ~sure & (scores > NEVER), left_open)


_WHOLE = {"top_p": _top_p_of, "min_p": _min_p_of, "typical_p": _typical_p_of}
_AMONG = {"top_k": _top_k, "top_p": _top_p, "min_p": _min_p, "typical_p": _typical_p}
