"""Models and texts that the tests of many designs compare with, made once."""

from __future__ import annotations

import functools
from typing import Any

import torch

import decoders
from decoders.testing import decode, prompts, tiny_model

NEW = 20
EAGER = {"compile": False, "prefill_chunk": 8}
SAMPLING: dict[str, Any] = dict(do_sample=True, seed=11, temperature=0.7, top_k=50, top_p=0.98)


@functools.cache
def enabled(name: str):
    return decoders.enable(tiny_model(name))


@functools.cache
def plain(name: str, rows: int) -> torch.Tensor:
    """What transformers' own greedy loop gives."""
    return decode(enabled(name), prompts(rows), max_new_tokens=NEW).sequences


@functools.cache
def sampled(name: str, rows: int) -> torch.Tensor:
    """Plain sampling."""
    options = dict(max_new_tokens=NEW, decoders_config=EAGER) | SAMPLING
    return decode(enabled(name), prompts(rows), "autoregressive", **options).sequences
