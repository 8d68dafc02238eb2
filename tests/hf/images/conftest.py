"""Tiny models that see, enabled, and what they write without a strategy."""

from __future__ import annotations

import functools
from typing import Any

import torch

import decoders
from decoders.testing import decode
from decoders.testing.images import image_prompts, tiny_seeing_model

NEW = 16
EAGER = {"compile": False, "prefill_chunk": 8}


@functools.cache
def enabled(name: str) -> Any:
    return decoders.enable(tiny_seeing_model(name))


@functools.cache
def plain(name: str, images: tuple[int, ...]) -> torch.Tensor:
    """What transformers' own greedy loop gives."""
    return decode(enabled(name), image_prompts(name, images), max_new_tokens=NEW).sequences
