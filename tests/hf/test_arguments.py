"""Every argument of generate works as in transformers, is translated, or is refused in so many words."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, GenerationMixin, LogitsProcessor, PreTrainedModel, TextStreamer

import decoders
from decoders.errors import ContextLengthError, DecodersError, InputError, SettingsError, UnsupportedError
from decoders.hf.arguments import HINTS, HONOURED, REFUSED, TRANSLATED, UNSAID
from decoders.testing import Replay, decode, prompts, tiny_model
from decoders.testing.models import VOCAB

EAGER = {"compile": False}
CALL = dict(strategy="prompt_lookup", decoders_config=EAGER, max_new_tokens=6, do_sample=False)


def test_every_argument_of_the_installed_transformers_has_its_place() -> None:
    """An argument that a new version adds fails here until somebody has decided what it means."""
    attributes = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    parameters = set(inspect.signature(GenerationMixin.generate).parameters) - {"self", "kwargs"}
    places = [set(HONOURED), set(REFUSED), set(TRANSLATED), set(HINTS)]
    assert (attributes | parameters) - set().union(*places) == set()
    assert sum(map(len, places)) == len(set().union(*places)), "one place each"


#: What an argument that works is tried with, if it can be tried with a tiny model in a line; the others have tests of their own.
WORKS: dict[str, Any] = {
    "min_length": 28, "min_new_tokens": 4, "top_k": 5, "top_p": 0.8, "min_p": 0.1, "typical_p": 0.7, "top_h": 0.5,
    "epsilon_cutoff": 1e-3, "eta_cutoff": 1e-3, "temperature": 0.7, "repetition_penalty": 1.3,
    "encoder_repetition_penalty": 1.2, "no_repeat_ngram_size": 2, "encoder_no_repeat_ngram_size": 2,
    "bad_words_ids": [[5], [7, 9]], "renormalize_logits": True, "forced_bos_token_id": 5, "forced_eos_token_id": 9,
    "remove_invalid_values": True, "exponential_decay_length_penalty": (2, 1.2), "suppress_tokens": [3, 4],
    "begin_suppress_tokens": [8], "sequence_bias": [[[5], -3.0], [[6], 2.0]], "eos_token_id": [9, 11], "pad_token_id": 2,
    "length_penalty": 2.0, "early_stopping": True, "num_return_sequences": 2, "max_time": 60.0, "diversity_penalty": 0.0,
}  # fmt: skip


#: Those that greedy search does not ask for.
OF_SAMPLING = {
    "top_k", "top_p", "min_p", "typical_p", "top_h", "epsilon_cutoff", "eta_cutoff", "temperature", "num_return_sequences",
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "sample"),
    [
        pytest.param(name, sample, marks=() if sample == (name in OF_SAMPLING) else pytest.mark.slow)
        for name in sorted(WORKS)
        for sample in (False, True)
        if sample or name != "num_return_sequences"  # greedy search has one answer to return
    ],
)
def test_what_works_means_what_it_means_in_transformers(llama: PreTrainedModel, name: str, sample: bool) -> None:
    options = {**CALL, name: WORKS[name], "do_sample": sample, "eos_token_id": WORKS.get("eos_token_id")}
    inputs = prompts(2)
    if not sample:
        expected = llama.generate(
            **inputs, **{k: v for k, v in options.items() if k not in ("strategy", "decoders_config")}
        )
        assert llama.generate(**inputs, **options).tolist() == expected.tolist()
        return
    # Sampled: the distribution is that of transformers' processors, and every strategy draws the same.
    first = llama.generate(**inputs, **options, seed=3)
    again = llama.generate(**inputs, **(options | {"strategy": "autoregressive"}), seed=3)
    assert first.tolist() == again.tolist()


@pytest.mark.parametrize(
    ("strategy", "given", "settings"),
    [
        ("prompt_lookup", {"prompt_lookup_num_tokens": 3}, {"length": 3}),
        ("prompt_lookup", {"max_matching_ngram_size": 2}, {"max_ngram": 2}),
        ("speculative", {"num_assistant_tokens": 3}, {"length": 3}),
        ("speculative", {"num_assistant_tokens_schedule": "heuristic"}, {"schedule": "heuristic"}),
        ("speculative", {"num_assistant_tokens_schedule": "heuristic_transient"}, {"schedule": "heuristic"}),
        (
            "threshold",
            {"assistant_confidence_threshold": 0.3, "num_assistant_tokens": 4},
            {"threshold": 0.3, "max_length": 4},
        ),
    ],
)
@pytest.mark.parametrize("place", ["call", "config"])
def test_drafting_hints_are_the_settings_they_stand_for(
    llama: PreTrainedModel, strategy: str, given: dict[str, Any], settings: dict[str, Any], place: str
) -> None:
    more = {"assistant_model": tiny_model("llama")} if strategy != "prompt_lookup" else {}
    if place == "config":
        given = {"generation_config": GenerationConfig(max_new_tokens=6, do_sample=False, pad_token_id=0, **given)}
    out = decode(llama, prompts(), strategy, decoders_config=EAGER, max_new_tokens=6, **given, **more)
    assert out.report.settings.items() >= settings.items()


def test_hints_of_merged_strategies_go_to_those_that_take_them(llama: PreTrainedModel) -> None:
    out = decode(
        llama, prompts(), "prompt_lookup+ngram", decoders_config=EAGER, max_new_tokens=6, prompt_lookup_num_tokens=3
    )
    assert out.sequences.shape[1] == prompts()["input_ids"].shape[1] + 6


def test_a_hint_that_a_strategy_has_no_use_for_is_refused(llama: PreTrainedModel) -> None:
    for hint in HINTS[:3]:
        value = {"num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0.3}.get(hint, 3)
        with pytest.raises(UnsupportedError, match=f"{hint}=.* does not apply to strategy 'prompt_lookup'"):
            llama.generate(**prompts(), **CALL, **{hint: value})
    with pytest.raises(UnsupportedError, match="choose the strategy 'prompt_lookup'"):
        llama.generate(**prompts(), **(CALL | {"strategy": "autoregressive"}), prompt_lookup_num_tokens=3)


def test_what_older_versions_put_into_every_config_says_nothing(llama: PreTrainedModel) -> None:
    config = GenerationConfig(max_new_tokens=6, do_sample=False, pad_token_id=0)
    for name, value in UNSAID.items():
        setattr(config, name, value)
    out = decode(llama, prompts(), "prompt_lookup", decoders_config=EAGER, generation_config=config)
    assert out.sequences.shape[1] == prompts()["input_ids"].shape[1] + 6
    draft = dict(assistant_model=tiny_model("llama"), generation_config=config)
    assert decode(llama, prompts(), "speculative", decoders_config=EAGER, **draft).report.settings["length"] == 5


def test_a_setting_given_twice_is_refused_unless_both_agree(llama: PreTrainedModel) -> None:
    with pytest.raises(SettingsError, match="set the same setting"):
        llama.generate(**prompts(), **CALL, prompt_lookup_num_tokens=3, strategy_config={"length": 4})
    llama.generate(**prompts(), **CALL, prompt_lookup_num_tokens=3, strategy_config={"length": 3})
    with pytest.raises(SettingsError, match="already holds its settings"):
        llama.generate(
            **prompts(), **(CALL | {"strategy": decoders.strategies.PromptLookup()}), prompt_lookup_num_tokens=3
        )


def test_transformers_words_for_settings_of_the_loop(llama: PreTrainedModel) -> None:
    class Watch(Replay):
        name = "watch"

        def start(self, context: Any) -> Any:
            seen.append(context.compile(print) is print)
            return super().start(context)

    seen: list[bool] = []
    strategy = Watch(texts=((1, 2, 3),), wrong_every=0)
    llama.generate(**prompts(), strategy=strategy, max_new_tokens=2, disable_compile=True)
    llama.generate(
        **prompts(),
        strategy=strategy,
        generation_config=GenerationConfig(disable_compile=True, max_new_tokens=2, pad_token_id=0),
    )
    assert seen == [True, True]
    expected = llama.generate(**prompts(), **CALL)
    assert torch.equal(llama.generate(**prompts(), **CALL, prefill_chunk_size=5), expected)
    with pytest.raises(SettingsError, match="prefill_chunk"):
        llama.generate(**prompts(), **CALL, prefill_chunk_size=0)


def bad(value: Any) -> dict[str, Any]:
    return {"input_ids": value}


IDS = torch.arange(3, 11)[None]


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (dict(strategy_config=[1]), SettingsError, r"strategy_config must be a dict of settings, .* not \[1\]"),
        (dict(strategy_config="length"), SettingsError, "strategy_config must be a dict"),
        (dict(strategy_config={1: 2}), SettingsError, "the key 1"),
        (dict(strategy_config={"prompt_lookup": {"length": 3}}), SettingsError, "must contain the settings themselves"),
        (dict(decoders_config=5), SettingsError, "decoders_config must be a dict"),
        (dict(decoders_config={"slots": 10**13, "compile": False}), DecodersError, "no memory for the key-value cache"),
        (dict(seed="7"), SettingsError, "seed must be a whole number, not '7'"),
        (dict(seed=1.5), SettingsError, "seed must be a whole number"),
        (dict(seed=2**63), SettingsError, r"seed must be from -2\*\*63 to 2\*\*63 - 1, not 9223372036854775808"),
        (dict(seed=torch.tensor(3)), SettingsError, "seed must be a whole number"),
        (dict(generator=5), SettingsError, "generator must be a torch.Generator, not 5"),
        (dict(generation_config=5), SettingsError, "generation_config must be a GenerationConfig, not 5"),
        (dict(max_new_tokens=3.0), SettingsError, "max_new_tokens must be a whole number, not 3.0"),
        (dict(max_new_tokens=torch.tensor(3)), SettingsError, "max_new_tokens must be a whole number"),
        (dict(eos_token_id=[[1]]), SettingsError, "eos_token_id must be a token id or a flat list"),
        (dict(eos_token_id="</s>"), SettingsError, "eos_token_id must be a token id"),
        (dict(eos_token_id=torch.tensor([1.0])), SettingsError, "eos_token_id must be a token id or a flat list"),
        (dict(eos_token_id=torch.tensor([[1]])), SettingsError, "eos_token_id must be a token id or a flat list"),
        (dict(pad_token_id=[1]), SettingsError, "pad_token_id must be a token id"),
        (dict(num_return_sequences=0), SettingsError, "num_return_sequences must be at least 1, not 0"),
        (dict(stop_strings=3), SettingsError, "stop_strings must be a text or a list of texts"),
        (dict(stop_strings=[3]), SettingsError, r"none of them empty, not \[3\]"),
        (dict(stop_strings=["."] + [""]), SettingsError, "none of them empty"),
        (dict(streamer=True), SettingsError, r"streamer must be an object with put\(\) and end\(\).*, not True"),
        (dict(streamer=print), SettingsError, "such as TextStreamer"),
        (dict(streamer=TextStreamer), SettingsError, "such as TextStreamer"),
        (dict(logits_processor=print), SettingsError, "logits_processor must be a list of LogitsProcessor"),
        (dict(stopping_criteria=print), SettingsError, "stopping_criteria must be a list of StoppingCriteria"),
        (dict(stopping_criteria=[5]), SettingsError, "stopping_criteria must be a list of StoppingCriteria"),
        (dict(logits_processor=[5]), SettingsError, "logits_processor must be a list of LogitsProcessor"),
        (dict(assistant_tokenizer="x"), SettingsError, "assistant_tokenizer must be a tokenizer of transformers, not"),
        (dict(do_sample=True, top_p="0.9"), SettingsError, "top_p must be a number from 0 to 1, not '0.9'"),
        (dict(do_sample=True, top_p=95), SettingsError, "top_p must be a number from 0 to 1, not 95"),
        (dict(do_sample=True, top_p=math.nan), SettingsError, "top_p must be a number from 0 to 1, not nan"),
        (dict(do_sample=True, temperature="0.7"), SettingsError, "temperature must be a number above 0, not '0.7'"),
        (dict(do_sample=True, temperature=math.nan), SettingsError, "temperature must be a number above 0, not nan"),
        (dict(repetition_penalty="1.2"), SettingsError, "repetition_penalty must be a number above 0, not '1.2'"),
        (dict(max_time="1"), SettingsError, "max_time must be a number of seconds, not '1'"),
        (dict(suppress_tokens=5), SettingsError, "suppress_tokens must be a list of token ids, not 5"),
        (dict(wombat=3), UnsupportedError, "wombat=3 cannot be combined with a strategy"),
        (
            dict(compile=False),
            UnsupportedError,
            r'decoders_config={"compile": False} .*enable\(model, compile=False\)',
        ),
        (dict(cache_config={"a": 1}), UnsupportedError, "static cache"),
        (dict(max_cache_len=50), UnsupportedError, "slots"),
        (dict(use_mtp=True), UnsupportedError, "use_mtp"),
        (dict(force_words_ids=[[3]]), UnsupportedError, "force_words_ids"),
        (dict(constraints=[3]), UnsupportedError, "constraints"),
        (dict(speculation_type="mtp"), UnsupportedError, "speculation_type"),
        (dict(assistant_ensemble_weight=0.5), UnsupportedError, "assistant_ensemble_weight"),
        (dict(assistant_lookbehind=3), UnsupportedError, "assistant_lookbehind"),
        (dict(low_memory=True), UnsupportedError, "low_memory"),
        (dict(compile_config=object()), UnsupportedError, "compile_config"),
        (bad([[3, 4]]), InputError, "input_ids must be a tensor"),
        (bad(torch.arange(4)), InputError, r"\[rows, tokens\]"),
        (bad(IDS.float()), InputError, "torch.int64 or torch.int32, not torch.float32"),
        (bad(IDS.bool()), InputError, "not torch.bool"),
        (bad(IDS[:, :0]), ContextLengthError, "input_ids are empty"),
        (bad(IDS[:0]), ContextLengthError, "input_ids are empty"),
        (
            bad(torch.tensor([[3, VOCAB]])),
            InputError,
            f"token id {VOCAB} .row 0, place 1. is outside .* 0 to {VOCAB - 1}",
        ),
        (bad(torch.tensor([[-1, 3]])), InputError, "token id -1"),
        (
            bad(IDS) | dict(attention_mask=torch.tensor([[2, 0, 1, 1, 1, 1, 1, 1]])),
            InputError,
            "attention_mask must hold 0 and 1, not 2",
        ),
        (
            bad(IDS) | dict(attention_mask=torch.full((1, 8), 0.5)),
            InputError,
            "attention_mask must hold 0 and 1, not 0.5",
        ),
        (
            bad(IDS) | dict(attention_mask=torch.full((1, 8), float("nan"))),
            InputError,
            "attention_mask must hold 0 and 1, not nan",
        ),
        (bad(IDS) | dict(attention_mask=torch.ones(1, 7)), InputError, r"attention_mask is \[1, 7\]"),
        (bad(IDS) | dict(attention_mask=torch.ones(2, 8)), InputError, r"attention_mask is \[2, 8\]"),
        (bad(IDS) | dict(attention_mask=[[1] * 8]), InputError, "attention_mask must be a tensor"),
    ],
    ids=lambda value: str(next(iter(value)) if isinstance(value, dict) else ""),
)
def test_what_makes_no_sense_is_said_to(
    llama: PreTrainedModel, call: dict[str, Any], error: type[Exception], said: str
) -> None:
    inputs = prompts() if "input_ids" not in call else {}
    with pytest.raises(error, match=said):
        llama.generate(**(CALL | inputs | call))


def test_int32_ids_and_positional_inputs_work(llama: PreTrainedModel) -> None:
    expected = llama.generate(input_ids=IDS, **CALL)
    assert torch.equal(llama.generate(IDS, **CALL), expected)
    assert torch.equal(llama.generate(input_ids=IDS.int(), **CALL), expected), "int64, as transformers gives it"
    assert torch.equal(llama.generate(IDS, **CALL, custom_generate=None), expected)


def test_padding_inside_a_prompt_without_a_mask_is_explained(llama: PreTrainedModel) -> None:
    ids = IDS.clone()
    ids[0, 5] = 0
    with pytest.raises(UnsupportedError, match=r"pad_token_id 0 .*\(row 0, place 5\).*attention_mask=torch.ones_like"):
        llama.generate(input_ids=ids, **CALL, pad_token_id=0)
    mask = torch.ones_like(ids)
    ours = llama.generate(input_ids=ids, attention_mask=mask, **CALL, pad_token_id=0)
    plain = llama.generate(
        input_ids=ids, attention_mask=mask, **CALL | dict(strategy=None, decoders_config=None), pad_token_id=0
    )
    assert torch.equal(ours, plain)


@pytest.mark.parametrize("pad", [-1, 9999])
def test_a_pad_token_outside_the_vocabulary_is_refused_where_it_may_be_needed(llama: PreTrainedModel, pad: int) -> None:
    mask = torch.ones_like(prompts(2)["input_ids"])
    call = CALL | dict(attention_mask=mask, pad_token_id=pad)
    with pytest.raises(InputError, match=f"pad_token_id {pad} is outside the model's vocabulary, 0 to"):
        llama.generate(prompts(2)["input_ids"], **call, eos_token_id=1)
    llama.generate(prompts(2)["input_ids"], **call)  # no row ends before another
    llama.generate(prompts(2)["input_ids"][:1], **call | dict(attention_mask=mask[:1]), eos_token_id=1)


class Answers(LogitsProcessor):
    """Answers with something made from the scores."""

    def __init__(self, make: Any) -> None:
        self.make = make

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return self.make(scores)


@pytest.mark.parametrize(
    "make", [lambda s: s[:, :5], lambda s: s > 0, lambda s: None, lambda s: s[0]], ids=list("abcd")
)
def test_a_processor_that_answers_with_no_scores_is_named(llama: PreTrainedModel, make: Any) -> None:
    with pytest.raises(UnsupportedError, match="logits processor Answers returned"):
        llama.generate(**prompts(), **CALL, logits_processor=[Answers(make)])


def test_a_processor_may_compute_in_another_precision(llama: PreTrainedModel) -> None:
    out = llama.generate(**prompts(), **CALL, logits_processor=[Answers(lambda s: s.double())])
    assert torch.equal(out, llama.generate(**prompts(), **CALL))


def test_disable_takes_models() -> None:
    with pytest.raises(UnsupportedError, match="not int"):
        decoders.disable(5)  # type: ignore[arg-type]


def test_a_model_on_the_meta_device_is_refused() -> None:
    model = decoders.enable(tiny_model("llama").to("meta"))
    with pytest.raises(UnsupportedError, match="meta device"):
        model.generate(input_ids=IDS, **CALL)


@pytest.mark.parametrize("name", ["input_ids", "attention_mask", "inputs_embeds"])
def test_inputs_on_the_meta_device_are_refused_by_name(llama: PreTrainedModel, name: str) -> None:
    given = torch.zeros(1, 3, 64, device="meta") if name == "inputs_embeds" else torch.ones_like(IDS, device="meta")
    with pytest.raises(InputError, match=f"{name} is on the meta device"):
        llama.generate(**{"input_ids": IDS, name: given}, **CALL)


def test_a_forward_replaced_by_a_function_is_called_that() -> None:
    model = tiny_model("llama")
    before = model.forward
    model.forward = lambda *args, **kwargs: before(*args, **kwargs)  # type: ignore[method-assign]
    with pytest.raises(UnsupportedError, match="forward was replaced"):
        decoders.enable(model).generate(input_ids=IDS, **CALL)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize(
    "idle",
    [{"token_type_ids": torch.zeros(1, 6, dtype=torch.int64)}, {"logits_to_keep": 1}, {"labels": torch.ones(1, 6)}],
)
def test_arguments_that_change_nothing_are_taken(name: str, idle: dict) -> None:
    model, ids = decoders.enable(tiny_model(name)), torch.tensor([[5, 6, 7, 5, 6, 7]])
    options = dict(strategy="prompt_lookup", max_new_tokens=5, decoders_config={"compile": False})
    assert torch.equal(model.generate(ids, **options, **idle), model.generate(ids, **options))


@pytest.mark.parametrize(
    "name, types, message",
    [
        ("gpt2", 0, "GPT2LMHeadModel uses token_type_ids, even if all are zeros"),
        ("llama", 1, "token_type_ids=a tensor"),
    ],
)
def test_token_types_that_mean_something_are_refused(name: str, types: int, message: str) -> None:
    model, ids = decoders.enable(tiny_model(name)), torch.tensor([[5, 6, 7]])
    with pytest.raises(UnsupportedError, match=message):
        model.generate(ids, token_type_ids=torch.full_like(ids, types), strategy="prompt_lookup", max_new_tokens=2)
