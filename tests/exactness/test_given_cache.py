"""A cache that the caller gives: the tokens are those of transformers' generate with the same cache, under every kind of draft.

The caches hold half of the values that the model would write: whoever reads the text instead writes another one.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import Cache, DynamicCache, PreTrainedModel, StaticCache

import decoders
from decoders import Scheduler
from decoders.common.transformers_compat import CACHE
from decoders.errors import ContextLengthError, DecodersError, InputError, SettingsError, UnsupportedError
from decoders.strategies import PromptLookup, TokenRecycling
from decoders.testing import (
    ARCHITECTURES,
    RECURRENT,
    Replay,
    assert_same_tokens,
    decode,
    prompts,
    tiny_draft,
    tiny_model,
)

from .references import EAGER, NEW, SAMPLING, enabled, plain

#: Grouped heads, latent attention, a window beside full attention, shared keys and values, chunks, learnt positions, states.
QUICK = ("llama", "deepseek_v3", "gemma3", "gemma4", "lfm2")
#: transformers' own loop goes on from a state with several tokens as if there were no state.
NOT_CONTINUED = {"jamba", "zamba"}
CACHED = 17


@torch.no_grad()
def cache_of(
    model: PreTrainedModel, rows: int = 1, count: int = CACHED, kind: type[Cache] = DynamicCache, share: float = 0.5
) -> Cache:
    """Of the first `count` tokens of :func:`prompts`, each value times `share`."""
    inputs = prompts(rows)
    room = {"max_cache_len": 100} if kind is StaticCache else {}
    cache = kind(config=model.config, **room)
    mask = inputs["attention_mask"][:, :count]
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    model(inputs["input_ids"][:, :count], attention_mask=mask, position_ids=positions, use_cache=True, **{CACHE: cache})
    for layer in cache.layers:
        if getattr(layer, "values", None) is not None:
            layer.values = layer.values * share
    return cache


def continued(model: PreTrainedModel, inputs: dict[str, torch.Tensor], cache: Cache, **options: Any) -> torch.Tensor:
    """What transformers' greedy loop writes behind a copy of `cache`."""
    return decode(model, inputs, max_new_tokens=NEW, **{CACHE: copy.deepcopy(cache)}, **options).sequences


def replay(expected: torch.Tensor) -> Replay:
    start = [int(row.nonzero()[0]) for row in prompts(len(expected))["attention_mask"]]
    texts = tuple(tuple(row[s:].tolist()) for row, s in zip(expected, start, strict=True))
    return Replay(texts=texts, branches=3)


@pytest.mark.parametrize(
    "name, kind",
    [
        pytest.param(
            name, kind, marks=() if name in QUICK and (kind is DynamicCache or name == "gemma3") else pytest.mark.slow
        )
        for name in (*ARCHITECTURES, *RECURRENT)
        for kind in (DynamicCache, StaticCache)
        if name not in NOT_CONTINUED and (name, kind) != ("gpt_neo", StaticCache)  # masked by the room of the cache
    ],
)
def test_the_tokens_are_those_of_transformers_with_the_same_cache(name: str, kind: type[Cache]) -> None:
    model, inputs = enabled(name), prompts(3)
    cache = cache_of(model, 3, kind=kind)
    expected = continued(model, inputs, cache)
    for strategy in (replay(expected), "lookahead"):
        out = decode(model, inputs, strategy, max_new_tokens=NEW, past_key_values=cache, decoders_config=EAGER)
        assert_same_tokens(model, inputs, expected, out.sequences, name)
        assert out.report.reused == [CACHED, CACHED - 5, CACHED - 10]
        assert out.report.accepted > NEW or strategy == "lookahead"


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    return decoders.enable(tiny_model("llama"))


@pytest.mark.slow
def test_the_new_tokens_alone_with_a_mask_over_all_are_the_same_call(llama: PreTrainedModel) -> None:
    inputs = prompts(3)
    cache = cache_of(llama, 3)
    new = inputs | {"input_ids": inputs["input_ids"][:, CACHED:]}
    for strategy in (None, "prompt_lookup", "suffix", "ngram", "lookahead", "token_recycling"):
        out = decode(llama, new, strategy, max_new_tokens=NEW, **{CACHE: copy.deepcopy(cache)})
        whole = torch.cat([inputs["input_ids"][:, :CACHED], out.sequences], 1)
        assert_same_tokens(llama, inputs, continued(llama, inputs, cache), whole, str(strategy))
    assert out.report.prompt_tokens == [24, 19, 14]


