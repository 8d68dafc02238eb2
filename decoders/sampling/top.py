"""The scores that top_k, top_p and typical_p keep, without sorting the vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

import torch
import torch.nn.functional as F
from torch import Tensor

#: The largest k of the operation ``top_k``; a larger k requires the operation ``large_top_k``.
MOST_OF_TOP_K = 1024
#: Number of tokens per block of a running count; blocks run in parallel.
_BLOCK = 1024


def best_of(scores: Tensor) -> Tensor:
    """The :data:`MOST_OF_TOP_K` best scores of ``[B, N, V]``, in descending order; all scores if the vocabulary has fewer."""
    return scores.topk(min(MOST_OF_TOP_K, scores.shape[-1])).values


def kth_of(ordered: Tensor, value: Tensor) -> Tensor:
    """Every node's k-th largest score, ``[B, N, 1]``. ordered: ``[B, N, K]``, descending; value: k, ``[]`` or ``[B, 1, 1]``."""
    k = value.long().clamp(1, ordered.shape[-1])
    if k.dim():  # k differs by row
        return ordered.gather(-1, (k - 1).expand(*ordered.shape[:-1], 1))
    return ordered.index_select(-1, (k - 1)[None])


def top_k_top_p(scores: Tensor, k: Tensor, value: Tensor) -> Tensor:
    """`scores` ``[B, N, V]``, with ``-inf`` for scores that ``top_k`` and then ``top_p`` drop.

    top_k keeps the scores above the k-th score (fewer than `k`), and all scores equal to it. The equal scores are counted, not sorted.
    Among equal scores at the border of top_p, the first tokens are dropped, as in a stable sort. Sums are float64. transformers sums
    in float32, so its border may differ if the sum equals `value` up to rounding.

    k, value: ``[]`` or ``[B, 1, 1]``; value is ``1 - top_p``.
    """
    best = best_of(scores)  # [B, N, K], descending
    kth, greatest = kth_of(best, k), best[..., :1]
    better = best > kth
    weights = torch.where(better, (best - greatest).double().exp(), 0.0)
    weight = (kth - greatest).double().exp()  # the weight of each token whose score equals the k-th
    equals = (scores == kth).sum(-1, keepdim=True)
    sums = weights.cumsum(-1)
    total = sums[..., -1:] + torch.where(weight > 0, weight * equals, 0.0)
    limit = value.double() * total
    # Tokens are dropped from the worst score up: first tokens with the k-th score, then better tokens. The best token stays.
    gone = torch.where(weight > 0, torch.minimum((limit / weight).floor(), equals.double()), equals.double()).long()
    gone = torch.where(better.any(-1, keepdim=True), gone, torch.minimum(gone, equals - 1))
    left = (better & (total - (sums - weights) > limit)).sum(-1, keepdim=True).clamp(min=1)
    lowest = torch.where(gone < equals, kth, best.gather(-1, left - 1))
    dropped = torch.where(gone < equals, gone, (best >= lowest).sum(-1, keepdim=True) - left)
    at_border = scores == lowest
    return scores.masked_fill((scores < lowest) | (at_border & (counted(at_border) <= dropped)), float("-inf"))


def counted(marked: Tensor) -> Tensor:
    """The running count ``[…, V]`` of True in `marked` ``[…, V]``. Counts in blocks, because few long sums are slow on a GPU."""
    vocab = marked.shape[-1]
    blocks = F.pad(marked.int(), (0, -vocab % _BLOCK)).unflatten(-1, (-1, _BLOCK))
    inside = blocks.cumsum(-1, dtype=torch.int32)
    whole = inside[..., -1:]
    return (inside + (whole.cumsum(-2, dtype=torch.int32) - whole)).flatten(-2)[..., :vocab]


# The functions below find the lowest score to keep (the border) by radix selection: few passes of static size, for CUDA graphs.

#: Number of a score's bits that each pass decides, from the highest down.
_PASSES = (11, 11, 10)
#: Number of separate sums that a pass keeps for each value of the bits, and adds up at its end. Most scores share their upper bits,
#: and atomic additions to one sum wait for each other.
_COPIES = 16
#: Greatest number of scores per slice, because a pass needs nine times their memory.
MOST_AT_ONCE = 2**23


