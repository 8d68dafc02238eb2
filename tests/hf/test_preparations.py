"""What transformers prepares for a request is kept for requests like it, and nothing else is."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel, PreTrainedTokenizerFast
from transformers.generation import LogitsProcessorList, MaxTimeCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

import decoders
from decoders.engine.decode.kind import REQUEST
from decoders.errors import ContextLengthError, InputError, UnsupportedError
from decoders.hf import prepared_call as call_module
from decoders.testing import tiny_model
from decoders.testing.models import VOCAB

PLAIN = {"strategy": "autoregressive", "max_new_tokens": 4, "pad_token_id": 0}


def prepare(model: PreTrainedModel, length: int = 5, **arguments: Any) -> Any:
    ids = torch.randint(2, VOCAB, (1, length), generator=torch.Generator().manual_seed(length))
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return vars(model)["generate"].prepared(**(given | PLAIN | arguments))


def facts(call: Any) -> dict[str, Any]:
    """All that a call is decoded by and given back with, but for objects that have no value of their own."""
    request = {name: attrgetter(name)(call.request) for name in REQUEST}
    own = (
        "strategy", "verifier", "models.draft_models", "resolve", "returned.on_step", "stopping.criteria", "processors"
    )  # fmt: skip
    told = {name: request[name] is not None for name in own} | {n: v for n, v in request.items() if n not in own}
    told["prompts"] = [prompt.tolist() for prompt in told["prompts"]]
    told["padded_prompt"] = told["padded_prompt"].tolist()
    config = {name: value for name, value in vars(call.config).items() if not name.startswith("_")}
    return told | {"engine": call.engine, "input_ids": call.input_ids.tolist(), "config": config}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One entry for each call that went through transformers' ``generate``."""
    through: list[str] = []
    original = GenerationMixin._prepare_generation_config

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        through.append("asked")
        return original(self, *args, **kwargs)

    monkeypatch.setattr(GenerationMixin, "_prepare_generation_config", counted)
    return through


def forget(model: PreTrainedModel) -> None:
    vars(model)["generate"]._preparations.clear()


_VALUES = st.fixed_dictionaries(
    {"max_new_tokens": st.integers(1, 40)},
    optional={
        "do_sample": st.booleans(),
        "temperature": st.floats(0.1, 3.0),
        "top_k": st.integers(0, VOCAB),
        "top_p": st.floats(0.05, 1.0),
        "min_p": st.floats(0.0, 1.0),
        "typical_p": st.floats(0.1, 1.0),
        "repetition_penalty": st.sampled_from([1.0, 1.3]),
        "min_new_tokens": st.integers(0, 1),
        "eos_token_id": st.one_of(
            st.integers(0, VOCAB - 1), st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=3)
        ),
        "return_dict_in_generate": st.booleans(),
        "output_scores": st.booleans(),
        "max_length": st.just(90),
    },
)


@settings(deadline=None)  # the first builds an engine
@given(_VALUES, st.integers(1, 30), st.integers(1, 30), st.integers(1, 40), st.integers(0, 3))
@example({"max_new_tokens": 3, "do_sample": True, "temperature": 0.5, "top_p": 0.9}, 3, 9, 7, 1)
@example({"max_new_tokens": 3, "min_new_tokens": 1, "eos_token_id": 5}, 3, 9, 7, 1)
def test_one_prepared_with_what_is_kept_is_one_prepared_by_transformers(
    llama: PreTrainedModel, values: dict[str, Any], length: int, other: int, new: int, seed: int
) -> None:
    forget(llama)
    prepare(llama, length, **values)
    kept = prepare(llama, other, **(values | {"max_new_tokens": new, "seed": seed}))
    forget(llama)
    assert facts(kept) == facts(prepare(llama, other, **(values | {"max_new_tokens": new, "seed": seed})))


def test_transformers_prepares_the_first_of_a_kind_alone(llama: PreTrainedModel, asked: list[str]) -> None:
    forget(llama)
    sampled = {"do_sample": True, "temperature": 0.7, "top_k": 20}
    for number, arguments in enumerate((sampled, sampled | {"temperature": 0.8}, {"eos_token_id": [3, 4]})):
        for length in (5, 8, 13):
            prepare(llama, length, max_new_tokens=length, seed=length, **arguments)
        assert len(asked) == number + 1
    prepare(llama, strategy="prompt_lookup", eos_token_id=[3, 4], grammar=None)  # how it is drafted is ours
    assert len(asked) == 3


