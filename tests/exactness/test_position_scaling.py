"""Rotary positions that depend on the length of the text: exact, or refused before anything is decoded."""

from __future__ import annotations

from types import MappingProxyType

import pytest
import torch

import decoders
from decoders.errors import DecodersError
from decoders.testing import Replay, assert_same_tokens, decode, prompts
from decoders.testing.models import ARCHITECTURES, Architecture

EAGER = {"compile": False, "prefill_chunk": 8}
LENGTH, ORIGINAL = 24, 32
ROPE = {
    "yarn": ("llama", 512, dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=128)),
    "linear": ("llama", 512, dict(rope_type="linear", factor=2.0)),
    "llama3": (
        "llama", 512,
        dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
             original_max_position_embeddings=64),
    ),
    "dynamic": ("llama", ORIGINAL, dict(rope_type="dynamic", factor=4.0)),
    "longrope": (
        "phi3", 512,
        dict(rope_type="longrope", short_factor=[1.0] * 4, long_factor=[4.0] * 4,
             original_max_position_embeddings=ORIGINAL),
    ),
}  # fmt: skip


def build(kind: str):
    name, context, rope = ROPE[kind]
    own = {"max_position_embeddings": context, "rope_parameters": {"rope_theta": 10000.0} | rope}
    if kind == "longrope":
        own["original_max_position_embeddings"] = ORIGINAL
    base = dict(ARCHITECTURES["llama"].options)
    return decoders.enable(Architecture(name, MappingProxyType(base | own))())


@pytest.mark.in_turns
@pytest.mark.parametrize("new", [ORIGINAL - LENGTH, 36], ids=["up to the original length", "beyond it"])
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("kind", ROPE)
def test_tokens_are_those_of_transformers_or_the_call_is_refused(kind, rows, new):
    model, inputs = build(kind), prompts(rows, length=LENGTH)
    expected = decode(model, inputs, max_new_tokens=new).sequences
    texts = tuple(tuple(t[m.bool()].tolist()) for t, m in zip(expected, _mask(inputs, new), strict=True))
    for strategy in ("autoregressive", Replay(texts=texts, branches=2)):
        try:
            out = decode(model, inputs, strategy, max_new_tokens=new, decoders_config=EAGER)
        except DecodersError:
            assert kind in ("dynamic", "longrope")
            continue
        assert_same_tokens(model, inputs, expected, out.sequences, f"{kind}, {getattr(strategy, 'name', strategy)}")


def _mask(inputs, new):
    mask = inputs["attention_mask"]
    return torch.cat([mask, mask.new_ones(len(mask), new)], dim=1)
