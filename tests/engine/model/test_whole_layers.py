"""Decoder layers as single operators of the CPU: the bits are those of their parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from decoders.engine.model.blocks import PassInput
from decoders.engine.model.compiled import tiers
from decoders.engine.model.kernels import cpu, products
from decoders.engine.model.self_check import target_of
from decoders.engine.model.target import Target
from decoders.engine.model.weights.quantization import Precision
from decoders.report import Report
from decoders.testing import tiny_model
from decoders.tree import Topology

from ...turns import slow_but

pytestmark = pytest.mark.skipif(cpu.chosen().kernels is None, reason="this machine has no kernels for CPUs")

TREE = Topology.from_parents([-1, 0, 0, 1])


def results(target: Target) -> list[Tensor]:
    """Logits and caches of a text in the second of three rows, and of trees in the last two."""
    tokens, rows = torch.arange(3, 51).view(3, 16) % target.vocab_size, target.buffers(3, 64)
    start, view = torch.zeros(3, dtype=torch.int64), torch.arange(32)
    target.prefill(tokens[:, :9], start, rows, view, 0)
    target.prefill(tokens[1:2, 9:12], start[:1] + 9, rows.of_rows(1, 2), view, 9)
    part = rows.of_rows(1, 3)
    out = target.forward(PassInput(tokens[1:, 12:], torch.tensor([12, 9]), TREE.tensors(2, start.device), part, view))
    return [out.logits, *rows.tensors]


def of_parts(target: Target, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    with monkeypatch.context() as patched:
        patched.setattr(products, "decoder_layer", lambda *_: None)
        return results(target)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("design", slow_but(["llama", "gemma3"], ["llama", "qwen2", "qwen3", "gemma2", "gemma3"]))
def test_a_whole_layer_has_the_bits_of_its_parts(
    design: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = target_of(tiny_model(design).to(dtype))
    assert target.runs_whole_layers
    calls: list[Any] = []
    whole = products.decoder_layer
    monkeypatch.setattr(products, "decoder_layer", lambda *given: calls.append(whole(*given)) or calls[-1])
    ours = results(target)
    assert len(calls) == 3 * target.decoder_layers and None not in calls
    for one, other in zip(ours, of_parts(target, monkeypatch), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_a_whole_layer_of_quantized_weights_has_the_bits_of_its_parts(
    weights: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = target_of(tiny_model("qwen2"), precision=Precision(weights=weights))
    assert target.runs_whole_layers
    for one, other in zip(results(target), of_parts(target, monkeypatch), strict=True):
        assert torch.equal(one, other)


def test_a_changed_weight_counts() -> None:
    target = target_of(model := tiny_model("llama"))
    before = results(target)[0]
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(2)
    after = results(target)[0]
    assert not torch.equal(before, after) and torch.equal(after, results(target_of(model))[0])


@pytest.mark.parametrize("design", ["mixtral", "gpt2", "gptj"])
def test_layers_of_another_structure_are_not_whole(design: str) -> None:
    assert not target_of(tiny_model(design)).runs_whole_layers


def test_an_int8_cache_takes_the_parts() -> None:
    target = target_of(tiny_model("llama"), precision=Precision(cache="int8"))
    assert not target.runs_whole_layers


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[tiers.PassKind]:
    """The kinds of passes that began to be compiled; compiling takes a second."""
    kinds: list[tiers.PassKind] = []
    monkeypatch.setattr(tiers, "FORWARD_SECONDS", 1.0)
    monkeypatch.setattr(tiers.Tiers, "_begin", lambda _, kind: kinds.append(kind))
    return kinds


@pytest.mark.parametrize("design, begins", [("llama", False), ("gptj", True)])
def test_passes_that_gain_little_are_compiled_later(design: str, begins: bool, begun: list[tiers.PassKind]) -> None:
    compiled, kind = tiers.Tiers(target_of(tiny_model(design))), tiers.PassKind(several_rows=False)
    with compiled.during("auto", Report("")):
        compiled.kinds[kind].seconds = 3.0
        assert not compiled.runs_compiled(several=False) and begun == ([kind] if begins else [])
        compiled.kinds[kind].seconds *= tiers.PATIENCE
        assert not compiled.runs_compiled(several=False) and begun[-1:] == [kind]


@pytest.mark.parametrize("kind", [tiers.PassKind(False, True), tiers.PassKind(True, False, True)], ids=str)
def test_what_compiled_passes_lack_is_compiled_as_soon_as_ever(
    kind: tiers.PassKind, begun: list[tiers.PassKind]
) -> None:
    """Without these graphs compiled passes have more nodes than they need, and prompts passes of their own."""
    compiled = tiers.Tiers(target_of(tiny_model("llama")))
    compiled._spend(kind, 3.0)
    assert begun == [kind]
