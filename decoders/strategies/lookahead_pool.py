"""A pool of n-grams in one tensor: the most recent distinct ones, at most a few per first token.

Letters: ``B`` rows, ``n`` tokens of an n-gram, ``C`` capacity, ``M`` n-grams that come in at once, ``G`` kept per first
token (the *key*). Everything is comparison and one scatter: the cost is ``M·C`` whatever the size of the vocabulary,
nothing waits for the device, and it compiles into a few kernels.

A pool is ``[B, n + 1, C]`` int64: the tokens of each entry, and in the last place its *rank*, the number of more recent
entries with the same key. Entries stand most recent first, without gaps and without doubles, and every rank is below ``G``.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: In the place of the tokens of an absent n-gram.
EMPTY = -1


def make_pool(new: Tensor, valid: Tensor, per_key: int, capacity: int) -> Tensor:
    """A pool that holds `new`. Compares each with each: ``M²`` in time and memory.

    Args:
        new: ``[B, n, M]`` int64, most recent first.
        valid: ``[B, M]`` bool, false for those to be ignored.
        per_key: ``G``.
        capacity: ``C``.
    """
    first, rank = _first_of_each(new, valid)
    return _close_gaps(new, rank, first & (rank < per_key), capacity)


def remember(pool: Tensor, new: Tensor, valid: Tensor, per_key: int | Tensor) -> Tensor:
    """The pool with `new` in front of what it held.

    An n-gram that is there already moves to the front. What exceeds `per_key` n-grams of one key goes, oldest first; so
    does what exceeds the capacity.

    Args:
        pool: ``[B, n + 1, C]`` int64.
        new, valid, per_key: as in :func:`make_pool`.
    """
    ngrams, rank, capacity = pool[:, :-1], pool[:, -1], pool.shape[2]
    slot = torch.arange(capacity, device=pool.device)
    first, new_rank = _first_of_each(new, valid)
    double = _equal(new, ngrams) & first[:, :, None]  # [B, M, C]
    stood = torch.where(double, slot, capacity).amin(-1)  # [B, M]

    # An entry falls back by one for every new n-gram of its key that did not stand before it already. A loop, since
    # inductor's code for a sum over the short dimension takes four times as long on the CPU.
    key, stays = ngrams[:, 0], ngrams[:, 0] != EMPTY
    for m in range(new.shape[2]):
        one = slice(m, m + 1)
        overtaken = (new[:, 0, one] == key) & first[:, one] & (stood[:, one] > slot)
        rank = rank + overtaken.long()
        stays = stays & (stood[:, one] != slot)

    ranks = torch.cat([new_rank, rank], 1)
    alive = torch.cat([first, stays], 1) & (ranks < per_key)
    return _close_gaps(torch.cat([new, ngrams], 2), ranks, alive, capacity)


def recall(pool: Tensor, key: Tensor, count: int) -> Tensor:
    """What followed `key`, most recent first.

    Args:
        pool: ``[B, n + 1, C]`` int64.
        key: ``[B, 1]`` int64.
        count: how many are wanted.

    Returns:
        ``[B, count, n - 1]`` int64; ``-1`` where the pool holds fewer.
    """
    tails, capacity = pool[:, 1:-1], pool.shape[2]
    slot = torch.arange(capacity, device=key.device)
    wanted = torch.arange(count, device=key.device)
    hit = (pool[:, 0] == key)[:, None] & (pool[:, -1:] == wanted[:, None])  # [B, count, C]
    column = torch.where(hit, slot, capacity).amin(-1)[:, None]  # [B, 1, count]
    followers = tails.gather(2, column.clamp(max=capacity - 1).expand(-1, tails.shape[1], -1))
    return torch.where(column < capacity, followers, EMPTY).transpose(1, 2)


def _first_of_each(new: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Which of `new` are the first of their kind, ``[B, M]`` bool, and their rank among those."""
    order = torch.arange(new.shape[2], device=new.device)
    earlier = (order[None, :] < order[:, None]) & valid[:, None, :]  # [B, M, M]: column before row
    kept = valid & ~(_equal(new, new) & earlier).any(-1)
    same_key = new[:, 0, :, None] == new[:, 0, None, :]
    return kept, (same_key & earlier & kept[:, None, :]).sum(-1)


def _close_gaps(ngrams: Tensor, rank: Tensor, alive: Tensor, capacity: int) -> Tensor:
    """The entries that are alive, in their order, as a pool of `capacity`; the last ones go if there are more."""
    target = alive.long().cumsum(1) - 1
    target = torch.where(alive & (target < capacity), target, capacity)  # one slot more takes what goes
    entries = torch.cat([ngrams, rank[:, None]], 1)
    closed = entries.new_full((*entries.shape[:2], capacity + 1), EMPTY)
    return closed.scatter(2, target[:, None].expand_as(entries), entries)[:, :, :capacity]


def _equal(left: Tensor, right: Tensor) -> Tensor:
    """Which n-grams are equal: ``[B, n, M]`` and ``[B, n, K]`` to ``[B, M, K]`` bool.

    Token by token, since a reduction over the short inner dimension is slow on the CPU.
    """
    equal = left[:, 0, :, None] == right[:, 0, None, :]
    for token in range(1, left.shape[1]):
        equal = equal & (left[:, token, :, None] == right[:, token, None, :])
    return equal
