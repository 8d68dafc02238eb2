"""Chooses tokens: at each position the token with the largest sum of processed score and noise. Noise depends on seed, row, position
and token.

Strategies that compute their own scores use these functions. ``process`` applies the call's processors. ``candidates`` and ``largest``
find the best tokens without sorting the vocabulary. ``gumbel_noise`` computes the target's sampling noise. ``in_64_bits`` copies a
tensor to the host if its device does not compute in 64 bits.
"""

from ..common.devices import in_64_bits
from .choice import Candidates, candidates
from .largest import largest
from .processors import Masks, SamplingInputs, SamplingPlan, choose, gumbel_noise, mix64, process

__all__ = [
    "Candidates", "Masks", "SamplingInputs", "SamplingPlan", "candidates", "choose", "gumbel_noise", "in_64_bits", "largest", "mix64",
    "process",
]  # fmt: skip
