"""What the loop cannot honour is refused in so many words, before anything is touched."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel

import decoders
from decoders.engine.model import layout
from decoders.engine.model.layout import refuse_unfit
from decoders.errors import ContextLengthError, DecodersError, SettingsError, UnknownNameError, UnsupportedError
from decoders.strategies import Autoregressive, PromptLookup
from decoders.testing import UNSUPPORTED, prompts, tiny_model

EAGER = {"compile": False}


def state_of(model: PreTrainedModel) -> dict[str, Any]:
    """Everything of a model that a failed call could have changed."""
    return {
        "config": model.config.to_dict(),
        "attention": model.config._attn_implementation,
        "generation_config": model.generation_config.to_dict(),
        "weights": {name: (t.data_ptr(), t._version) for name, t in model.state_dict(keep_vars=True).items()},
        "training": model.training,
        "attributes": set(vars(model)),
    }


def assert_refused(model: PreTrainedModel, error: type[Exception], message: str, **call: Any) -> str:
    """The call fails with `error`, and the model decodes plainly and is configured as before."""
    inputs = {"input_ids": prompts()["input_ids"]}
    before, plain = state_of(model), model.generate(**inputs, do_sample=False, max_new_tokens=4)
    with pytest.raises(error, match=message) as caught:
        model.generate(**(inputs | {"strategy": "prompt_lookup", "max_new_tokens": 4, "decoders_config": EAGER} | call))
    assert isinstance(caught.value, (DecodersError, error))
    assert state_of(model) == before
    assert torch.equal(model.generate(**inputs, do_sample=False, max_new_tokens=4), plain)
    return str(caught.value)


@pytest.mark.parametrize(
    "argument, advice",
    [
        (dict(num_beams=3), "beam search"),
        (dict(penalty_alpha=0.6, top_k=4), "contrastive"),
        (dict(dola_layers="low"), "DoLa"),
        (dict(use_cache=False), "key-value cache"),
        (dict(assistant_early_exit=1), "choose the strategy 'early_exit'"),
        (dict(guidance_scale=1.5), "guidance"),
        (dict(output_attentions=True), "attention"),
        (dict(output_hidden_states=True), "output_hidden_states=True"),
        (dict(cache_implementation="quantized"), "static cache"),
        (dict(custom_generate=lambda model, **kwargs: None), "custom_generate"),
        (dict(custom_generate="transformers-community/dola"), "custom_generate"),
        (dict(synced_gpus=True), "sharded"),
        (dict(token_healing=True), "token_healing"),
        (dict(position_ids=torch.arange(24)[None] + 3), "position_ids"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_arguments_that_cannot_be_honoured_name_the_alternative(
    llama: PreTrainedModel, argument: dict[str, Any], advice: str
) -> None:
    message = assert_refused(llama, UnsupportedError, advice, **argument)
    assert next(iter(argument)) in message


@pytest.mark.parametrize(
    "setting",
    [dict(num_beams=3), dict(use_cache=False), dict(output_attentions=True), dict(guidance_scale=2.0)],
    ids=str,
)
def test_the_same_is_refused_in_a_generation_config(llama: PreTrainedModel, setting: dict[str, Any]) -> None:
    config = GenerationConfig(pad_token_id=0, return_dict_in_generate=True, **setting)
    assert_refused(llama, UnsupportedError, next(iter(setting)), generation_config=config)


def test_the_same_is_refused_in_the_models_own_generation_config(fresh: PreTrainedModel) -> None:
    fresh.generation_config.num_beams = 2
    assert_refused(
        fresh,
        UnsupportedError,
        r"num_beams=2.*set num_beams to None there \(model.generation_config.num_beams = None\)",
    )
    # transformers fills the gaps of a config given in the call from the model's.
    assert_refused(fresh, UnsupportedError, "num_beams", generation_config=GenerationConfig(pad_token_id=0))


def test_what_the_call_says_counts_before_the_models_own_generation_config(fresh: PreTrainedModel) -> None:
    fresh.generation_config.num_beams, fresh.generation_config.use_cache = 2, False
    options = dict(strategy="prompt_lookup", max_new_tokens=4, decoders_config=EAGER)
    fresh.generate(**prompts(), num_beams=1, use_cache=True, **options)
    assert "generation_config" not in assert_refused(fresh, UnsupportedError, "num_beams=3", num_beams=3)


def test_a_hint_of_the_models_own_generation_config_says_where_it_stands(fresh: PreTrainedModel) -> None:
    fresh.generation_config.max_matching_ngram_size = 2
    for strategy, error in (("autoregressive", UnsupportedError), (PromptLookup(), SettingsError)):
        assert_refused(fresh, error, r"model.generation_config.max_matching_ngram_size = None", strategy=strategy)
    assert "generation_config" not in assert_refused(
        fresh, UnsupportedError, "num_assistant_tokens", strategy="autoregressive", num_assistant_tokens=3
    )


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_models_that_do_not_fit_are_refused_and_still_decode_plainly(name: str) -> None:
    model = decoders.enable(tiny_model(name))
    assert_refused(model, UnsupportedError, "without strategy=")


class Needy(Autoregressive):
    name = "needy"
    needs_assistant = True


MERGED = "prompt_lookup+autoregressive"


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (UnknownNameError, "Did you mean 'prompt_lookup'.*Choose from: .*autoregressive", dict(strategy="promt_lookup")),
        (UnknownNameError, "Did you mean 'prompt_lookup'", dict(strategy="autoregressive+prompt_lokup")),
        (UnknownNameError, "Did you mean 'prompt_lookup'.* in strategy_config= or --set", dict(strategy="prompt_lookup[length=4]")),
        (UnknownNameError, "in verifier_config=", dict(verifier="typical[epsilon=0.1]")),
        (SettingsError, "Did you mean 'max_ngram'", dict(strategy_config={"max_ngrams": 2})),
        (SettingsError, "Did you mean 'compile'", dict(decoders_config={"compiel": False})),
        (SettingsError, "length", dict(strategy_config={"length": 0})),
        (SettingsError, "length", dict(strategy_config={"length": "many"})),
        (SettingsError, "min_ngram", dict(strategy_config={"max_ngram": 2, "min_ngram": 3})),
        (SettingsError, "strategies as keys: .*merged; not", dict(strategy=MERGED, strategy_config={"length": 3})),
        (SettingsError, "only once", dict(strategy="prompt_lookup+prompt_lookup")),
        (SettingsError, "strategy", dict(strategy=42)),
        (SettingsError, "strategy", dict(strategy={"name": "prompt_lookup"})),
        (SettingsError, "strategy", dict(strategy=GenerationConfig)),
        (SettingsError, "already holds", dict(strategy=PromptLookup(), strategy_config={"length": 3})),
        (UnsupportedError, "needs assistant_model=", dict(strategy=Needy)),
        (SettingsError, "its path as a string, not 3", dict(strategy="speculative", assistant_model=3)),
        (UnknownNameError, "Did you mean 'rejection'", dict(verifier="rejektion")),
        (SettingsError, "must be a name, a Verifier class or a Verifier, not int", dict(verifier=3)),
        (ValueError, "max_new_tokenz", dict(max_new_tokenz=3)),
        (SettingsError, "not both", dict(do_sample=True, seed=1, generator=torch.Generator())),
        (ContextLengthError, "empty", dict(input_ids=torch.empty(1, 0, dtype=torch.int64))),
        (
            ContextLengthError, "empty",
            dict(input_ids=torch.tensor([[0, 5], [0, 0]]), attention_mask=torch.tensor([[0, 1], [0, 0]])),
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_what_makes_no_sense_is_refused_with_what_would(
    llama: PreTrainedModel, error: type[Exception], message: str, call: dict[str, Any]
) -> None:
    assert_refused(llama, error, message, **call)


@pytest.mark.parametrize(
    "own",
    [dict(strategy_config={"length": 3}), dict(seed=1), dict(generator=torch.Generator()), dict(grammar="a*")],
    ids=lambda own: next(iter(own)),
)
def test_our_keywords_need_a_strategy(llama: PreTrainedModel, own: dict[str, Any]) -> None:
    assert_refused(
        llama, SettingsError, f"{next(iter(own))} needs a strategy", strategy=None, decoders_config=None, **own
    )


def test_what_exceeds_the_context_is_refused_with_what_would_fit(llama: PreTrainedModel) -> None:
    message = assert_refused(llama, ContextLengthError, "context of 512", max_new_tokens=500)
    assert "489" in message
    long = torch.ones(1, 600, dtype=torch.int64)
    with pytest.raises(ContextLengthError, match="a prompt has 600 tokens, and the model's context is 512: shorten"):
        llama.generate(long, attention_mask=long, max_new_tokens=1, strategy="autoregressive")


@pytest.mark.in_turns
@pytest.mark.parametrize("name", ["llama", "gpt2", "opt"])
@pytest.mark.parametrize(
    "strategy", ["autoregressive", PromptLookup(length=10), PromptLookup(branches=3, length=8)], ids=str
)
def test_the_last_token_needs_no_position(name: str, strategy: Any) -> None:
    """Drafts that reach behind the model's positions are not kept."""
    model = decoders.enable(tiny_model(name))
    ids = prompts()["input_ids"].repeat(1, 21)[:, :500]
    call = dict(input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=13)
    ours = model.generate(**call, strategy=strategy, decoders_config=EAGER)
    assert ours.shape == (1, 513)
    assert torch.equal(ours, model.generate(**call))