def test_a_true_one_is_no_one(llama: PreTrainedModel, asked: list[str]) -> None:
    """They are equal, and dictionaries take them for the same."""
    forget(llama)
    prepare(llama, top_k=1, do_sample=True)
    prepare(llama, top_k=1, do_sample=1)
    assert len(asked) == 2


class _Puts(BaseStreamer):
    def __init__(self) -> None:
        self.put_in: list[list[int]] = []

    def put(self, value: torch.Tensor) -> None:
        self.put_in.append(value.flatten().tolist())

    def end(self) -> None: ...


def test_a_streamer_is_given_the_prompt(llama: PreTrainedModel, asked: list[str]) -> None:
    forget(llama)
    for length in (5, 8):
        streamer = _Puts()
        call = prepare(llama, length, streamer=streamer)
        assert streamer.put_in == [call.input_ids[0].tolist()]
    assert len(asked) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        {"logits_processor": LogitsProcessorList([lambda ids, scores: scores])},
        {"stopping_criteria": StoppingCriteriaList([MaxTimeCriteria(60.0)])},
        {"prefix_allowed_tokens_fn": lambda row, ids: [3]},
        {"max_time": 60.0},
        {"stop_strings": "th"},
        {"stop_strings": ["th", "he"]},
        {"min_new_tokens": 2, "eos_token_id": 5},
        {"min_new_tokens": 0},
        {"bad_words_ids": [[5]]},
        {"begin_suppress_tokens": [5]},
        {"forced_eos_token_id": 5},
        {"num_return_sequences": 2, "do_sample": True},
        {"max_new_tokens": None, "max_length": 20},
    ],
    ids=lambda arguments: "+".join(arguments),
)
def test_what_may_look_at_more_than_the_scores_is_prepared_each_time(
    letters: PreTrainedTokenizerFast, asked: list[str], arguments: dict[str, Any]
) -> None:
    model = decoders.enable(tiny_model("llama"), tokenizer=letters)
    for length in (5, 8):
        prepare(model, length, **arguments)
    assert len(asked) == 2
    assert not vars(model)["generate"]._preparations


@pytest.mark.parametrize(
    "prompts",
    [
        {"input_ids": torch.tensor([[5, 6], [7, 8]]), "attention_mask": torch.ones(2, 2, dtype=torch.int64)},
        {"attention_mask": None},
        {"attention_mask": torch.tensor([[0, 1, 1, 1, 1]])},
    ],
    ids=["two rows", "no mask", "padded"],
)
def test_prompts_that_transformers_looks_at_are_prepared_each_time(
    llama: PreTrainedModel, asked: list[str], prompts: dict[str, Any]
) -> None:
    forget(llama)
    for _ in range(2):
        prepare(llama, **prompts)
    assert len(asked) == 2


def test_padding_is_not_penalized_after_a_prompt_without_padding(llama: PreTrainedModel) -> None:
    forget(llama)
    ids, options = torch.arange(3, 12)[None], {"repetition_penalty": 50.0, "max_new_tokens": 12, "do_sample": False}
    padded = torch.cat([llama.generate(ids, **options)[:, -1:].repeat(1, 3), ids], 1)
    for prompt in (ids, padded):
        mask = (torch.arange(prompt.shape[1]) >= prompt.shape[1] - ids.shape[1])[None].long()
        inputs = {"input_ids": prompt, "attention_mask": mask}
        ours = llama.generate(**inputs, **options, strategy="autoregressive")
        assert ours.tolist() == llama.generate(**inputs, **options).tolist()


def test_a_generate_of_the_models_own_is_called_each_time(fresh: PreTrainedModel, asked: list[str]) -> None:
    class Own(type(fresh)):  # type: ignore[misc]
        def generate(self, *args: Any, **kwargs: Any) -> Any:
            kwargs["input_ids"] = kwargs["input_ids"].flip(1)
            return super().generate(*args, **kwargs)

    fresh.__class__ = Own
    prepare(fresh, 6)
    call = prepare(fresh, 7)
    assert call.input_ids[0].tolist() == prepare(decoders.enable(tiny_model("llama")), 7).input_ids[0].flip(0).tolist()


