"""Libraries that call ``generate`` get the same results from an enabled model. Needs the extra ``clients``."""

from __future__ import annotations

import copy
import importlib.util
import json
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast, pipeline

import decoders
from decoders.engine.decode.engine import Engine
from decoders.engine.decode.request import Request
from decoders.engine.model.self_check import target_of
from decoders.engine.model.weights.quantized import has_kernels
from decoders.hf import wrapper
from decoders.testing import decode, prompts
from decoders.testing.models import VOCAB

pytestmark = pytest.mark.filterwarnings("ignore")

TEXTS = ["the tour the tour the", "a nation", "is is is is is is", "out of the house and out"]
NEW = 16


def needs(library: str) -> pytest.MarkDecorator:
    absent = importlib.util.find_spec(library) is None
    return pytest.mark.skipif(absent, reason=f"{library}, of the extra clients, is not installed")


@pytest.fixture
def calls(enabled: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of the strategies that decoded; there must be some at the end."""
    seen: list[str] = []
    whole = wrapper.decode

    def noted(engine: Engine, request: Request) -> Any:
        seen.append(request.strategy.name)
        return whole(engine, request)

    monkeypatch.setattr(wrapper, "decode", noted)
    yield seen
    assert seen, "the strategy was not used"


@pytest.mark.parametrize("sample", [False, True], ids=["greedy", "top_k 1"])
def test_pipelines_in_batches(
    plain: PreTrainedModel, enabled: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, calls: list[str], sample: bool
) -> None:
    options = dict(max_new_tokens=NEW, do_sample=sample, **({"top_k": 1} if sample else {}))
    results = [
        pipeline("text-generation", model=model, tokenizer=tokenizer, batch_size=4)(TEXTS, **options)
        for model in (plain, enabled)
    ]
    assert results[0] == results[1]


@needs("outlines")  # a skip within the test comes too late: `calls` has asked for a call
def test_outlines_writes_the_same_with_an_enabled_model(
    plain: PreTrainedModel, enabled: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, calls: list[str]
) -> None:
    outlines = pytest.importorskip("outlines")
    results = []
    with torch.compiler.set_stance("force_eager"):  # its masks: to compile them takes longer than all else here
        for model in (plain, enabled):
            ask = outlines.from_transformers(model, tokenizer)
            results.append(
                [ask(text, outlines.regex("[a-f]{3,6}x"), max_new_tokens=NEW, do_sample=False) for text in TEXTS]
            )
    assert results[0] == results[1]
    assert all(text.endswith("x") for text in results[1])


@needs("accelerate")
def test_accelerates_hooks_on_one_device(plain: PreTrainedModel, enabled: PreTrainedModel, calls: list[str]) -> None:
    accelerate = pytest.importorskip("accelerate")
    expected = decode(plain, prompts(2), max_new_tokens=NEW)
    dispatched = accelerate.dispatch_model(enabled, device_map={"": "cpu"}, force_hooks=True)
    assert decode(dispatched, prompts(2), max_new_tokens=NEW).sequences.tolist() == expected.sequences.tolist()


@pytest.fixture
def accelerator() -> Iterator[Any]:
    """As trainers make it: mixed precision, here on the CPU."""
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    yield accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


@needs("accelerate")
def test_rollouts_between_the_steps_of_a_trainer_are_of_the_weights_as_they_are(
    enabled: PreTrainedModel, calls: list[str], accelerator: Any
) -> None:
    """A trainer of trl exchanges `forward`, accelerate wraps that in autocast, and weights change every step."""
    before = enabled.forward

    def fused(self: PreTrainedModel, *arguments: Any, **options: Any) -> Any:
        return before(*arguments, **options)

    enabled.forward = types.MethodType(fused, enabled)  # type: ignore[method-assign]
    model = accelerator.prepare(enabled).train()
    optimizer, texts, engines = torch.optim.AdamW(model.parameters(), lr=0.05), [], set()
    for _ in range(3):
        model.gradient_checkpointing_disable()
        rollout = decode(model, prompts(2), max_new_tokens=NEW).sequences
        fresh = LlamaForCausalLM(model.config).eval()
        fresh.load_state_dict(model.state_dict())
        fresh.generation_config = copy.deepcopy(model.generation_config)
        fresh.generation_config.strategy = None
        assert torch.equal(rollout, decode(fresh, prompts(2), max_new_tokens=NEW).sequences)
        texts.append(rollout.tolist())
        engines.add(vars(model)["generate"].engine())
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
        accelerator.backward(model(input_ids=rollout, labels=rollout.flip(1)).loss)
        optimizer.step()
        optimizer.zero_grad()
    assert texts[0] != texts[1] != texts[2], "the steps must matter"
    assert len(engines) == 1, "what was compiled and remembered is kept"


@needs("torchao")
def test_int8_weights_of_torchao(plain: PreTrainedModel, enabled: PreTrainedModel, calls: list[str]) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    for model in (plain, enabled):
        quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    expected = decode(plain, prompts(2), max_new_tokens=NEW)
    assert decode(enabled, prompts(2), max_new_tokens=NEW).sequences.tolist() == expected.sequences.tolist()


@pytest.mark.in_turns
@needs("torchao")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("name", "kernel"),
    [("int8", True), ("int4", True), ("int8 activations", False)],
)
def test_every_strategy_writes_the_same_with_a_torchao_model(
    dtype: torch.dtype, name: str, kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torchao = pytest.importorskip("torchao.quantization")
    config = {
        "int8": lambda: torchao.Int8WeightOnlyConfig(),
        "int4": lambda: torchao.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=torchao.PerGroup(32)),
        "int8 activations": lambda: torchao.Int8DynamicActivationInt8WeightConfig(),
    }[name]()
    torch.manual_seed(0)
    sizes = dict(vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=2)
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)).to(dtype).eval()
    torchao.quantize_(model, config)
    assert bool(target_of(model).products.quantized.layers) is (kernel and has_kernels())
    decoders.enable(model)
    # Rounded to bfloat16 or int8 on the way, near-ties may turn out otherwise than with transformers' attention.
    same_as_plain = dtype == torch.float32 and name != "int8 activations"
    plain = {} if same_as_plain else {"strategy": "autoregressive"}
    expected = decode(model, prompts(2), max_new_tokens=NEW, do_sample=False, **plain).sequences.tolist()
    for strategy in ("autoregressive", "prompt_lookup", "lookahead"):
        out = decode(model, prompts(2), max_new_tokens=NEW, do_sample=False, strategy=strategy)
        assert out.sequences.tolist() == expected, strategy


@pytest.mark.slow
@needs("torchao")
def test_what_is_written_into_the_parts_of_a_torchao_weight_counts() -> None:
    torchao = pytest.importorskip("torchao.quantization")
    torch.manual_seed(0)
    sizes = dict(vocab_size=VOCAB, hidden_size=128, intermediate_size=256, num_hidden_layers=2)
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4)).bfloat16().eval()
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
    decoders.enable(model)
    options = dict(max_new_tokens=NEW, do_sample=False, strategy="autoregressive")
    seen = [decode(model, prompts(2), **options).sequences.tolist()]
    weight: Any = model.model.layers[0].mlp.up_proj.weight
    levels = weight.qdata.clone()
    for write in (
        lambda: weight.qdata.neg_(),
        lambda: weight.qdata.data.zero_(),
        lambda: weight.scale.data.mul_(-3),
        lambda: setattr(weight, "qdata", levels),
    ):
        write()
        used = decode(model, prompts(2), **options).sequences.tolist()
        fresh = decoders.enable(copy.deepcopy(model))
        assert used == decode(fresh, prompts(2), **options).sequences.tolist()
        seen.append(used)
    assert len({str(tokens) for tokens in seen}) > 2, "the weight must matter"


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a task of lm-evaluation-harness: what follows some texts, up to a blank."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    rows = [{"question": text + more, "answer": "x"} for text in TEXTS for more in ("", " the", " house")]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "tiny.yaml").write_text(f"""
task: tiny
dataset_path: json
dataset_kwargs:
  data_files:
    test: {tmp_path / "data.jsonl"}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs:
  until: ["e", "th"]
  max_gen_toks: {NEW}
  do_sample: false
metric_list:
  - metric: exact_match
""")
    return tmp_path


@pytest.mark.slow
@needs("lm_eval")
def test_lm_evaluation_harness(
    plain: PreTrainedModel, enabled: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, calls: list[str], task: Path
) -> None:
    lm_eval = pytest.importorskip("lm_eval")
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(task), include_defaults=False)
    results = []
    for model in (plain, enabled):
        lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=4)
        out = lm_eval.simple_evaluate(lm, tasks=["tiny"], task_manager=manager, log_samples=True, bootstrap_iters=0)
        results.append([sample["resps"] for sample in out["samples"]["tiny"]])
    assert results[0] == results[1]
    assert len({str(answer) for answer in results[0]}) > 3
