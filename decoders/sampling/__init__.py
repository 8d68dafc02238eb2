"""Choosing a token: processed scores plus noise, a function of the seed, the row, the position and the token.

For strategies with scores of their own: ``process`` applies the target's processors, ``candidates`` and ``largest`` find the
best tokens without sorting the vocabulary, ``gumbel_noise`` computes the target's sampling noise, and ``in_64_bits`` brings a
tensor to where it can be sorted stably.
"""

from ..common.devices import in_64_bits
from .choice import Candidates, candidates
from .processors import Masks, SamplingInputs, SamplingPlan, choose, gumbel_noise, mix64, process
from .top import largest

__all__ = [
    "Candidates", "Masks", "SamplingInputs", "SamplingPlan", "candidates", "choose", "gumbel_noise", "in_64_bits", "largest", "mix64",
    "process",
]  # fmt: skip
