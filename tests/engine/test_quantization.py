"""Quantized weights and a quantized cache: every strategy writes what `autoregressive` writes with the same setting."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

import decoders
from decoders.engine.decode.prompts import PrefillPlan
from decoders.engine.model import cache, invariance, self_check, target, torch_compat
from decoders.engine.model.cache import CacheBuffers, LayerSpec, SlotCache
from decoders.engine.model.compiled import tiers
from decoders.engine.model.compiled.tiers import PassKind
from decoders.engine.model.self_check import target_of
from decoders.engine.model.weights import quantized
from decoders.engine.model.weights.quantization import Precision, QuantizedWeight, quantize
from decoders.errors import SettingsError, UnsupportedError
from decoders.settings import RuntimeSettings
from decoders.testing.exactness import decode, prompts
from decoders.testing.models import tiny_draft, tiny_model

STRATEGIES = ["prompt_lookup", "lookahead", "speculative"]
AS_IT_IS = {"compile": False, "reuse": False}


@pytest.fixture(params=[torch.bfloat16, torch.float32], ids=str)
def dequantized(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """As where long texts are multiplied by wider matrices than 4-bit ones; the shapes that were."""
    shapes: list[tuple[int, ...]] = []
    multiply = torch_compat.multiply_dequantized_int4

    def noted(x: torch.Tensor, *weight: Any) -> torch.Tensor:
        assert x.dtype == request.param
        shapes.append(tuple(x.shape[:-1]))
        return multiply(x, *weight)

    monkeypatch.setattr(torch_compat, "dequantized_type", lambda: request.param)
    monkeypatch.setattr(torch_compat, "multiply_dequantized_int4", noted)
    return shapes


@pytest.fixture(autouse=True)
def tiny_matrices_are_quantized(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "quantize", lambda *given, **named: quantize(*given, smallest=0, **named))
    monkeypatch.setattr(self_check, "quantize", lambda *given, **named: quantize(*given, smallest=0, **named))


def write(model: PreTrainedModel, settings: dict[str, Any], strategy: str = "autoregressive", **options: Any) -> Any:
    options = dict(do_sample=False, max_new_tokens=16, decoders_config=AS_IT_IS | settings) | options
    return decode(model, prompts(2, length=30), strategy=strategy, **options)


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "settings", [{"weights": "int8"}, {"weights": "int4", "kv_cache": "int8"}], ids=["int8", "int4 and cache"]
)
def test_strategies_write_the_tokens_of_plain_decoding(dtype: torch.dtype, settings: dict[str, str]) -> None:
    model, draft = decoders.enable(tiny_model("llama").to(dtype)), tiny_draft("llama").to(dtype)
    expected = write(model, settings)
    assert expected.report.same_bits is True
    for strategy in STRATEGIES:
        extra = {"assistant_model": draft} if strategy == "speculative" else {}
        assert torch.equal(write(model, settings, strategy, **extra).sequences, expected.sequences), strategy


@pytest.mark.in_turns(3)
@pytest.mark.parametrize(
    ("settings", "used"),
    [
        ({}, "keep"),
        ({"draft_weights": "int4"}, "int4"),
        ({"weights": "int8"}, "int8"),
        ({"weights": "int8", "draft_weights": "keep"}, "keep"),
        ({"weights": "int4", "draft_weights": "int8"}, "int8"),
    ],
    ids=str,
)
@pytest.mark.parametrize("strategy", ["speculative", "early_exit"])
def test_draft_models_compute_in_a_number_format_of_their_own(
    settings: dict[str, str], used: str, strategy: str
) -> None:
    model, draft = decoders.enable(tiny_model("llama")), tiny_draft("llama")
    before = {name: value.clone() for name, value in draft.state_dict().items()}
    expected = write(model, settings)
    extra = {"assistant_model": draft} if strategy == "speculative" else {"strategy_config": {"exit_layer": 1}}
    for _ in range(2):
        written = write(model, settings, strategy, **extra)
        assert torch.equal(written.sequences, expected.sequences)
        (stage,) = written.report.stages
        assert stage.weights == used and stage.passes
    assert all(torch.equal(before[name], value) for name, value in draft.state_dict().items())


@pytest.mark.in_turns(2)
@pytest.mark.parametrize(("chunk", "read"), [(512, {(2, 116)}), (96, {(2, 96)})], ids=["at once", "in chunks"])
def test_long_texts_are_read_with_wider_matrices_but_for_their_ends(
    chunk: int, read: set[tuple[int, int]], dequantized: list[tuple[int, ...]]
) -> None:
    model = decoders.enable(tiny_model("llama", hidden_size=64, intermediate_size=128).bfloat16())
    draft = tiny_draft("llama").bfloat16()
    settings, texts = AS_IT_IS | {"weights": "int4", "prefill_chunk": chunk}, prompts(2, length=121)
    expected = decode(model, texts, "autoregressive", max_new_tokens=16, decoders_config=settings)
    assert set(dequantized) == read and expected.report.same_bits is True
    for strategy in STRATEGIES:
        extra = {"assistant_model": draft} if strategy == "speculative" else {}
        written = decode(model, texts, strategy, max_new_tokens=16, decoders_config=settings, **extra)
        assert torch.equal(written.sequences, expected.sequences), strategy
    assert set(dequantized) == read


def test_strategies_that_read_prompts_are_shown_the_same_of_long_texts(
    dequantized: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama", hidden_size=64, intermediate_size=128).bfloat16()
    quantized_target = target_of(model, precision=Precision("int4"))
    assert PrefillPlan.of([121], [0], 512, quantized_target).chunks == [(0, 116), (116, 4)]
    assert PrefillPlan.of([121], [0], 512, quantized_target, leave_last_chunk=True).chunks == [(0, 116)]
    assert PrefillPlan.of([90], [0], 512, quantized_target).chunks == [(0, 92)]
    assert PrefillPlan.of([2001], [0], None, quantized_target).chunks == [(0, 1996), (1996, 4)]
    assert PrefillPlan.of([2001], [0], None, target_of(model)).chunks[0] == (0, 512)
    monkeypatch.setattr(quantized_target, "multiple", 1)  # as with recurrent layers, which run no text again
    assert PrefillPlan.of([121], [0], 512, quantized_target).chunks == [(0, 120)]
    keys = []
    for run in (quantized_target.prefill, functools.partial(quantized_target.features, logits=False)):
        buffers = CacheBuffers.allocate(quantized_target.layout, 1, 192)
        tokens = prompts(1, length=116)["input_ids"]
        run(tokens, torch.zeros(1, dtype=torch.int64), buffers, torch.arange(128), 0)
        keys.append(buffers.keys[-1][:, :, :116])
    assert torch.equal(*keys) and set(dequantized) == {(1, 116)}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_short_texts_and_those_in_float32_are_multiplied_by_the_kernel(
    dequantized: list[tuple[int, ...]], dtype: torch.dtype
) -> None:
    model = decoders.enable(tiny_model("llama", hidden_size=64, intermediate_size=128).to(dtype))
    settings = AS_IT_IS | {"weights": "int4"}
    decode(model, prompts(1, 90), "autoregressive", max_new_tokens=4, decoders_config=settings)
    assert not dequantized
    decode(model, prompts(1, 120), "autoregressive", max_new_tokens=4, decoders_config=settings)
    assert bool(dequantized) == (dtype != torch.float32)  # where a text has the same bits whatever is read beside it


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(("scheme", "kernel"), [("int4", "multiply_int4"), ("int8", "multiply_weight_int8")])
def test_pytorchs_kernels_multiply_bfloat16_alone(
    monkeypatch: pytest.MonkeyPatch, scheme: Any, kernel: str, dtype: torch.dtype
) -> None:
    """Of other types they take 30 times as long."""
    types, multiply = set(), getattr(torch_compat, kernel)

    def noted(*arguments: Any) -> torch.Tensor:
        types.update((arguments[0].dtype, arguments[-1].dtype))
        return multiply(*arguments)

    monkeypatch.setattr(torch_compat, kernel, noted)
    monkeypatch.setattr(torch_compat, "multiplies_int8", lambda: False)
    torch.manual_seed(0)
    layer = nn.Linear(64, 128, bias=False).to(dtype)
    expected = layer.weight.detach().float()
    quantize(layers := nn.ModuleList([layer]), scheme, None, smallest=0)
    with torch.no_grad():
        out = layers[0](torch.eye(64, dtype=dtype))
    assert types == {torch.bfloat16} and out.dtype == dtype
    assert (out.float().T - expected).abs().max() < expected.abs().max() / 12


@pytest.mark.parametrize(("digits", "error"), [(2, 2e-5), (3, 1e-7)])
def test_activations_are_sums_of_bytes(digits: int, error: float) -> None:
    x = torch.cat([torch.randn(4, 300), torch.tensor([[1.0, -1.0, 1e-9] * 100]), torch.zeros(1, 300)])
    rows, step = quantized.quantize_activations(x, digits)
    assert rows.dtype == torch.uint8 and rows.shape == (6 * digits, 300)
    parts = rows.double().sub(128).view(digits, 6, 300)
    whole = sum(part * 256.0 ** (digits - 1 - place) for place, part in enumerate(parts))
    assert isinstance(whole, torch.Tensor)
    assert ((whole * step - x).abs() <= error * x.abs().amax(-1, keepdim=True)).all()


@pytest.mark.usefixtures("dequantized")
def test_few_rows_and_a_matrix_without_whole_blocks_of_outputs_keep_to_the_kernel() -> None:
    layers = nn.ModuleList([nn.Linear(64, 128), nn.Linear(64, 144)]).bfloat16()
    quantize(layers, "int4", None, smallest=0)
    even, odd = (cast(quantized.WeightInt4Linear, layer) for layer in layers)
    assert even.dequantizable and not odd.dequantizable
    x = torch.randn(100, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        by_kernel = even(x), odd(x)
        with quantized.dequantized_products():
            products = even(x), odd(x)
            assert torch.equal(even(x[:95]), by_kernel[0][:95])  # too few rows to pay
    assert torch.equal(products[1], by_kernel[1])
    torch.testing.assert_close(products[0], by_kernel[0], atol=0.02, rtol=0.02)


def test_a_quantized_cache_in_float32_and_a_kept_text() -> None:
    model, settings = decoders.enable(tiny_model("gemma2")), {"kv_cache": "int8", "reuse": True}
    expected = write(model, settings)
    again = write(model, settings, "prompt_lookup")
    assert max(again.report.reused) > 0
    assert torch.equal(again.sequences, expected.sequences)


def test_sampling_writes_the_same_tokens_too() -> None:
    model, settings = decoders.enable(tiny_model("llama")), {"weights": "int8", "kv_cache": "int8"}
    drawn = [write(model, settings, strategy, do_sample=True, seed=3) for strategy in ("autoregressive", "lookahead")]
    assert torch.equal(drawn[0].sequences, drawn[1].sequences)


def test_the_model_itself_stays_and_the_report_tells() -> None:
    model = decoders.enable(tiny_model("llama"))
    before = copy.deepcopy(model.state_dict())
    own = write(model, {})
    quantized_report = write(model, {"weights": "int4", "kv_cache": "int8"}).report
    assert (own.report.weights, own.report.kv_cache) == ("keep", "keep")
    assert (quantized_report.weights, quantized_report.kv_cache) == ("int4", "int8")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(type(module) is not quantized.Int8Linear for module in model.modules())
    assert torch.equal(write(model, {}).sequences, own.sequences)


WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "counted": lambda weight: weight.mul_(-1.5),
    "data": lambda weight: weight.data.mul_(-1.5),
    "numpy": lambda weight: weight.detach().numpy().__imul__(-1.5),
    "other memory": lambda weight: setattr(weight, "data", weight.data * -1.5),
}


@pytest.mark.in_turns(5)
@pytest.mark.parametrize("write_to", WRITES.values(), ids=WRITES.keys())
@pytest.mark.parametrize("settings", [{"weights": "int8"}, {"weights": "int4"}, {"draft_weights": "int8"}], ids=str)
def test_changed_weights_are_quantized_again(settings: dict[str, str], write_to: Callable) -> None:
    model, draft = decoders.enable(tiny_model("llama")), copy.deepcopy(tiny_draft("llama"))
    drafts = "draft_weights" in settings

    def written(model: PreTrainedModel, draft: PreTrainedModel) -> Any:
        return write(model, settings, "speculative", assistant_model=draft) if drafts else write(model, settings)

    written(model, draft)
    with torch.no_grad():
        write_to((draft if drafts else model).model.layers[0].mlp.up_proj.weight)
    used = written(model, draft)
    expected = written(decoders.enable(copy.deepcopy(model)), copy.deepcopy(draft))
    assert torch.equal(used.sequences, expected.sequences)
    assert used.report.accepted == expected.report.accepted, "what the draft model proposed"


@pytest.mark.parametrize("kind", ["linear", "conv1d"])
@pytest.mark.parametrize(("scheme", "error"), [("int8", 0.01), ("int4", 0.09)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_quantized_layers_compute_nearly_the_same_with_the_same_bits_for_any_number_of_rows(
    kind: str, scheme: Any, error: float, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    layer = (nn.Linear(256, 96) if kind == "linear" else Conv1D(96, 256)).to(dtype)
    nn.init.normal_(layer.weight), nn.init.normal_(layer.bias)
    x = torch.randn(40, 256).to(dtype)
    x[:, 3] *= 30  # an outlier
    with torch.no_grad():
        expected = layer(x)
        assert len(quantize(nn.ModuleList([layer]), scheme, None, smallest=0).layers) == 1
        actual = layer(x)
        assert 0 < (actual - expected).norm() / expected.norm() < error
        for rows in (1, 2, 3, 4, 9, 17, 33):
            assert torch.equal(layer(x[:rows]), actual[:rows])


def test_activations_that_layers_share_are_quantized_once_and_writes_are_seen() -> None:
    layers = nn.ModuleList([nn.Linear(32, 32), nn.Linear(32, 32)])
    quantize(layers, "int8", None, smallest=0)
    x = torch.randn(3, 32)
    with torch.no_grad():
        first = layers[0](x)
        x.mul_(2)
        torch.testing.assert_close(layers[0](x) - layers[0].bias, 2 * (first - layers[0].bias), rtol=1e-3, atol=1e-3)


def test_what_does_not_fit_int4_and_the_head_are_int8() -> None:
    layers = nn.ModuleDict({"odd": nn.Linear(48, 32), "even": nn.Linear(64, 32), "head": nn.Linear(64, 32)})
    quantize(layers, "int4", layers["head"], smallest=0)
    assert [type(layer) for layer in layers.values()] == [
        quantized.Int8Linear,
        quantized.WeightInt4Linear,
        quantized.Int8Linear,
    ]


def test_two_engines_share_a_quantized_copy() -> None:
    model = tiny_model("llama")
    first, second = (target_of(model, precision=Precision("int8")) for _ in range(2))
    weights: list[QuantizedWeight] = first.quantized.weights
    assert weights and [id(w) for w in weights] == [id(w) for w in second.quantized.weights]


def test_attention_sees_a_blocks_own_keys_as_later_passes_see_them() -> None:
    spec = LayerSpec(2, 16, 2, 16, torch.float32, torch.device("cpu"), quantized=True)
    buffers = CacheBuffers.allocate([spec], 1, 8)
    states = torch.randn(1, 2, 3, 16)
    now, _ = SlotCache(buffers, torch.tensor([[0, 1, 2]]), 8).update(states, states, 0)
    later, _ = SlotCache(buffers, torch.tensor([[3]]), 8).update(states[:, :, :1], states[:, :, :1], 0)
    assert torch.equal(now[:, :, :3], later[:, :, :3])
    assert 0 < (now[:, :, :3] - states).abs().max() <= states.abs().amax() / 254 * 1.001


def test_a_quantized_cache_is_a_quarter_or_half_as_large() -> None:
    for dtype, share in ((torch.float32, 68 / 256), (torch.bfloat16, 66 / 128)):
        spec = LayerSpec(2, 64, 2, 64, dtype, torch.device("cpu"))
        plain = CacheBuffers.allocate([spec], 2, 32).nbytes
        small = CacheBuffers.allocate([cache.LayerSpec(**vars(spec) | {"quantized": True})], 2, 32).nbytes
        assert small == plain * share


def test_zero_keys_stay_zero() -> None:
    levels, scale = cache.quantize_slots(torch.zeros(1, 1, 2, 4, dtype=torch.float16))
    assert scale.gt(0).all() and not levels.any()


def test_a_quantized_model_has_the_same_bits_in_every_block() -> None:
    found = invariance.check(target_of(tiny_model("qwen2"), precision=Precision("int4", "int8")))
    assert found.holds, str(found)


def test_unknown_precisions_are_refused_and_other_devices_told() -> None:
    model = decoders.enable(tiny_model("llama"))
    for settings in ({"weights": "int2"}, {"kv_cache": "fp8"}):
        with pytest.raises(SettingsError, match="int8"):
            write(model, settings)
    with pytest.raises(UnsupportedError, match="^weights='int8' works on the CPU so far"):
        Precision("int8").check(torch.device("cuda"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [{"weights": "int8"}, {"weights": "int4", "kv_cache": "int8"}], ids=["int8", "int4 and cache"]
)
def test_compiled_steps_write_the_same_tokens(settings: dict[str, str]) -> None:
    model = decoders.enable(tiny_model("llama"))
    expected = write(model, settings)
    for strategy in ("autoregressive", "prompt_lookup"):
        compiled = write(model, settings | {"compile": True}, strategy)
        assert compiled.report.compiled
        assert torch.equal(compiled.sequences, expected.sequences)


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_a_plain_step_of_one_row_runs_one_node_with_the_bits_of_longer_blocks(
    scheme: str, monkeypatch: pytest.MonkeyPatch, block_sizes: list[int]
) -> None:
    model, settings = decoders.enable(tiny_model("llama").bfloat16()), AS_IT_IS | {"weights": scheme}
    options: dict[str, Any] = dict(max_new_tokens=16, output_logits=True)
    single = decode(model, prompts(1, length=30), "autoregressive", decoders_config=settings, **options)
    assert block_sizes == [4, *[1] * 15]  # the first has the prompt's end in front of it
    block_sizes.clear()
    monkeypatch.setattr(target.Target, "takes_single_nodes", lambda self, rows: False)
    padded = decode(model, prompts(1, length=30), "autoregressive", decoders_config=settings, **options)
    assert block_sizes == [4] * 16
    for one, several in zip(single.logits, padded.logits, strict=True):
        assert torch.equal(one, several)


def test_a_plain_step_of_one_row_is_padded_where_one_node_has_other_bits() -> None:
    model = decoders.enable(tiny_model("llama"))
    assert (
        write_one(model, {"weights": "int4"}).report.nodes == 4
    )  # float32: attention sums few queries in another order
    dense = decoders.enable(tiny_model("llama").bfloat16())
    assert write_one(dense, {}).report.nodes == 4


def test_costs_of_a_row_tell_plain_steps_from_blocks(tmp_path: Path) -> None:
    model = decoders.enable(tiny_model("llama").bfloat16())
    engine = vars(model)["generate"].engine(RuntimeSettings.model_validate({"weights": "int4"}))
    curve = engine.calibration.measured(tmp_path, [1], [30], False, anew=True)
    assert [point.nodes for point in curve.points][:2] == [1, 4]


def write_one(model: PreTrainedModel, settings: dict[str, Any]) -> Any:
    return decode(model, prompts(1, length=30), "autoregressive", max_new_tokens=6, decoders_config=AS_IT_IS | settings)


@pytest.mark.slow  # .ci/run runs it
@pytest.mark.usefixtures("traced_only")
def test_a_compiled_step_of_one_row_and_node_gets_a_graph_of_its_own(
    monkeypatch: pytest.MonkeyPatch, block_sizes: list[int]
) -> None:
    monkeypatch.setattr(tiers, "FORWARD_SECONDS", 0.0)
    model = decoders.enable(tiny_model("llama", num_hidden_layers=1).bfloat16())
    settings = {"weights": "int4", "compile": True}
    padded = decode(model, prompts(1), "autoregressive", max_new_tokens=8, decoders_config=settings)
    engine = vars(model)["generate"].engine(RuntimeSettings.model_validate({"weights": "int4"}))
    job = engine.forward_pass.kinds[PassKind(False, single_node=True)].job
    assert padded.report.nodes >= 3 and job is not None and job.wait()
    block_sizes.clear()
    single = decode(model, prompts(1), "autoregressive", max_new_tokens=8, decoders_config=settings)
    # The first step has the prompt's last tokens in front of it, and a block for these.
    assert block_sizes == [4, *[1] * 7] and single.report.compiled_steps == single.report.steps == 8
    assert torch.equal(padded.sequences, single.sequences)
