"""Detects text that loops: tokens that repeat a passage for the second time or more."""

from __future__ import annotations

import torch
from torch import Tensor

#: Longest repeated passage to look for, in tokens.
LONGEST_PERIOD = 64
#: Repetitions of at most this number of tokens are no loop, whatever their period: `((((` and `1, 1, 1` are text.
SHORTEST_LOOP = 8


def in_loops(ids: Tensor) -> Tensor:
    """Returns which tokens of `ids` ``[..., T]`` int64 are part of a loop, as ``[..., T]`` bool.

    A token is part of a loop if, for some period ``p``, it ends a run of more than ``max(p, SHORTEST_LOOP)`` tokens that all equal
    the token ``p`` places earlier. So the first repetition of a passage does not count, because code repeats itself on purpose.
    """
    looping = torch.zeros_like(ids, dtype=torch.bool)
    for period in range(1, min(LONGEST_PERIOD, ids.shape[-1] - 1) + 1):
        same = ids[..., period:] == ids[..., :-period]
        places = torch.arange(same.shape[-1], device=ids.device).expand_as(same)
        last_different = places.masked_fill(same, -1).cummax(-1).values
        looping[..., period:] |= places - last_different > max(period, SHORTEST_LOOP)
    return looping
