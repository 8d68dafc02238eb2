"""Passes of the target by itself."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from decoders.engine.decode.engine import Engine
from decoders.engine.model.blocks import ForwardResult, LeadingText, PassInput, causal_block
from decoders.engine.model.cache import CacheBuffers
from decoders.engine.model.self_check import target_of
from decoders.engine.model.target import Target
from decoders.engine.model.weights.quantization import Precision
from decoders.testing import tiny_model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inference_mode_changes_no_bit_and_does_not_show(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_of(tiny_model("llama").to(dtype)).sibling((0, 1))
    tokens = torch.arange(24).view(2, 12) % target.vocab_size
    start, block, view = torch.zeros(2, dtype=torch.int64), causal_block(2, 4, target.device), torch.arange(64)

    def results() -> list[tuple[ForwardResult, CacheBuffers]]:
        buffers = [CacheBuffers.allocate(target.layout, 2, 128) for _ in range(3)]
        target.prefill(tokens[:, :8], start, buffers[0], view, 0)
        given = [
            target.forward(PassInput(tokens[:, 8:], start + 8, block, buffers[0], view)),
            target.forward(
                PassInput(tokens, start, causal_block(2, 12, target.device), buffers[1], view, LeadingText(8))
            ),
            target.features(tokens, start, buffers[2], view, 0, logits=True),
        ]
        return list(zip(given, buffers, strict=True))

    with torch.no_grad():
        quick = results()
        monkeypatch.setattr(Target, "_quick", lambda self: nullcontext())
        plain = results()
    for (result, buffers), (expected, cached) in zip(quick, plain, strict=True):
        for name in ("logits", "hidden", "layers"):
            own = getattr(result, name)
            assert torch.equal(own, getattr(expected, name)), name
            assert not own.is_inference()
        for own, other in zip(buffers.tensors, cached.tensors, strict=True):
            assert torch.equal(own, other) and not own.is_inference()
    assert torch.equal(quick[0][0].logits.argmax(-1), quick[1][0].logits.argmax(-1))


def test_passes_run_in_inference_mode_where_no_one_records_or_compiles_them(monkeypatch: pytest.MonkeyPatch) -> None:
    target, seen = target_of(tiny_model("llama")), []
    target.model.get_output_embeddings().register_forward_hook(
        lambda *_: seen.append((torch.is_inference_mode_enabled(), torch.is_grad_enabled()))
    )
    buffers, view = CacheBuffers.allocate(target.layout, 1, 128), torch.arange(64)
    tokens, start = torch.tensor([[1, 2, 3, 4]]), torch.zeros(1, dtype=torch.int64)
    with torch.no_grad():
        target.forward(PassInput(tokens, start, causal_block(1, 4, target.device), buffers, view))
        monkeypatch.setattr(target, "static", True)
        target.forward(PassInput(tokens, start, causal_block(1, 4, target.device), buffers, view))
    assert seen == [(True, False), (False, False)]


def test_an_engine_serves_no_model_whose_products_torch_rounds_otherwise_since() -> None:
    """What was checked and recorded has the other kernels."""
    model, matmul = tiny_model("llama"), torch.backends.mkldnn.matmul
    engine, usual = Engine(model), matmul.fp32_precision

    def served() -> tuple[bool, bool]:
        return engine.serves(model, "auto", Precision()), engine.refresh(model, "auto")

    assert served() == (True, True)
    try:
        matmul.fp32_precision = "tf32"
        assert served() == (False, False)
    finally:
        matmul.fp32_precision = usual
