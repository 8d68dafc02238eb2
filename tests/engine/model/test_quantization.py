"""Quantized weights and a quantized cache: every strategy writes what `autoregressive` writes with the same setting."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

import decoders
from decoders.engine.model import invariance, self_check, slot_cache, target
from decoders.engine.model.blocks import PassInput
from decoders.engine.model.cache import CacheBuffers, LayerSpec
from decoders.engine.model.compiled import tiers
from decoders.engine.model.compiled.tiers import PassKind
from decoders.engine.model.kernels import cpu
from decoders.engine.model.self_check import target_of
from decoders.engine.model.slot_cache import SlotCache
from decoders.engine.model.torch_compat import TorchDispatchMode
from decoders.engine.model.weights import quantized
from decoders.engine.model.weights.quantization import Precision, QuantizedWeight, quantize
from decoders.engine.model.weights.state import WeightState
from decoders.errors import SettingsError, UnsupportedError
from decoders.settings import RuntimeSettings
from decoders.testing.exactness import decode, prompts
from decoders.testing.models import tiny_draft, tiny_model
from decoders.tree import Topology

STRATEGIES = ["prompt_lookup", "lookahead", "speculative"]
AS_IT_IS = {"compile": False, "reuse": False}


@pytest.fixture(autouse=True)
def tiny_matrices_are_quantized(monkeypatch: pytest.MonkeyPatch) -> None:
    if not quantized.has_kernels():
        pytest.skip("weights are quantized where there is a compiler")
    monkeypatch.setattr(target, "quantize", lambda *given, **named: quantize(*given, smallest=0, **named))
    monkeypatch.setattr(self_check, "quantize", lambda *given, **named: quantize(*given, smallest=0, **named))


def write(model: PreTrainedModel, settings: dict[str, Any], strategy: str = "autoregressive", **options: Any) -> Any:
    options = dict(do_sample=False, max_new_tokens=16, decoders_config=AS_IT_IS | settings) | options
    return decode(model, prompts(2, length=30), strategy=strategy, **options)


@pytest.mark.in_turns
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


@pytest.mark.in_turns
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
    assert all(not isinstance(module, quantized.QuantizedLinear) for module in model.modules())
    assert torch.equal(write(model, {}).sequences, own.sequences)


def of_16_bits(name: str, dtype: torch.dtype, *others: str) -> PreTrainedModel:
    """A model in float32 with the numbers of a checkpoint in `dtype`, except in the weights whose names contain one of `others`."""
    model = tiny_model(name).float()
    with torch.no_grad():
        for path, weight in model.named_parameters():
            if not any(other in path for other in others):
                weight.copy_(weight.to(dtype))
    return model


@pytest.mark.parametrize(("name", "dtype"), [("llama", torch.bfloat16), ("gpt2", torch.float16)])
def test_copies_in_16_bits_keep_every_bit_of_the_logits(name: str, dtype: torch.dtype) -> None:
    model = of_16_bits(name, dtype)
    own, narrow = target_of(model), target_of(model, precision=Precision("16bit"))
    assert narrow.matrices and {matrix.dtype for matrix in narrow.matrices} == {dtype}
    assert not narrow.rounds and narrow.products.few_rows == own.products.few_rows
    logits = [each.forward(each._few_tokens()).logits for each in (own, narrow)]
    assert torch.equal(*logits)


def test_strategies_write_the_text_of_transformers_with_copies_in_16_bits() -> None:
    model = decoders.enable(of_16_bits("llama", torch.bfloat16))
    expected = decode(model, prompts(2, length=30), do_sample=False, max_new_tokens=16).sequences
    for strategy in ("autoregressive", *STRATEGIES[:2]):
        out = write(model, {"weights": "16bit"}, strategy)
        assert torch.equal(out.sequences, expected) and out.report.weights == "16bit", strategy


def test_matrices_that_16_bits_do_not_hold_stay(caplog: pytest.LogCaptureFixture) -> None:
    model = of_16_bits("llama", torch.bfloat16, "up_proj")
    layers = target_of(model, precision=Precision("16bit")).products.quantized.layers
    assert layers and not any("up_proj" in path for path in layers) and not caplog.records
    assert not target_of(tiny_model("llama").bfloat16(), precision=Precision("16bit")).matrices
    assert "copies no matrix" in caplog.text


def test_a_changed_weight_counts_whether_16_bits_hold_it_or_not() -> None:
    model, settings = decoders.enable(of_16_bits("llama", torch.bfloat16)), {"weights": "16bit"}
    plain = decoders.enable(copy.deepcopy(model))
    write(model, settings)
    for rounded in (True, False):
        for each in (model, plain):
            weight = each.model.layers[0].mlp.up_proj.weight
            with torch.no_grad():
                weight.mul_(-1.5)
                weight.copy_(weight.bfloat16() if rounded else weight * 1.001)
        assert torch.equal(write(model, settings).sequences, write(plain, {}).sequences)


def test_a_target_whose_copies_no_longer_hold_a_weight_is_not_taken_for_renewed() -> None:
    model = of_16_bits("llama", torch.bfloat16)
    subject = target_of(model, precision=Precision("16bit"))
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(1.001)
    changed = WeightState.of(model)
    for _ in range(2):
        assert not subject.renew(changed) and subject.weights != changed


WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "counted": lambda weight: weight.mul_(-1.5),
    "data": lambda weight: weight.data.mul_(-1.5),
    "numpy": lambda weight: weight.detach().numpy().__imul__(-1.5),
    "other memory": lambda weight: setattr(weight, "data", weight.data * -1.5),
}


@pytest.mark.in_turns
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


def layers_of(
    scheme: Any, layers: dict[str, nn.Module], groups: list[tuple[str, ...]], **options: Any
) -> nn.ModuleDict:
    modules = nn.ModuleDict(layers)
    quantize(modules, scheme, options.pop("head", None), smallest=0, groups=groups)
    return modules


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_layers_that_read_the_same_input_are_one_product_and_writes_are_seen(
    scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    products: list[int] = []
    layers = layers_of(scheme, {name: nn.Linear(64, 32) for name in "qkv"}, [tuple("qkv")])
    multiply = quantized.on_cpu["quantized_linear"]

    def noted(x: torch.Tensor, levels: list, *more: Any) -> torch.Tensor:
        products.append(len(levels))
        return multiply(x, levels, *more)

    monkeypatch.setitem(quantized.on_cpu, "quantized_linear", noted)
    x = torch.randn(3, 64)
    with torch.no_grad():
        first = [layer(x) for layer in layers.values()]
        assert products == [3]
        x.mul_(2)
        for layer, before in zip(layers.values(), first, strict=True):
            torch.testing.assert_close(layer(x) - layer.bias, 2 * (before - layer.bias), rtol=1e-3, atol=1e-3)


def test_layers_of_several_formats_are_several_products() -> None:
    parts = {"q": nn.Linear(64, 32), "k": nn.Linear(64, 32), "v": nn.Linear(64, 32)}
    x = torch.randn(3, 64)
    with torch.no_grad():
        expected = [layer(x) for layer in parts.values()]
        layers = layers_of("int4", parts, [tuple("qkv")], head=parts["v"])
        assert [layer.group is not None for layer in layers.values()] == [True, True, False]
        for layer, exact in zip(layers.values(), expected, strict=True):
            assert (layer(x) - exact).norm() < 0.1 * exact.norm()


def test_layers_with_scales_for_other_groups_of_inputs_are_several_products() -> None:
    torchao = pytest.importorskip("torchao.quantization")
    parts, x = nn.ModuleDict({name: nn.Linear(128, 32) for name in "qk"}), torch.randn(3, 128)
    for name, group in (("q", 32), ("k", 64)):
        config = torchao.IntxWeightOnlyConfig(weight_dtype=torch.int8, granularity=torchao.PerGroup(group))
        torchao.quantize_(parts[name], config)
    with torch.no_grad():
        expected = [parts[name](x) for name in "qk"]
        assert len(quantize(parts, None, None, groups=[tuple("qk")]).layers) == 2
        for name, result in zip("qk", expected, strict=True):
            torch.testing.assert_close(parts[name](x), result, rtol=1e-5, atol=1e-5)


def test_what_does_not_fit_int4_and_the_head_are_int8() -> None:
    sizes = {"inputs": (48, 32), "outputs": (64, 30), "even": (64, 32), "head": (64, 32)}
    layers: dict[str, nn.Module] = {name: nn.Linear(*size) for name, size in sizes.items()}
    made = layers_of("int4", layers, [], head=layers["head"])
    assert [name for name, layer in made.items() if layer.levels.dtype == torch.uint8] == ["even"]
    assert {layer.levels.dtype for layer in made.values()} == {torch.int8, torch.uint8}


def test_int8_levels_of_a_library_are_read_where_they_are() -> None:
    torchao = pytest.importorskip("torchao.quantization")
    layers = nn.ModuleList([nn.Linear(64, 32)])
    torchao.quantize_(layers, torchao.Int8WeightOnlyConfig())
    levels = layers[0].weight.qdata
    quantize(layers, None, None)
    assert layers[0].levels.data_ptr() == levels.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("bits", "group"), [(torch.int8, None), (torch.int8, 32), (torch.int4, 32), (torch.int4, 64), (torch.int4, 128)]
)
def test_a_librarys_layers_give_its_results(bits: torch.dtype, group: int | None, dtype: torch.dtype) -> None:
    torchao = pytest.importorskip("torchao.quantization")
    torch.manual_seed(0)
    layers, x = nn.ModuleList([nn.Linear(384, 48).to(dtype)]), torch.randn(5, 384).to(dtype)
    granularity = torchao.PerGroup(group) if group else torchao.PerAxis(0)
    torchao.quantize_(layers, torchao.IntxWeightOnlyConfig(weight_dtype=bits, granularity=granularity))
    with torch.no_grad():
        expected = layers[0](x)
        assert len(quantize(layers, None, None).layers) == 1
        tolerance = 1e-5 if dtype == torch.float32 else 1e-2  # the library rounds the matrix, too
        torch.testing.assert_close(layers[0](x), expected, rtol=tolerance, atol=tolerance)


def test_without_kernels_weights_are_not_quantized_and_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(quantized.cpu, "chosen", lambda: cpu.ChosenKernels(None, {"avx2": "no C++ compiler"}))
    with pytest.raises(
        UnsupportedError, match=r"^weights='int4' needs this package's kernels .*no C\+\+ compiler.* Install a C\+\+"
    ):
        Precision("int4").check(torch.device("cpu"))
    Precision(cache="int8").check(torch.device("cpu"))
    layer = nn.Linear(64, 32)
    assert not quantize(nn.ModuleList([layer]), "int4", None, smallest=0).layers and type(layer) is nn.Linear


def test_two_engines_share_a_quantized_copy() -> None:
    model = tiny_model("llama")
    first, second = (target_of(model, precision=Precision("int8")) for _ in range(2))
    weights: list[QuantizedWeight] = first.products.quantized.weights
    assert weights and [id(w) for w in weights] == [id(w) for w in second.products.quantized.weights]


def test_attention_sees_a_blocks_own_keys_as_later_passes_see_them() -> None:
    spec = LayerSpec(2, 16, 2, 16, torch.float32, torch.device("cpu"), quantized=True)
    buffers = CacheBuffers.allocate([spec], 1, 8)
    states = torch.randn(1, 2, 3, 16)
    now, _ = SlotCache(buffers, torch.tensor([[0, 1, 2]]), 8).update(states, states, 0)
    later, _ = SlotCache(buffers, torch.tensor([[3]]), 8).update(states[:, :, :1], states[:, :, :1], 0)
    assert torch.equal(now[:, :, :3], later[:, :, :3])
    assert 0 < (now[:, :, :3] - states).abs().max() <= states.abs().amax() / 254 * 1.001


class Widened(TorchDispatchMode):
    """Notes the operators that make numbers of int8 tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        given, made = tree_leaves(args), tree_leaves(out)
        int8 = any(isinstance(each, torch.Tensor) and each.dtype == torch.int8 for each in given)
        if int8 and any(isinstance(each, torch.Tensor) and each.is_floating_point() for each in made):
            self.operators.add(function._schema.name.partition("::")[2])
        return out


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention_reads_a_quantized_cache_as_it_is_stored(name: str, dtype: torch.dtype) -> None:
    """Nothing is dequantized, and a branch of a tree has the bits of the same tokens as a chain."""
    subject = target_of(tiny_model(name).to(dtype), precision=Precision(cache="int8"))
    tokens = torch.arange(4, 24)[None]

    def run(nodes: torch.Tensor, tree: Topology) -> torch.Tensor:
        rows, start = subject.buffers(1, 128), torch.zeros(1, dtype=torch.int64)
        subject.prefill(tokens, start, rows, torch.arange(64), 0)
        return subject.forward(
            PassInput(nodes, start + 20, tree.tensors(1, tokens.device), rows, torch.arange(64))
        ).logits

    with torch.no_grad(), Widened() as widened:
        chain = run(torch.tensor([[30, 31, 32]]), Topology.chain(2))
        branches = run(torch.tensor([[30, 40, 41, 31, 32]]), Topology.branches(2, 2))
    assert widened.operators == {"slot_attention" if name == "gemma4" else "decoder_layers"}
    assert torch.equal(branches[:, [0, 3, 4]], chain)


