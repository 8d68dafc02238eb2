"""A text in transformers' cache, copied to a row, is what reading the text there would have left."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from decoders.common.transformers_compat import cache_keyword
from decoders.engine.model.cache import CacheBuffers
from decoders.engine.model.prompt_cache import fill_row, whole_cache
from decoders.engine.model.target import Target
from decoders.engine.model.weights.quantization import Precision
from decoders.errors import UnsupportedError
from decoders.testing import tiny_model

BEGIN, COUNT = 3, 20
TEXT = (torch.arange(2 * (BEGIN + COUNT)).view(2, -1) * 37 + 11) % 97 + 3


@pytest.mark.parametrize(
    ("design", "int8"),
    [
        ("llama", False),
        ("llama", True),
        pytest.param("gemma4", False, id="windows and shared keys"),
        pytest.param("deepseek_v3", False, id="latent attention", marks=pytest.mark.slow),
        pytest.param("qwen3_5", False, id="recurrent", marks=pytest.mark.slow),
    ],
)
@torch.no_grad()
def test_a_row_holds_what_reading_its_text_leaves(design: str, int8: bool) -> None:
    # What is rounded in one layer changes the next.
    model = tiny_model(design, **({"num_hidden_layers": 1} if int8 else {}))
    target = Target(model, precision=Precision(cache="int8") if int8 else Precision())
    mask = torch.ones_like(TEXT)
    mask[1, :BEGIN] = 0
    cache = whole_cache(model)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    model(TEXT, attention_mask=mask, position_ids=positions, use_cache=True, **{cache_keyword(model): cache})
    ours, theirs = (CacheBuffers.allocate(target.layout, 3, 64) for _ in range(2))
    fill_row(ours, target.layout, 2, cache, source=1, begin=BEGIN, count=COUNT)
    target.prefill(TEXT[1:, BEGIN:], torch.zeros(1, dtype=torch.int64), theirs.of_rows(2, 3), torch.arange(64), 0)
    for own, other in zip(ours.tensors, theirs.tensors, strict=True):
        difference = (own.float() - other.float()).abs().max() if own.numel() else 0
        assert difference <= (1 if own.dtype == torch.int8 else 1e-5)
    if ours.states is not None and theirs.states is not None:
        assert ours.states.reached.tolist() == theirs.states.reached.tolist() == [0, 0, COUNT]
        for layer, others in zip(ours.states.layers, theirs.states.layers, strict=True):
            for state, other in zip(layer, others, strict=True):
                torch.testing.assert_close(state, other, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_a_cache_that_has_dropped_tokens_is_refused() -> None:
    model = tiny_model("gemma3")
    target, cache = Target(model), DynamicCache(config=model.config)
    model(TEXT, use_cache=True, **{cache_keyword(model): cache})
    buffers = CacheBuffers.allocate(target.layout, 1, 64)
    with pytest.raises(UnsupportedError, match="last 7 of 23 tokens in layer 0"):
        fill_row(buffers, target.layout, 0, cache, source=0, begin=0, count=TEXT.shape[1])
    with pytest.raises(UnsupportedError, match="holds 23 tokens in layer 0, and 20 are wanted"):
        fill_row(buffers, target.layout, 0, cache, source=0, begin=0, count=COUNT)
