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
from decoders import Scheduler
from decoders.engine.decode.engine import Engine
from decoders.engine.decode.request import Request
from decoders.engine.model.self_check import target_of
from decoders.engine.model.weights.quantized import has_kernels
from decoders.errors import UnsupportedError
from decoders.hf import wrapper
from decoders.testing import decode, prompts, tiny_model
from decoders.testing.models import VOCAB

pytestmark = pytest.mark.filterwarnings("ignore")

TEXTS = ["the tour the tour the", "a nation", "is is is is is is", "out of the house and out"]
NEW = 16


def needs(library: str) -> pytest.MarkDecorator:
    absent = importlib.util.find_spec(library) is None
    return pytest.mark.skipif(absent, reason=f"{library}, of the extra clients, is not installed")


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DECODERS_COMPILE", "false")


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


OURS = dict(strategy="prompt_lookup", max_new_tokens=NEW, do_sample=False)


def adapted(model: PreTrainedModel, seed: int = 0, name: str = "default", into: Any = None) -> Any:
    """`model` with a LoRA adapter whose weights matter, or one more in `into`."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"], task_type="CAUSAL_LM")
    wrapped = peft.get_peft_model(model, config, adapter_name=name) if into is None else into
    if into is not None:
        wrapped.add_adapter(name, config)
    torch.manual_seed(seed)
    with torch.no_grad():
        for weight_name, weight in wrapped.named_parameters():
            if f"lora_B.{name}" in weight_name or f"lora_A.{name}" in weight_name:
                weight.normal_(0, 0.5)
    return wrapped.eval()


@pytest.mark.parametrize("weights", ["keep", "int4"])
def test_a_merged_adapter_counts_in_every_precision(plain: PreTrainedModel, weights: str) -> None:
    own = {"decoders_config": {"weights": weights}} | OURS
    used, fresh = (decoders.enable(adapted(copy.deepcopy(plain))) for _ in range(2))
    used.generate(**prompts(), **own)
    for model in (used, fresh):
        model.merge_adapter()
    assert torch.equal(used.generate(**prompts(), **own), fresh.generate(**prompts(), **own))


@pytest.mark.parametrize(("weights", "close"), [("keep", 1e-3), ("int8", 2.0)])
def test_an_adapter_that_parametrizes_a_weight_during_its_pass_counts(weights: str, close: float) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", r=4, target_modules=[], target_parameters=["q_proj.weight"], init_lora_weights=False
    )
    torch.manual_seed(0)
    model = peft.get_peft_model(tiny_model("llama", hidden_size=128), config).eval()
    options = {"max_new_tokens": 1, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    decoders.enable(model).merge_adapter()
    for change in (lambda: None, model.unmerge_adapter):
        change()
        theirs = model.generate(**prompts(), **options)
        ours = model.generate(**prompts(), **options, strategy="prompt_lookup", decoders_config={"weights": weights})
        assert (ours.logits[0] - theirs.logits[0]).abs().max() < close
    with model.disable_adapter():
        bare = model.generate(**prompts(), **options)
    assert (bare.logits[0] - theirs.logits[0]).abs().max() > 2 * close, "the adapter must matter"


def test_lora_through_its_wrapper(plain: PreTrainedModel) -> None:
    bare = decode(plain, prompts(2), max_new_tokens=NEW).sequences
    model = decoders.enable(adapted(plain))
    base = {k: v for k, v in OURS.items() if k != "strategy"}

    def compare() -> torch.Tensor:
        expected = model.generate(**prompts(2), **base)
        assert torch.equal(model.generate(**prompts(2), **OURS), expected)
        return expected

    first = compare()
    assert not torch.equal(first, bare), "the adapter must matter"
    with model.disable_adapter():
        assert torch.equal(compare(), bare)
    assert torch.equal(compare(), first)
    adapted(plain, 1, "other", into=model)
    assert torch.equal(compare(), first)
    model.set_adapter("other")
    assert not torch.equal(compare(), first)
    model.base_model.set_adapter(["default", "other"])
    compare()
    model.set_adapter("default")
    model.merge_adapter()
    compare()
    model.unmerge_adapter()
    compare()
    decoders.disable(model)
    assert "generate" not in vars(model)


@pytest.mark.in_turns
@pytest.mark.parametrize("method", ["merge_and_unload", "unload"])
@pytest.mark.parametrize("weights", ["keep", "int8"])
def test_what_is_left_without_an_adapter_is_enabled(
    plain: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, method: str, weights: str
) -> None:
    own = {"decoders_config": {"weights": weights}} | OURS
    fresh = getattr(adapted(copy.deepcopy(plain)), method)()
    expected = decoders.enable(fresh).generate(**prompts(2), **own)
    model = decoders.enable(adapted(copy.deepcopy(plain)), tokenizer=tokenizer)
    model.generate(**prompts(2), **own)
    left = getattr(model, method)()
    assert type(left) is type(plain)
    assert torch.equal(left.generate(**prompts(2), **own), expected)
    assert vars(left)["generate"].tokenizer is tokenizer
    decoders.disable(left)
    assert "generate" not in vars(left)


def test_a_model_that_was_enabled_before_it_got_an_adapter_stays_enabled(plain: PreTrainedModel) -> None:
    model = decoders.enable(copy.deepcopy(plain))
    wrapped = adapted(model)
    wrapped.generate(**prompts(2), **OURS)
    left = wrapped.merge_and_unload()
    assert left is model
    expected = decoders.enable(copy.deepcopy(left)).generate(**prompts(2), **OURS)
    assert torch.equal(left.generate(**prompts(2), **OURS), expected)


def test_copies_of_a_model_with_an_adapter_are_taken_apart_by_themselves(plain: PreTrainedModel) -> None:
    model = decoders.enable(adapted(plain))
    deep, shallow = copy.deepcopy(model), copy.copy(model)
    assert not {"generate", "merge_and_unload", "unload"} & vars(shallow).keys()
    left = deep.merge_and_unload()
    assert left is deep.get_base_model() and left is not model.get_base_model()
    assert torch.equal(
        left.generate(**prompts(2), **OURS), decoders.enable(copy.deepcopy(left)).generate(**prompts(2), **OURS)
    )
    before = model.generate(**prompts(2), **OURS)
    decoders.disable(model)
    assert not {"generate", "merge_and_unload", "unload"} & vars(model).keys()
    assert torch.equal(decoders.enable(model).generate(**prompts(2), **OURS), before), "the adapter is still there"
    prompt = pytest.importorskip("peft").PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    learnt = decoders.enable(pytest.importorskip("peft").get_peft_model(copy.deepcopy(left), prompt))
    assert "merge_and_unload" not in vars(learnt), "nothing can be taken off"


@torch.no_grad()
def passes_of(model: Any, ids: torch.Tensor, count: int) -> torch.Tensor:
    """What a model writes behind a prompt, one forward pass for each token. PEFT's own generate puts a soft prompt in front of each
    token with transformers 5.24, whose word for the cache it does not know.
    """
    written = ids
    for _ in range(count):
        written = torch.cat([written, model(input_ids=written).logits[:, -1].argmax(-1)[:, None]], 1)
    return written[0, ids.shape[1] :]


@pytest.mark.parametrize("kind", ["PrefixTuningConfig", "PromptEncoderConfig"])
def test_soft_prompts_stand_in_front_of_every_prompt(plain: PreTrainedModel, kind: str) -> None:
    peft = pytest.importorskip("peft")
    options = {"encoder_hidden_size": 16} if kind == "PromptEncoderConfig" else {}
    wrapped = peft.get_peft_model(
        plain, getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=4, **options)
    ).eval()
    generator = torch.Generator().manual_seed(3)
    for parameter in wrapped.prompt_encoder.parameters():
        parameter.data.normal_(0, 0.5, generator=generator)
    model, inputs = decoders.enable(wrapped), prompts(3)
    texts = [ids[mask.bool()][None] for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)]
    expected = torch.stack([passes_of(wrapped, text, NEW) for text in texts])
    for _ in range(2):
        out = model.generate(**inputs, **OURS)
        assert torch.equal(out[:, :24], inputs["input_ids"]) and torch.equal(out[:, 24:], expected)
    with (
        Scheduler(model, strategy="prompt_lookup") as scheduler,
        pytest.raises(UnsupportedError, match="soft prompt of PEFT"),
    ):
        scheduler.submit([5, 6, 7], max_new_tokens=4)
    bare = plain.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    with wrapped.disable_adapter():
        assert torch.equal(model.generate(**inputs, **OURS), bare)
    decoders.disable(model)
    assert not torch.equal(bare[:, 24:], expected)


def test_soft_prompts_that_depend_on_more_are_refused(plain: PreTrainedModel) -> None:
    peft = pytest.importorskip("peft")
    several = peft.MultitaskPromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4, num_tasks=2)
    model = decoders.enable(peft.get_peft_model(copy.deepcopy(plain), several).eval())
    with pytest.raises(UnsupportedError, match="MULTITASK_PROMPT_TUNING of PEFT is not supported"):
        model.generate(**prompts(), **OURS)
    wrapped = peft.get_peft_model(plain, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)).eval()
    decoders.enable(plain)
    with pytest.raises(UnsupportedError, match="prepare_inputs_for_generation"):
        wrapped.generate(**prompts(), **OURS)
    wrapped.generate(**prompts(), max_new_tokens=NEW, do_sample=False)
    expected = plain.generate(**prompts(), max_new_tokens=NEW, do_sample=False)
    assert torch.equal(plain.generate(**prompts(), **OURS), expected), "the model itself is free of it"