@pytest.mark.parametrize("mask", [[1, 1, 1, 0], [1, 0, 1, 1], [0, 1, 0, 1]], ids=["right", "hole", "both"])
def test_padding_elsewhere_than_on_the_left_is_refused(llama: PreTrainedModel, mask: list[int]) -> None:
    inputs = dict(input_ids=torch.tensor([[5, 6, 7, 8], [5, 6, 7, 8]]), attention_mask=torch.tensor([mask, [1] * 4]))
    message = assert_refused(llama, UnsupportedError, "padded on the left", **inputs)
    assert "padding_side" in message


def test_only_generating_models_can_be_enabled() -> None:
    with pytest.raises(UnsupportedError, match="Linear"):
        decoders.enable(torch.nn.Linear(2, 2))  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="LlamaModel"):
        decoders.enable(tiny_model("llama").model)


def test_several_devices_without_tensor_parallelism_are_refused_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = decoders.enable(tiny_model("llama"))
    elsewhere = SimpleNamespace(device=torch.device("cuda:1"))
    monkeypatch.setattr(layout, "parameters_in", lambda modules: [torch.zeros(1), elsewhere])
    with pytest.raises(UnsupportedError, match=r'spread over cpu, cuda:1.*torchrun.*tp_plan="auto"'):
        refuse_unfit(model)