@pytest.mark.parametrize("name", ["gemma3", "gemma4", "llama4"])
def test_text_only_classes_of_families_that_see_take_new_tokens_alone(name: str) -> None:
    model, inputs = enabled(name), prompts(2)
    assert "image" in model.input_modalities
    cache = cache_of(model, 2)
    out = decode(
        model,
        inputs | {"input_ids": inputs["input_ids"][:, CACHED:]},
        "prompt_lookup",
        max_new_tokens=NEW,
        decoders_config=EAGER,
        **{CACHE: copy.deepcopy(cache)},
    )
    whole = torch.cat([inputs["input_ids"][:, :CACHED], out.sequences], 1)
    assert_same_tokens(model, inputs, continued(model, inputs, cache), whole, name)


@pytest.mark.parametrize("sampling", [{}, SAMPLING], ids=["greedy", "sampled"])
def test_one_cached_document_serves_all_rows_and_sequences(llama: PreTrainedModel, sampling: dict[str, Any]) -> None:
    text = prompts(1)["input_ids"]
    questions = torch.tensor([[5, 9, 3], [44, 7, 81]])
    rows = {"input_ids": torch.cat([text[:, :CACHED].expand(2, -1), questions], 1)}
    cache, options = cache_of(llama), dict(max_new_tokens=NEW, decoders_config=EAGER) | sampling
    out = decode(
        llama, rows, "prompt_lookup", past_key_values=cache, num_return_sequences=2 if sampling else 1, **options
    )
    row = decode(llama, {"input_ids": rows["input_ids"][:1]}, "autoregressive", past_key_values=cache, **options)
    assert torch.equal(out.sequences[0], row.sequences[0])
    if not sampling:
        for each, written in zip(rows["input_ids"], out.sequences, strict=True):
            assert torch.equal(written[None], continued(llama, {"input_ids": each[None]}, cache))
    twice = copy.deepcopy(cache)
    twice.batch_repeat_interleave(2)
    again = decode(
        llama, rows, "lookahead", past_key_values=twice, num_return_sequences=2 if sampling else 1, **options
    )
    assert torch.equal(again.sequences, out.sequences)


def test_the_callers_cache_stays_as_it_is_and_no_later_call_finds_any_of_it(llama: PreTrainedModel) -> None:
    inputs, cache = prompts(2), cache_of(llama, 2)
    before = copy.deepcopy(cache)
    decode(
        llama, inputs, "autoregressive", max_new_tokens=NEW
    )  # its texts are kept, and must not stand in for the cache either
    decode(llama, inputs, "prompt_lookup", max_new_tokens=NEW, past_key_values=cache)
    assert cache.get_seq_length() == CACHED
    for own, was in zip(cache.layers, before.layers, strict=True):
        assert torch.equal(own.keys, was.keys) and torch.equal(own.values, was.values)
    out = decode(llama, inputs, "prompt_lookup", max_new_tokens=NEW)
    assert_same_tokens(llama, inputs, plain("llama", 2), out.sequences, "behind a call with a cache")
    assert out.report.reused == [0, 0]
    out = decode(llama, inputs, "prompt_lookup", max_new_tokens=NEW, past_key_values=cache)
    assert_same_tokens(llama, inputs, continued(llama, inputs, cache), out.sequences, "behind a call without one")


@pytest.mark.parametrize("attention", ["auto", "sdpa"])  # PyTorch's attention takes nodes in multiples
@pytest.mark.parametrize("behind", [1, 7])
def test_in_low_precision_no_step_runs_given_tokens_again(behind: int, attention: str) -> None:
    model = decoders.enable(tiny_model("llama").bfloat16())
    inputs = prompts(2)
    cache = cache_of(model, 2, 24 - behind)
    options = dict(max_new_tokens=NEW, past_key_values=cache, decoders_config=EAGER | {"attention": attention})
    expected = decode(model, inputs, "autoregressive", **options).sequences
    assert not torch.equal(
        expected, decode(model, inputs, "autoregressive", **options | {"past_key_values": None}).sequences
    )
    new = inputs | {"input_ids": inputs["input_ids"][:, 24 - behind :]}  # what is not named cannot be run again
    for strategy in (replay(expected), PromptLookup(length=5)):
        assert torch.equal(decode(model, inputs, strategy, **options).sequences, expected)
    assert torch.equal(decode(model, new, PromptLookup(length=5), **options).sequences[:, behind:], expected[:, 24:])


