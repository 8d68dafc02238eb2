"""Mixtures of experts: the products of our own function are transformers', and need nothing from the host in a step."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import decoders
from decoders.common.transformers_compat import experts_of
from decoders.engine.model import experts
from decoders.engine.model.experts import MOST_PRODUCTS, NAME
from decoders.engine.model.weights.twin import share_weights
from decoders.testing import decode, prompts, tiny_model
from decoders.testing.tape import HostReadError, RecordingError

from ...tape_recorder import TapeRecorder

DESIGNS = ("mixtral", "gpt_oss", "deepseek_v3")


def layers_of(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if experts_of(module) is not None and hasattr(module, "down_proj")]


def routed(layer: Any, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(tokens)
    width = layer.down_proj.shape[1 if not layer.is_transposed else 2]
    weights, chosen = torch.rand(tokens, layer.num_experts).topk(2)
    return torch.randn(tokens, width), chosen, weights / weights.sum(-1, keepdim=True)


@pytest.mark.parametrize("tokens", [1, 2, 17, 3 + MOST_PRODUCTS // 8], ids=str)
@pytest.mark.parametrize("design", DESIGNS)
@torch.no_grad()
def test_they_are_transformers_own(design: str, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = layers_of(tiny_model(design))[0]
    given = routed(layer, tokens)
    for copying in (0, 3, 99):  # all experts, as usual, a matrix for each row
        monkeypatch.setattr(experts, "COPYING", copying)
        assert torch.allclose(experts.forward(layer, *given), layer(*given), atol=1e-5)


@torch.no_grad()
def test_the_products_of_a_step_are_recorded() -> None:
    def product(rows: int, count: int = 4) -> Any:
        x, chosen = torch.randn(rows, 8), torch.randint(0, count, (rows,))
        matrices = torch.randn(count, 6, 8)
        return TapeRecorder().record(lambda: experts._expert_product(x, chosen, matrices, False))

    for rows, count in ((1, 4), (64, 4), (128, 128), (2, 128)):
        product(rows, count)
    with pytest.raises((RecordingError, HostReadError)):  # the host deals longer text out
        product(MOST_PRODUCTS)


def test_they_are_used_where_torch_would_need_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    def taken(model: Any) -> set[str | None]:
        twin = share_weights(model)
        experts.take_over(twin)
        assert {experts_of(layer) for layer in layers_of(model)} == {"grouped_mm"}  # the user's own stays as it is
        return {experts_of(layer) for layer in layers_of(twin)}

    assert taken(tiny_model("mixtral")) == {"grouped_mm"}
    for capability, dtype, native in [
        ((9, 0), torch.bfloat16, True), ((10, 0), torch.bfloat16, True), ((9, 0), torch.float16, False),
        ((8, 9), torch.bfloat16, False), ((12, 0), torch.bfloat16, False), ((9, 0), torch.float32, False),
    ]:  # fmt: skip
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, capability=capability: capability)
        assert experts.is_grouped_natively(torch.device("cuda"), dtype) is native
    monkeypatch.setattr(experts, "is_grouped_natively", lambda device, dtype: False)
    assert taken(tiny_model("mixtral")) == {NAME}


@pytest.mark.parametrize("design", DESIGNS)
def test_whole_calls_write_the_same_text(design: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = tiny_model(design).generate(**prompts(2), max_new_tokens=10, do_sample=False, pad_token_id=0)
    monkeypatch.setattr(experts, "is_grouped_natively", lambda device, dtype: False)
    model = decoders.enable(tiny_model(design))
    assert torch.equal(decode(model, prompts(2), "prompt_lookup", max_new_tokens=10).sequences, expected)
    assert {experts_of(layer) for layer in layers_of(model.generate.engine().target.model)} == {NAME}


@pytest.mark.skipif(
    not hasattr(torch._dynamo.utils, "allow_lru_cache_wrapper_trace_without_warning"), reason="this torch has no list"
)
@pytest.mark.usefixtures("traced_only")
def test_compiling_experts_in_bfloat16_warns_of_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo would warn that the versions which transformers compares in a pass are cached, and say so once per process."""
    monkeypatch.setattr(torch._dynamo.utils, "warn_once_cache", set())
    model = decoders.enable(tiny_model("mixtral", num_hidden_layers=1).to(torch.bfloat16))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        out = decode(model, prompts(), "autoregressive", max_new_tokens=4, decoders_config={"compile": True})
    assert out.report.compiled and not [w for w in caught if "lru_cache" in str(w.message)]
