"""PEFT's adapters, inside the layers and in front of the text. Needs the extra ``clients``."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import decoders
from decoders import Scheduler
from decoders.errors import UnsupportedError
from decoders.testing import decode, prompts, tiny_model

pytestmark = pytest.mark.filterwarnings("ignore")

NEW = 16
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


def test_an_adapter_that_needs_its_own_generate_is_refused(plain: PreTrainedModel, tmp_path: Path) -> None:
    """X-LoRA weighs its adapters in a pass before each pass, which its ``generate`` hooks onto the model."""
    peft = pytest.importorskip("peft")
    adapted(copy.deepcopy(plain)).save_pretrained(tmp_path)
    plain.config.use_cache = False
    mixture = peft.XLoraConfig(task_type="CAUSAL_LM", hidden_size=32, xlora_depth=1, adapters={"0": str(tmp_path)})
    model = decoders.enable(peft.get_peft_model(plain, mixture).eval())
    options = {name: value for name, value in OURS.items() if name != "strategy"}
    before = model.generate(**prompts(), **options)
    with pytest.raises(UnsupportedError, match="XLoraModel of PEFT"):
        model.generate(**prompts(), **OURS)
    assert torch.equal(model.generate(**prompts(), **options), before)


def test_a_model_with_an_adapter_drafts(plain: PreTrainedModel) -> None:
    target, draft = decoders.enable(copy.deepcopy(plain)), adapted(plain)
    options = OURS | {"strategy": "speculative", "return_dict_in_generate": True}
    with draft.disable_adapter():  # then the draft model is the target
        agreed = target.generate(**prompts(), **options, assistant_model=draft)
    other = target.generate(**prompts(), **options, assistant_model=draft)
    assert torch.equal(agreed.sequences, other.sequences)
    assert agreed.report.steps < other.report.steps, "the adapter must matter"