def in_slices(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """Wraps `function` (arguments: scores ``[B, N, V]``, a value ``[]`` or ``[B, 1, 1]``) to process a few nodes at once."""

    @wraps(function)
    def sliced(scores: Tensor, value: Tensor) -> Tensor:
        # Compiled code is not sliced, because slices would have fixed sizes, and fused operations need less memory.
        if torch.compiler.is_compiling() or scores.numel() <= MOST_AT_ONCE:
            return function(scores, value)
        size = max(MOST_AT_ONCE // scores.shape[-1], 1)
        nodes = scores.flatten(0, 1)[:, None].split(size)
        values = value.expand(*scores.shape[:2], 1).reshape(-1, 1, 1).split(size)
        return torch.cat([function(*part) for part in zip(nodes, values, strict=True)]).view(scores.shape)

    return sliced


def border(ranks: Tensor, weights: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """The border rank, and the sum of the weights above it, ``[B, N, 1]`` int32 and int64.

    The border is the largest rank whose weight, together with the weights of all higher ranks, is at least `wanted`.

    Args:
        ranks: ``[B, N, V]`` int32, from :func:`rank_of`: the better the score, the higher the rank.
        weights: ``[B, N, V]`` int64, not negative; int32 if the sum fits. Integer sums do not depend on CUDA's varying order of adding.
        wanted: ``[B, N, 1]`` int64; if it exceeds the sum of all weights, the border is the lowest rank.
    """
    place = torch.arange(ranks.shape[-1], device=ranks.device) % _COPIES
    found, above = torch.zeros_like(wanted, dtype=torch.int32), torch.zeros_like(wanted)
    shift = sum(_PASSES)
    for bits in _PASSES:
        size, sign = 1 << bits, 0 if shift < 32 else 1 << (bits - 1)
        inside = weights if shift == 32 else torch.where(ranks >> shift == found, weights, 0)
        shift -= bits
        # The uppermost bits are signed, and lower bits are not.
        bin_of = (ranks >> shift) + sign if sign else (ranks >> shift) & (size - 1)
        sums = inside.new_zeros(*inside.shape[:-1], _COPIES * size)
        sums = sums.scatter_add(-1, place * size + bin_of, inside).unflatten(-1, (_COPIES, size)).sum(-2)
        up_to = above + sums.flip(-1).cumsum(-1)  # from the best bin down
        down = (up_to < wanted).sum(-1, keepdim=True).clamp(max=size - 1)
        above = up_to.gather(-1, down) - sums.gather(-1, size - 1 - down)
        found = (found << bits) + (size - 1 - down - sign).int()
    return found, above


def rank_of(scores: Tensor) -> Tensor:
    """Maps float32 `scores` to int32 numbers with the same order. Equal scores give equal numbers."""
    bits = torch.where(scores == 0, 0.0, scores).view(torch.int32)  # -0.0 is 0.0
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def shares_of(scores: Tensor) -> Tensor:
    """The probabilities of the scores as integers: ``[B, N, V]`` int64, scaled so that their sum is at most ``2^62``."""
    scale = 2.0 ** (62 - (scores.shape[-1] - 1).bit_length())
    greatest = scores.amax(-1, keepdim=True)
    return torch.where(scores > float("-inf"), (scores - greatest).double().exp() * scale, 0.0).long()


@in_slices
def kth_without_sort(scores: Tensor, value: Tensor) -> Tensor:
    """`scores` ``[B, N, V]`` float32, with ``-inf`` for scores that ``top_k`` drops, for any k. value: k, ``[]`` or ``[B, 1, 1]``."""
    ranks = rank_of(scores)
    k = value.clamp(1, scores.shape[-1]).long().expand(*scores.shape[:-1], 1)
    kth, _ = border(ranks, torch.ones_like(ranks), k)
    return scores.masked_fill(ranks < kth, float("-inf"))


@in_slices
def top_p_without_sort(scores: Tensor, value: Tensor) -> Tensor:
    """`scores` ``[B, N, V]`` float32, with ``-inf`` for scores that ``top_p`` drops; ties as in :func:`top_k_top_p`.

    value: ``1 - top_p``.
    """
    ranks, shares = rank_of(scores), shares_of(scores)
    total = shares.sum(-1, keepdim=True)
    kept = (total - (value.double() * total).long()).clamp(min=1)  # the best token stays
    lowest, above = border(ranks, shares, kept)
    at_border = ranks == lowest
    share = torch.where(at_border, shares, 0).amax(-1, keepdim=True).clamp(min=1)
    gone = at_border.sum(-1, keepdim=True) - (kept - above + share - 1) // share
    return scores.masked_fill((ranks < lowest) | (at_border & (counted(at_border) <= gone)), float("-inf"))


@in_slices
def typical_p_without_sort(scores: Tensor, value: Tensor) -> Tensor:
    """`scores` ``[B, N, V]`` float32, with ``-inf`` for scores that ``typical_p`` drops."""
    logp = scores.log_softmax(-1)
    entropy = -(logp * logp.exp()).nansum(-1, keepdim=True)
    ranks, shares = rank_of(-(-logp - entropy).abs()), shares_of(scores)
    total = shares.sum(-1, keepdim=True)
    least, _ = border(ranks, shares, (value.double() * total).ceil().long().clamp(min=1))
    return scores.masked_fill(ranks < least, float("-inf"))