def test_a_quantized_cache_of_the_loop_takes_what_is_given(llama: PreTrainedModel) -> None:
    inputs, exact = prompts(2), cache_of(llama, 2, share=1.0)
    config = {"kv_cache": "int8", "compile": False, "reuse": False}
    expected = decode(llama, inputs, "autoregressive", max_new_tokens=NEW, decoders_config=config).sequences
    out = decode(llama, inputs, "prompt_lookup", max_new_tokens=NEW, decoders_config=config, past_key_values=exact)
    assert_same_tokens(llama, inputs, expected, out.sequences, "int8")


def _shorter(model: PreTrainedModel) -> Cache:
    config = copy.deepcopy(model.config)
    config.sliding_window, config.layer_types = 6, ["sliding_attention"] * 2
    cache = DynamicCache(config=config)
    for layer in range(2):
        cache.update(torch.zeros(1, 2, CACHED, 8), torch.zeros(1, 2, CACHED, 8), layer)
    return cache


def _uneven(model: PreTrainedModel) -> Cache:
    cache = cache_of(model)
    cache.layers[1].crop(3 - CACHED)
    return cache


@pytest.mark.parametrize(
    "given, error, message",
    [
        (lambda model: {"past_key_values": ()}, InputError, r"must be a cache of transformers \(DynamicCache.*not a tuple"),
        (lambda model: {"past_key_values": cache_of(model), "cache": cache_of(model)}, SettingsError, "give only one beginning"),
        (lambda model: {"cache": cache_of(model, 2)}, InputError, "cache holds 2 rows for 1 prompt"),
        (lambda model: {"cache": cache_of(model, count=24)}, ContextLengthError, "24 tokens and cache holds 24"),
        (lambda model: {"cache": cache_of(enabled("deepseek_v3"))}, InputError, "2 heads of width 8: was it made by another"),
        (lambda model: {"cache": _shorter(model)}, UnsupportedError, "keys of 5 of its 17 tokens.*attends to 17"),
        (lambda model: {"cache": _uneven(model)}, UnsupportedError, r"numbers of tokens: \[3, 17\]"),
        (lambda model: {"attention_mask": torch.ones(1, 30)}, InputError, r"the mask must be \[1, 24\], or \[1, 41\] with past_key"),
        (lambda model: {"strategy": TokenRecycling(prompt_logits=True)}, UnsupportedError, "every token of the prompt"),
        (
            lambda model: dict(
                strategy="speculative", assistant_model=tiny_draft("llama"), attention_mask=torch.ones(1, 24 + CACHED)
            ),
            UnsupportedError,
            "a draft model reads the prompt itself",
        ),
    ],
    ids=["tuple", "twice", "rows", "nothing new", "heads", "window", "uneven", "mask", "reads prompts", "no tokens"],
)  # fmt: skip
def test_what_cannot_be_read_is_refused(
    llama: PreTrainedModel, given: Any, error: type[DecodersError], message: str
) -> None:
    call = dict(strategy="prompt_lookup", max_new_tokens=4, input_ids=prompts()["input_ids"]) | given(llama)
    if "cache" not in call and "past_key_values" not in call:
        call["past_key_values"] = cache_of(llama)
    with pytest.raises(error, match=message):
        llama.generate(**call)


def test_an_empty_cache_is_none(llama: PreTrainedModel) -> None:
    cache = DynamicCache(config=llama.config)
    out = decode(llama, prompts(), "prompt_lookup", max_new_tokens=NEW, past_key_values=cache)
    assert_same_tokens(llama, prompts(), plain("llama", 1), out.sequences, "an empty cache")
    assert cache.get_seq_length() == 0


def test_a_scheduler_takes_none(llama: PreTrainedModel) -> None:
    with (
        Scheduler(llama, strategy="prompt_lookup") as scheduler,
        pytest.raises(UnsupportedError, match="a scheduler keeps the caches of texts itself"),
    ):
        scheduler.submit([5, 6, 7], past_key_values=cache_of(llama), max_new_tokens=4)
