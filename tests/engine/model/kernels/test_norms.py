"""Norms by our kernel, interpreted: which modules are taken for one, and the same bits for any number of rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from decoders.engine.model.kernels import interpreted
from decoders.engine.model.weights import same_bits
from decoders.engine.model.weights.layers import Formula
from decoders.engine.model.weights.same_bits import norm_kind

if not interpreted():
    pytest.skip("kernels are interpreted where there is no GPU and Triton is installed", allow_module_level=True)

from decoders.engine.model.kernels.products import rms_norm_on_cuda as rms_norm

KINDS: dict[str, tuple[Callable[..., nn.Module], Formula]] = {
    "llama": (LlamaRMSNorm, Formula(1e-6, one_added=False, rounded_first=True)),
    "olmo2": (Olmo2RMSNorm, Formula(1e-6, one_added=False, rounded_first=False)),
    "gemma3": (Gemma3RMSNorm, Formula(1e-6, one_added=True, rounded_first=False)),
}


@pytest.fixture(autouse=True)
def as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    narrow = torch.bfloat16, torch.float16
    monkeypatch.setattr(same_bits, "rms_norm_for", lambda weight: rms_norm if weight.dtype in narrow else None)


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


@pytest.mark.in_turns
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", KINDS)
def test_a_norm_is_known_by_what_it_computes_and_computed_likewise(name: str, dtype: torch.dtype) -> None:
    make, formula = KINDS[name]
    norm, x = make(90, eps=1e-6).to(dtype), random(2, 5, 90, dtype=dtype)
    kind = norm_kind(norm)
    assert kind is not None and issubclass(kind, type(norm))
    with torch.no_grad():
        norm.weight.copy_(random(90, dtype=dtype))
    expected = norm(x)
    assert torch.equal(expected, formula(x, norm.weight))
    norm.__class__ = kind
    out = norm(x)
    torch.testing.assert_close(out, expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
    # Interpreted, bfloat16 is computed in float32: nothing is rounded on the way.
    assert dtype == torch.bfloat16 or (out == expected).float().mean() > 0.9
    with torch.no_grad():
        assert torch.equal(torch.compile(norm, backend="eager", fullgraph=True, dynamic=True)(x), out)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_row_has_the_same_bits_however_many_there_are(dtype: torch.dtype) -> None:
    x, weight = random(20, 2, 72, dtype=dtype), random(72, dtype=dtype)
    whole = rms_norm(x, weight, 1e-6, False, True)
    for rows in (1, 2, 17):
        assert torch.equal(rms_norm(x[:rows], weight, 1e-6, False, True), whole[:rows])
    assert torch.equal(rms_norm(x.transpose(0, 1), weight, 1e-6, False, True), whole.transpose(0, 1))


def test_other_modules_are_left_alone() -> None:
    class Doubled(LlamaRMSNorm):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return super().forward(hidden_states) * 2

    class Gated(LlamaRMSNorm):
        def forward(self, hidden_states: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return super().forward(hidden_states) * gate

    exchanged: Any = LlamaRMSNorm(32).bfloat16()
    exchanged.forward = lambda x: x
    others = [nn.LayerNorm(32), Doubled(32), Gated(32), nn.Linear(32, 32, bias=False), nn.PReLU(32)]
    assert [norm_kind(module.bfloat16()) for module in others] == [None] * len(others)
    assert norm_kind(LlamaRMSNorm(32)) is None and norm_kind(exchanged) is None


def test_what_a_norm_is_not_known_to_take_goes_to_its_own_class() -> None:
    norm: Any = LlamaRMSNorm(32).bfloat16()
    norm.__class__ = norm_kind(norm)
    x = random(2, 32, dtype=torch.float32)
    assert torch.equal(norm(x), LlamaRMSNorm(32)(x)) and norm(x[:0].bfloat16()).shape == (0, 32)