def test_a_design_that_attends_to_other_keys_than_it_stores_gets_numbers() -> None:
    subject = target_of(tiny_model("deepseek_v3"), precision=Precision(cache="int8"))
    assert subject.attends == "cpu" and not subject.attending.in_levels


def test_a_quantized_cache_is_a_quarter_or_half_as_large() -> None:
    for dtype, share in ((torch.float32, 68 / 256), (torch.bfloat16, 66 / 128)):
        spec = LayerSpec(2, 64, 2, 64, dtype, torch.device("cpu"))
        plain = CacheBuffers.allocate([spec], 2, 32).nbytes
        small = CacheBuffers.allocate([LayerSpec(**vars(spec) | {"quantized": True})], 2, 32).nbytes
        assert small == plain * share


def test_zero_keys_stay_zero() -> None:
    levels, scale = slot_cache.quantize_slots(torch.zeros(1, 1, 2, 4, dtype=torch.float16))
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
    assert block_sizes[0] > 1 and block_sizes[1:] == [1] * 15  # the first has the prompt's end in front of it
    block_sizes.clear()
    monkeypatch.setattr(target.Target, "takes_single_nodes", lambda self, rows: False)
    padded = decode(model, prompts(1, length=30), "autoregressive", decoders_config=settings, **options)
    assert len(block_sizes) == 16 and min(block_sizes) > 1
    for one, several in zip(single.logits, padded.logits, strict=True):
        assert torch.equal(one, several)


