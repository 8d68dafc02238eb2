"""The largest of many scores, and what top_k and top_p leave of them, found without sorting the vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

import torch
import torch.nn.functional as F
from torch import Tensor

#: Tokens per block whose maximum is taken in the search for the largest.
BLOCK = 64
#: Up to so many scores plain ``topk`` is faster.
FEW = 2**17


def largest(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest scores of every row of ``[R, V]``, in descending order, and their tokens, ``[R, count]`` int64.

    Equals ``topk`` (any of equal scores may come first, and there are fewer than `count` if the vocabulary is smaller), without
    sorting it all: the `count` largest lie in the `count` blocks with the largest maxima, and taking maxima is limited by memory
    bandwidth only. For the CPU.
    """
    vocab = scores.shape[-1]
    blocks = vocab // BLOCK
    if 2 * count >= blocks or scores.numel() <= FEW:
        top = scores.topk(min(count, vocab))
        return top.values, top.indices
    blocked = scores[:, : blocks * BLOCK].unflatten(-1, (blocks, BLOCK))
    best = blocked.amax(-1).topk(count, sorted=False).indices  # [R, count]
    row = torch.arange(len(scores), device=scores.device)[:, None]
    pool = torch.cat([blocked[row, best].flatten(1), scores[:, blocks * BLOCK :]], -1)
    top = pool.topk(count)
    inside = best.gather(1, (top.indices // BLOCK).clamp(max=count - 1)) * BLOCK + top.indices % BLOCK
    behind = top.indices + (blocks - count) * BLOCK  # the vocabulary's end, which fills no block
    return top.values, torch.where(top.indices < count * BLOCK, inside, behind)


def first_largest(scores: Tensor) -> Tensor:
    """``argmax`` over the last axis of ``[..., V]``: the first of equals."""
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


#: The largest k of the operation ``top_k``. For larger ones ``large_top_k`` sorts the vocabulary.
MOST_OF_TOP_K = 1024
#: Tokens per block of a running count; blocks are counted in parallel.
_BLOCK = 1024


def best_of(scores: Tensor) -> Tensor:
    """The best :data:`MOST_OF_TOP_K` of ``[B, N, V]``, or as many as there are, in descending order."""
    return scores.topk(min(MOST_OF_TOP_K, scores.shape[-1])).values


def kth_of(ordered: Tensor, value: Tensor) -> Tensor:
    """``[B, N, 1]``, the k-th largest of every node's scores. ordered: ``[B, N, K]``, descending; value: k, ``[]`` or ``[B, 1, 1]``."""
    k = value.long().clamp(1, ordered.shape[-1])
    if k.dim():  # one per row
        return ordered.gather(-1, (k - 1).expand(*ordered.shape[:-1], 1))
    return ordered.index_select(-1, (k - 1)[None])


def top_k_top_p(scores: Tensor, k: Tensor, value: Tensor) -> Tensor:
    """What ``top_k`` and then ``top_p`` leave of ``[B, N, V]`` scores.

    top_k leaves fewer than `k` tokens that are better than the k-th, and all that equal it. The former are among the best, the
    latter need only be counted. Of equal scores at the border of top_p the first tokens are dropped, as in a stable sort. Sums are
    float64; transformers sums in float32, and may put the border elsewhere where the sum equals `value` up to rounding.

    Args:
        k: ``[]`` or ``[B, 1, 1]``.
        value: likewise, ``1 - top_p``.
    """
    best = best_of(scores)  # [B, N, K], descending
    kth, greatest = kth_of(best, k), best[..., :1]
    better = best > kth
    weights = torch.where(better, (best - greatest).double().exp(), 0.0)
    weight = (kth - greatest).double().exp()  # of a token that equals the k-th
    equals = (scores == kth).sum(-1, keepdim=True)
    sums = weights.cumsum(-1)
    total = sums[..., -1:] + torch.where(weight > 0, weight * equals, 0.0)
    limit = value.double() * total
    # Dropped from the worst on: first the equals, then the better ones. The best stays.
    gone = torch.where(weight > 0, torch.minimum((limit / weight).floor(), equals.double()), equals.double()).long()
    gone = torch.where(better.any(-1, keepdim=True), gone, torch.minimum(gone, equals - 1))
    left = (better & (total - (sums - weights) > limit)).sum(-1, keepdim=True).clamp(min=1)
    lowest = torch.where(gone < equals, kth, best.gather(-1, left - 1))
    out = torch.where(gone < equals, gone, (best >= lowest).sum(-1, keepdim=True) - left)
    border = scores == lowest
    return scores.masked_fill((scores < lowest) | (border & (counted(border) <= out)), float("-inf"))


def counted(marked: Tensor) -> Tensor:
    """``[…, V]``: how many of the first tokens, up to and with each, are `marked` (``[…, V]`` bool).

    A sum along the vocabulary is slow on a device with few rows; splitting it into blocks makes more rows.
    """
    vocab = marked.shape[-1]
    blocks = F.pad(marked.int(), (0, -vocab % _BLOCK)).unflatten(-1, (-1, _BLOCK))
    inside = blocks.cumsum(-1, dtype=torch.int32)
    whole = inside[..., -1:]
    return (inside + (whole.cumsum(-2, dtype=torch.int32) - whole)).flatten(-2)[..., :vocab]


# Borders by a radix selection over the scores' bits: few passes of static size, which can be traced and recorded.

#: Bits of a score that each pass decides, from the highest on.
_PASSES = (11, 11, 10)
#: Copies of a pass's sums: additions to one place wait for each other, and most scores share their upper bits.
_COPIES = 16
#: Scores that are looked through at a time: passes need nine times their memory.
MOST_AT_ONCE = 2**23


def in_slices(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """`function` of ``[B, N, V]`` scores and a value, ``[]`` or ``[B, 1, 1]``, a few nodes at a time if there are many."""

    @wraps(function)
    def sliced(scores: Tensor, value: Tensor) -> Tensor:
        # Slices would fix the sizes of compiled code, which fuses most of these operations.
        if torch.compiler.is_compiling() or scores.numel() <= MOST_AT_ONCE:
            return function(scores, value)
        size = max(MOST_AT_ONCE // scores.shape[-1], 1)
        nodes = scores.flatten(0, 1)[:, None].split(size)
        values = value.expand(*scores.shape[:2], 1).reshape(-1, 1, 1).split(size)
        return torch.cat([function(*part) for part in zip(nodes, values, strict=True)]).view(scores.shape)

    return sliced


def border(ranks: Tensor, weights: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """The largest rank up to which the weights of all ranks from the best on add up to `wanted`, and the sum of those above it.

    Args:
        ranks: ``[B, N, V]`` int32, of :func:`rank_of`.
        weights: ``[B, N, V]`` int64, not negative, or int32 if their sum fits. Integers, because CUDA adds in an order that changes
            from run to run.
        wanted: ``[B, N, 1]`` int64, at most the sum of all weights, or the lowest rank is found.

    Returns:
        ``[B, N, 1]`` int32 and int64.
    """
    place = torch.arange(ranks.shape[-1], device=ranks.device) % _COPIES
    found, above = torch.zeros_like(wanted, dtype=torch.int32), torch.zeros_like(wanted)
    shift = sum(_PASSES)
    for bits in _PASSES:
        size, sign = 1 << bits, 0 if shift < 32 else 1 << (bits - 1)
        inside = weights if shift == 32 else torch.where(ranks >> shift == found, weights, 0)
        shift -= bits
        # The upper bits are signed, the others are not.
        bin_of = (ranks >> shift) + sign if sign else (ranks >> shift) & (size - 1)
        sums = inside.new_zeros(*inside.shape[:-1], _COPIES * size)
        sums = sums.scatter_add(-1, place * size + bin_of, inside).unflatten(-1, (_COPIES, size)).sum(-2)
        up_to = above + sums.flip(-1).cumsum(-1)  # from the best bin down
        down = (up_to < wanted).sum(-1, keepdim=True).clamp(max=size - 1)
        above = up_to.gather(-1, down) - sums.gather(-1, size - 1 - down)
        found = (found << bits) + (size - 1 - down - sign).int()
    return found, above


def rank_of(scores: Tensor) -> Tensor:
    """int32 of float32 `scores`, in the same order; equal scores have the same."""
    bits = torch.where(scores == 0, 0.0, scores).view(torch.int32)  # -0.0 is 0.0
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def shares_of(scores: Tensor) -> Tensor:
    """``[B, N, V]`` int64 in proportion to the scores' probabilities; their sum is at most ``2^62``."""
    scale = 2.0 ** (62 - (scores.shape[-1] - 1).bit_length())
    greatest = scores.amax(-1, keepdim=True)
    return torch.where(scores > float("-inf"), (scores - greatest).double().exp() * scale, 0.0).long()


@in_slices
def kth_without_sort(scores: Tensor, value: Tensor) -> Tensor:
    """What ``top_k`` leaves of ``[B, N, V]`` float32 scores, for any k. value: k, ``[]`` or ``[B, 1, 1]``."""
    ranks = rank_of(scores)
    k = value.clamp(1, scores.shape[-1]).long().expand(*scores.shape[:-1], 1)
    kth, _ = border(ranks, torch.ones_like(ranks), k)
    return scores.masked_fill(ranks < kth, float("-inf"))


@in_slices
def top_p_without_sort(scores: Tensor, value: Tensor) -> Tensor:
    """What ``top_p`` leaves of ``[B, N, V]`` float32 scores; borders are where :func:`top_k_top_p` has them. value: ``1 - top_p``."""
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
    """What ``typical_p`` leaves of ``[B, N, V]`` float32 scores."""
    logp = scores.log_softmax(-1)
    entropy = -(logp * logp.exp()).nansum(-1, keepdim=True)
    ranks, shares = rank_of(-(-logp - entropy).abs()), shares_of(scores)
    total = shares.sum(-1, keepdim=True)
    least, _ = border(ranks, shares, (value.double() * total).ceil().long().clamp(min=1))
    return scores.masked_fill(ranks < least, float("-inf"))