def _set(name: str, value: Any) -> Callable[[PreTrainedModel], None]:
    def change(model: PreTrainedModel) -> None:
        setattr(model.generation_config, name, value)

    return change


@pytest.mark.parametrize(
    ("change", "name", "value"),
    [
        (_set("eos_token_id", [9]), "stopping.tokens", (9,)),
        (_set("do_sample", True), "plan", None),
        (_set("temperature", 0.25), "sampling.values", (0.25,)),
        (_set("return_dict_in_generate", True), "returned.logits", True),
    ],
    ids=["eos_token_id", "do_sample", "temperature", "return_dict_in_generate"],
)
def test_a_change_of_the_models_generation_config_counts_in_the_next(
    fresh: PreTrainedModel, change: Callable[[PreTrainedModel], None], name: str, value: Any
) -> None:
    sampled = {} if name == "plan" else {"do_sample": True, "top_k": 0}
    arguments = sampled | ({"output_logits": True} if name == "returned.logits" else {})
    before = attrgetter(name)(prepare(fresh, **arguments).request)
    change(fresh)
    after = attrgetter(name)(prepare(fresh, 8, **arguments).request)
    assert after != before
    assert value is None or after == value


def test_a_generation_config_of_the_call_counts_by_its_values(llama: PreTrainedModel, asked: list[str]) -> None:
    forget(llama)
    for temperature in (0.5, 0.5, 0.25):
        config = GenerationConfig(do_sample=True, temperature=temperature, top_k=0)
        assert prepare(llama, generation_config=config).request.sampling.values == (temperature,)
    assert len(asked) == 2


def test_refusals_stay(fresh: PreTrainedModel) -> None:
    prepare(fresh)
    for count in (-1, 0, True):
        with pytest.raises(ValueError, match="max_new_tokens"):
            prepare(fresh, max_new_tokens=count)
    with pytest.raises(ContextLengthError):
        prepare(fresh, max_new_tokens=fresh.config.max_position_embeddings)
    with pytest.raises(InputError, match="outside the model's vocabulary"):
        prepare(fresh, input_ids=torch.tensor([[1, VOCAB]]), attention_mask=torch.ones(1, 2, dtype=torch.int64))
    with pytest.raises(UnsupportedError, match="num_beams"):
        prepare(fresh, num_beams=2)


def test_a_model_that_has_become_unfit_is_refused(fresh: PreTrainedModel) -> None:
    prepare(fresh)
    fresh.forward = lambda *args, **kwargs: None  # type: ignore[method-assign]
    with pytest.raises(UnsupportedError, match="replaced by the function"):
        prepare(fresh)


def test_a_prompt_too_long_for_the_model_is_refused_whatever_came_before(fresh: PreTrainedModel) -> None:
    prepare(fresh)
    fresh.config.max_position_embeddings = 7  # prompt and all new ones but the last need 8
    with pytest.raises(ContextLengthError):
        prepare(fresh)


def test_what_the_caller_does_to_a_prepared_config_stays_there(fresh: PreTrainedModel) -> None:
    first = prepare(fresh)
    first.config.max_length = 10_000
    second = prepare(fresh, 8)
    assert second.config.max_length == 12 and second.config.max_new_tokens == 4
    assert second.config is not first.config


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
def test_copies_of_a_model_begin_with_none(fresh: PreTrainedModel, copied: Callable[[Any], Any]) -> None:
    prepare(fresh)
    other = copied(fresh)
    assert not vars(other)["generate"]._preparations
    own = {"engine": None, "models.model": None}
    assert facts(prepare(other, 8)) | own == facts(prepare(fresh, 8)) | own


def test_no_more_are_kept_than_may_be(
    fresh: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, asked: list[str]
) -> None:
    monkeypatch.setattr(call_module, "LIMIT", 2)
    for stop in (3, 4, 5, 6):
        prepare(fresh, eos_token_id=stop)
        assert 1 <= len(vars(fresh)["generate"]._preparations) <= 2
    assert len(asked) == 4
    assert prepare(fresh, 8, eos_token_id=6).request.stopping.tokens == (6,)
    assert len(asked) == 4