def test_a_plain_step_of_one_row_is_padded_where_one_node_has_other_bits() -> None:
    """In float32 torch's attention sums few queries in another order."""
    model = decoders.enable(tiny_model("llama"))
    assert write_one(model, {"weights": "int4", "attention": "sdpa"}).report.nodes == 4
    dense = decoders.enable(tiny_model("llama").bfloat16())
    assert write_one(dense, {"attention": "sdpa"}).report.nodes == 4


def test_costs_of_a_row_tell_plain_steps_from_blocks(tmp_path: Path) -> None:
    model = decoders.enable(tiny_model("llama").bfloat16())
    engine = vars(model)["generate"].engine(RuntimeSettings.model_validate({"weights": "int4"}))
    curve = engine.calibration.measured(tmp_path, [1], [30], False, anew=True)
    assert [point.nodes for point in curve.points][:2] in ([1, 3], [1, 4])


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
    job = engine.forward_pass.tiers.kinds[PassKind(False, single_node=True)].job
    assert padded.report.nodes >= 3 and job is not None and job.wait()
    block_sizes.clear()
    single = decode(model, prompts(1), "autoregressive", max_new_tokens=8, decoders_config=settings)
    assert block_sizes == [1] * 8 and single.report.compiled_steps == single.report.steps == 8
    assert torch.equal(padded.sequences, single.sequences)
