"""Choosing a token: processed scores plus noise, a function of the seed, the row, the position and the token.

For strategies with scores of their own: ``process`` applies the target's processors, ``candidates`` and ``largest`` find the
best tokens without sorting the vocabulary, ``gumbel_noise`` computes the target's sampling noise.
"""

from .choice import Candidates, candidates
from .processors import Masks, SamplingInputs, SamplingPlan, choose, gumbel_noise, mix64, process
from .top import largest

__all__ = [
    "Candidates", "Masks", "SamplingInputs", "SamplingPlan", "candidates", "choose", "gumbel_noise", "largest", "mix64", "process",
]  # fmt: skip