def test_calls_within_a_recording_of_the_callers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(UnsupportedError, match=r"torch\.cuda\.graph.*Call it outside"):
        layout.refuse_capture(torch.device("cuda"))
    layout.refuse_capture(torch.device("cpu"))


@pytest.mark.filterwarnings("ignore")  # transformers and peft disagree about a deprecated name
def test_adapters_that_begin_within_the_prompt_are_refused() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", alora_invocation_tokens=[9, 11])
    model = decoders.enable(peft.get_peft_model(tiny_model("llama"), config).eval())
    with pytest.raises(UnsupportedError, match="aLoRA"):
        model.generate(**prompts(), strategy="prompt_lookup", max_new_tokens=4)


@pytest.mark.filterwarnings("ignore")  # transformers and peft disagree about a deprecated name
def test_adapters_by_row_are_refused_and_leave_no_hooks() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    base = decoders.enable(tiny_model("llama"))
    model = peft.get_peft_model(base, config)
    model.add_adapter("two", config)
    model.eval()
    call = dict(max_new_tokens=4, do_sample=False)
    one = prompts()
    expected = model.generate(**one, **call)
    for enable in (lambda: base, lambda: decoders.enable(model)):
        enable()
        with pytest.raises(UnsupportedError, match=r"adapter_names=.*set_adapter"):
            model.generate(**prompts(2), adapter_names=["default", "two"], strategy="prompt_lookup", **call)
        assert not any(module._forward_pre_hooks for module in model.modules())
        assert torch.equal(model.generate(**one, **call), expected)
