"""Parts of layers that run fused on a CPU: found by what they compute, and left alone where they compute more."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama import modeling_llama

import decoders
from decoders.engine.model import target as targets
from decoders.engine.model.blocks import PassInput, causal_block
from decoders.engine.model.kernels import cpu
from decoders.engine.model.layout import probe_layout
from decoders.engine.model.target import Precision, Target
from decoders.engine.model.weights import quantization
from decoders.engine.model.weights.few_rows import multiply_few_rows
from decoders.engine.model.weights.fused_layers import fuse_layers
from decoders.engine.model.weights.twin import share_weights
from decoders.testing.exactness import decode, prompts
from decoders.testing.models import tiny_model

pytestmark = pytest.mark.skipif(cpu.chosen().kernels is None, reason="there are no kernels for this CPU")


def fused(model: Any) -> nn.Module:
    twin = share_weights(model)
    multiply_few_rows(twin, probe_layout(twin, 1).shared_inputs)
    fuse_layers(twin)
    return twin


def changed(model: nn.Module, twin: nn.Module, kind: str) -> list[bool]:
    """Of the modules whose class name ends so, which are of another class in the twin."""
    pairs = zip(model.modules(), twin.modules(), strict=True)
    return [type(one) is not type(other) for one, other in pairs if type(one).__name__.endswith(kind)]


@pytest.mark.parametrize("design", ["llama", "gemma3", "qwen3", "olmo2"])
def test_feed_forward_layers_run_fused(design: str) -> None:
    model = tiny_model(design)
    twin = fused(model)
    assert all(changed(model, twin, "MLP"))
    tokens = torch.arange(5, 17).view(2, 6)
    with torch.no_grad():
        ours, plain = twin(input_ids=tokens).logits, model(input_ids=tokens).logits
    torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4)


def test_an_activation_is_known_by_its_values_and_not_by_their_last_digits() -> None:
    model = tiny_model("llama", hidden_act="gelu_new")
    assert all(changed(model, fused(model), "MLP"))


def test_layers_of_other_designs_stay_as_they_are() -> None:
    model = tiny_model("gpt2")
    assert not any(changed(model, fused(model), "MLP"))


class Clamped(modeling_llama.LlamaMLP):
    """Looks like the layer that it is made of, and computes something else."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).clamp(-1e-3, 1e-3)


def test_a_layer_that_computes_more_is_left_alone() -> None:
    model = tiny_model("llama")
    model.model.layers[0].mlp.__class__ = Clamped
    twin = fused(model)
    assert changed(model, twin, "Clamped") == [False] and changed(model, twin, "LlamaMLP") == [True]


def test_a_layer_with_a_hook_on_a_part_is_left_alone() -> None:
    model = tiny_model("llama")
    model.model.layers[1].mlp.act_fn.register_forward_hook(lambda module, given, out: 2 * out)
    assert changed(model, fused(model), "MLP") == [True, False]


def test_a_weight_of_a_fused_layer_counts_in_the_next_call() -> None:
    model = decoders.enable(tiny_model("llama"))
    inputs = prompts(2)
    before = decode(model, inputs, "autoregressive", max_new_tokens=8).sequences
    with torch.no_grad():
        model.model.layers[0].mlp.gate_proj.weight.mul_(-3)
    after = decode(model, inputs, "autoregressive", max_new_tokens=8).sequences
    assert not torch.equal(after, before)
    assert torch.equal(after, decode(model, inputs, max_new_tokens=8).sequences)


def blocks(target: Target) -> list[tuple[bool, bool]]:
    """Per decoder layer, whether it and its attention are fused."""
    layers = target.model.model.layers
    return [("decoders_block" in vars(layer), "decoders_block" in vars(layer.self_attn)) for layer in layers]


def read(target: Target) -> tuple[Tensor, list[Tensor]]:
    """Logits and the cache after a block of nodes of two rows."""
    tokens, base = torch.arange(10).view(2, 5) + 3, torch.tensor([4, 0])
    buffers = target.buffers(2, 32)
    with torch.no_grad():
        out = target.forward(PassInput(tokens, base, causal_block(2, 5, target.device), buffers, torch.arange(16)))
    return out.logits, [*buffers.keys, *buffers.values]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("weights", [None, "int8"])
@pytest.mark.parametrize("design", ["llama", "gemma3", "qwen3"])
@pytest.mark.in_turns
def test_whole_layers_run_fused(design: str, weights: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(design).to(dtype)
    monkeypatch.setattr(quantization, "SMALLEST", 0)
    target = Target(model, precision=Precision(weights=weights))
    assert blocks(target) == [(True, True)] * len(model.model.layers)
    with monkeypatch.context() as patched:
        patched.setattr(targets, "fuse_blocks", lambda *_: 0)
        plain = Target(model, precision=Precision(weights=weights))
    (ours, cache), (other, own) = read(target), read(plain)
    close: dict[str, Any] = dict(rtol=1e-4, atol=1e-4) if dtype == torch.float32 else dict(rtol=0.05, atol=0.05)
    for one, two in zip([ours, *cache], [other, *own], strict=True):
        torch.testing.assert_close(one, two, **close)


def test_layers_run_fused_whose_large_trial_exceeds_float16() -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate_proj.weight.mul_(4)
            layer.mlp.up_proj.weight.mul_(4)
            layer.self_attn.v_proj.weight.mul_(500)
    assert blocks(Target(model.half())) == [(True, True)] * len(model.model.layers)


def test_layers_run_fused_whose_quantized_parts_round_last_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("gemma3", 1, intermediate_size=1536)
    monkeypatch.setattr(quantization, "SMALLEST", 0)
    assert blocks(Target(model, precision=Precision(weights="int8"))) == [(True, True)] * len(model.model.layers)


class Shifted(modeling_llama.LlamaDecoderLayer):
    """Looks like the layer that it is made of, and computes something else."""

    def forward(self, *given: Any, **options: Any) -> Tensor:
        return super().forward(*given, **options) * 1.5


def test_layers_and_attention_that_compute_something_else_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    model.model.layers[0].__class__ = Shifted
    assert blocks(Target(model)) == [(False, True), (True, True)]
    plain = modeling_llama.apply_rotary_pos_emb
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", lambda q, k, cos, sin: plain(q, k, cos, -sin))
    assert blocks(Target(tiny_model("llama"))) == [(False, False)] * 2
