"""Decoder layers as single operators of the CPU: the bits are those of their parts."""

from __future__ import annotations

import itertools
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor

from decoders.engine.model import slot_cache
from decoders.engine.model.attention import KIND_ATTRIBUTE, LayerKind
from decoders.engine.model.blocks import PassInput
from decoders.engine.model.compiled import tiers
from decoders.engine.model.kernels import cpu, products
from decoders.engine.model.self_check import target_of
from decoders.engine.model.target import Target
from decoders.engine.model.weights import decoder_layers
from decoders.engine.model.weights.quantization import Precision
from decoders.report import Report
from decoders.testing import tiny_model
from decoders.testing.models import ARCHITECTURES, Architecture
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
        patched.setattr(products, "decoder_layers", lambda *_: None)
        return results(target)


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many layers each call of the operator has computed."""
    counts: list[int] = []
    whole = products.decoder_layers

    def counted(*given: Any) -> Any:
        both = whole(*given)
        counts.append(0 if both is None else len(both[0]))
        return both

    monkeypatch.setattr(products, "decoder_layers", counted)
    return counts


def equal(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("design", slow_but(["llama", "gemma3"], ["llama", "qwen2", "qwen3", "gemma2", "gemma3"]))
def test_whole_layers_have_the_bits_of_their_parts(
    design: str, dtype: torch.dtype, computed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = target_of(tiny_model(design).to(dtype))
    assert target.runs_whole_layers
    computed.clear()
    ours = results(target)
    assert sum(computed) == 3 * target.decoder_layers and 0 not in computed
    assert equal(ours, of_parts(target, monkeypatch))


@pytest.mark.parametrize("precision", [Precision("int8"), Precision("int4"), Precision("int4", "int8")], ids=str)
def test_whole_layers_of_quantized_weights_have_the_bits_of_their_parts(
    precision: Precision, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = target_of(tiny_model("qwen2"), precision=precision)
    assert target.runs_whole_layers
    assert equal(results(target), of_parts(target, monkeypatch))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("design", slow_but(["llama", "gemma3"], ["llama", "qwen3", "gemma2", "gemma3"]))
def test_whole_layers_over_an_int8_cache_have_the_bits_of_their_parts(
    design: str, dtype: torch.dtype, computed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = target_of(tiny_model(design).to(dtype), precision=Precision(cache="int8"))
    computed.clear()
    ours = results(target)
    assert sum(computed) == 3 * target.decoder_layers and 0 not in computed
    assert equal(ours, of_parts(target, monkeypatch))
    monkeypatch.setattr(slot_cache, "_operator", lambda *_: None)  # torch quantizes
    assert equal(ours, of_parts(target, monkeypatch))


# Layers that one operator computes together.


def four_layers() -> Target:
    return target_of(tiny_model("llama", num_hidden_layers=4))


def test_layers_of_one_kind_are_computed_together(computed: list[int]) -> None:
    target = four_layers()
    computed.clear()
    results(target)
    assert computed == [4, 4, 4]  # three passes


def test_layers_of_many_tokens_are_computed_one_by_one(computed: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    target = four_layers()
    monkeypatch.setattr(decoder_layers, "MOST_AHEAD", 8)
    computed.clear()
    results(target)
    assert computed == [1] * 4 + [4] + [4]  # 27, 3 and 8 tokens


def test_layers_with_other_rotary_positions_are_computed_by_themselves(computed: list[int]) -> None:
    """Gemma 3's sliding and full attention have other cos and sin."""
    target = target_of(tiny_model("gemma3"))
    kinds = target.model.config.get_text_config().layer_types
    computed.clear()
    results(target)
    assert computed == 3 * [len(list(same)) for _, same in itertools.groupby(kinds)]


def doubled_in_place(module: Any, given: tuple, out: Any = None) -> None:
    (given[0] if out is None else out).mul_(2)


@pytest.mark.parametrize("before", [False, True], ids=["behind a layer", "before a layer"])
def test_a_hook_that_writes_in_place_ends_the_layers_computed_together(before: bool, computed: list[int]) -> None:
    """The hook comes after the trial of the layers, as the one of :class:`Taps` does."""
    target = four_layers()
    layer = target.model.model.layers[2 if before else 1]
    register = layer.register_forward_pre_hook if before else layer.register_forward_hook
    handle = register(doubled_in_place)
    computed.clear()
    ours = results(target)
    assert computed == [2, 2] * 3
    handle.remove()
    model = tiny_model("llama", num_hidden_layers=4)
    layer = model.model.layers[2 if before else 1]
    (layer.register_forward_pre_hook if before else layer.register_forward_hook)(doubled_in_place)
    assert equal(ours, results(target_of(model)))


def test_a_result_computed_ahead_is_only_for_its_input(computed: list[int]) -> None:
    """Something between two layers replaces the first one's result, in some passes only."""
    target, model = four_layers(), tiny_model("llama", num_hidden_layers=4)
    second = target.model.model.layers[1]
    second.forward = lambda x, *given, plain=second.forward, **options: plain(2 * x, *given, **options)
    model.model.layers[1].register_forward_pre_hook(lambda _, given: (2 * given[0], *given[1:]))
    computed.clear()
    ours = results(target)
    assert computed == [4, 3] * 3  # what the first call computed ahead is dropped
    assert equal(ours, results(target_of(model)))


def test_a_layer_called_in_another_way_runs_unfused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The input by name, where the model gives it by position: the fused form does not find it."""
    layer = four_layers().model.model.layers[0]
    monkeypatch.setattr(type(layer).__bases__[0], "forward", lambda *_, **options: options)
    assert layer.forward(hidden_states=1) == {"hidden_states": 1}


def test_a_changed_window_counts_in_layers_computed_together() -> None:
    """The self-check shortens the windows of layers between two passes."""
    target = target_of(tiny_model("gemma2"))
    before = results(target)[0]
    for layer in target.model.model.layers:
        setattr(layer.self_attn, KIND_ATTRIBUTE, LayerKind(window=2))
    assert not torch.equal(before, results(target)[0])


def test_results_within_layers_leave_nothing_behind() -> None:
    target = target_of(tiny_model("llama"))
    tokens, rows, view = torch.arange(60)[None], target.buffers(1, 64), torch.arange(64)
    sizes = []
    for _ in range(2):
        for _ in range(200):  # without a place for all operators' results, 20 MiB
            target.prefill(tokens, torch.zeros(1, dtype=torch.int64), rows, view, 0)
        sizes.append(psutil.Process().memory_info().rss)
    assert sizes[1] - sizes[0] < 4 * 2**20


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


def test_attention_that_is_given_its_mask_by_name_runs_our_kernel() -> None:
    options = dict(ARCHITECTURES["llama"].options) | dict(
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, head_dim=8
    )
    assert target_of(Architecture("afmoe", options)()).attends == "cpu"


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
