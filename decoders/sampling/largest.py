"""The largest scores of rows, without sorting the vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

#: Number of tokens per block in the search for the largest scores.
BLOCK = 64
#: Up to this many scores, plain ``topk`` is faster.
FEW = 2**17


def largest(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest scores of every row of ``[R, V]``, in descending order, and their tokens, ``[R, count]`` int64.

    The result equals ``topk`` up to the order of equal scores, and has V columns if V is less than `count`. It is fast on the CPU,
    because the `count` largest scores lie in the `count` blocks with the largest maxima. Only memory bandwidth limits the search for
    maxima.
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
    behind = top.indices + (blocks - count) * BLOCK  # tokens after the last whole block
    return top.values, torch.where(top.indices < count * BLOCK, inside, behind)


def first_largest(scores: Tensor) -> Tensor:
    """``argmax`` over the last axis of ``[..., V]``; of equal scores, the first. Faster than torch's on the CPU."""
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
