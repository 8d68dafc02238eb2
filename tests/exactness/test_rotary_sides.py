"""Rotary tables that depend on the length of the text: a call that stays on one side of the border writes what transformers writes."""

from __future__ import annotations

import copy
import functools
import warnings
from types import MappingProxyType
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

import decoders
from decoders import Scheduler
from decoders.common.transformers_compat import CACHE
from decoders.engine.model.rope import RotaryByLength
from decoders.errors import ContextLengthError
from decoders.strategies import PromptLookup, Speculative
from decoders.testing import assert_same_tokens, decode
from decoders.testing.models import ARCHITECTURES, Architecture

from ..versions import OLDEST

BORDER, NEW = 32, 9
EAGER = {"compile": False, "prefill_chunk": 8}
LONG = dict(
    rope_type="longrope", rope_theta=10000.0, short_factor=[1.0] * 4, long_factor=[4.0] * 4,
    original_max_position_embeddings=BORDER,
)  # fmt: skip
BASE = dict(ARCHITECTURES["llama"].options) | dict(max_position_embeddings=512, original_max_position_embeddings=BORDER)
DESIGNS: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3": ("phi3", dict(rope_parameters=LONG)),
    "llama": ("llama", dict(rope_parameters=LONG)),
    "phimoe": (
        "phimoe",
        dict(rope_parameters=LONG | dict(short_mscale=1.2, long_mscale=1.4), num_local_experts=2, num_experts_per_tok=1),
    ),
    "by layer": (
        "gemma3_text",
        dict(
            head_dim=8, query_pre_attn_scalar=8, sliding_window=16, layer_types=["sliding_attention", "full_attention"],
            rope_parameters=dict(
                full_attention=LONG, sliding_attention=dict(rope_type="default", rope_theta=10000.0)
            ),
        ),
    ),
}  # fmt: skip


@functools.cache
def enabled(name: str) -> PreTrainedModel:
    kind, own = DESIGNS[name]
    if name == "by layer" and OLDEST:
        pytest.skip("transformers 5.17 cannot go back to a long table by layer")
    return decoders.enable(
        Architecture(kind, MappingProxyType(BASE | own), embedding=0.03 if "gemma" in kind else 1.0)()
    )


def texts(*lengths: int) -> dict[str, torch.Tensor]:
    """Periodic texts, padded on the left."""
    width = max(lengths)
    rows = [[0] * (width - n) + [(i * i + 7 * n) % 6 * 9 + 5 for i in range(n)] for n in lengths]
    mask = [[0] * (width - n) + [1] * n for n in lengths]
    return {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(mask)}


@pytest.mark.in_turns
@pytest.mark.parametrize("lengths", [(20,), (24, 13), (40,), (33, 11), (60, 33)])
@pytest.mark.parametrize("name", DESIGNS)
def test_on_one_side_tokens_are_those_of_transformers(name: str, lengths: tuple[int, ...]) -> None:
    model, inputs = enabled(name), texts(*lengths)
    expected = decode(model, inputs, max_new_tokens=NEW).sequences
    draft = enabled("llama")
    for strategy, more in (
        ("autoregressive", {}),
        (PromptLookup(length=6), {}),
        ("early_exit", {}),
        (Speculative(length=3), {"assistant_model": draft}),
    ):
        out = decode(model, inputs, strategy, max_new_tokens=NEW, decoders_config=EAGER, **more)
        assert_same_tokens(model, inputs, expected, out.sequences, f"{name}, {strategy}")


def test_the_two_sides_differ() -> None:
    short, long = texts(40), texts(40)
    model = enabled("phi3")
    with torch.no_grad():
        one = model(short["input_ids"][:, :30]).logits[0, -1]
        other = model(long["input_ids"]).logits[0, 29]
    assert (one - other).abs().max() > 0.1


@pytest.mark.parametrize(
    "lengths, new, message",
    [
        ((24,), 10, r"more than 32 tokens, and 24 prompt tokens plus 10 new ones .* max_new_tokens can be 9 at most"),
        ((32, 5), 2, "32 prompt tokens plus 2 new ones .* max_new_tokens can be 1 at most"),
    ],
)
def test_a_call_that_crosses_the_border_is_refused_with_the_length(lengths: tuple, new: int, message: str) -> None:
    for model in (enabled("phi3"), enabled("by layer")):
        with pytest.raises(ContextLengthError, match=message):
            decode(model, texts(*lengths), "prompt_lookup", max_new_tokens=new)


def test_texts_are_not_reused_on_the_other_side_and_plain_calls_between_change_nothing() -> None:
    model = decoders.enable(copy.deepcopy(decoders.disable(enabled("phi3"))))
    decoders.enable(enabled("phi3"))
    twin = copy.deepcopy(decoders.disable(model))
    decoders.enable(model)
    whole = texts(60)
    engines = set()
    for length, reused in ((20, 0), (24, 19), (50, 0), (22, 20), (60, 49)):
        inputs = {name: values[:, :length] for name, values in whole.items()}
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            out = decode(model, inputs, PromptLookup(length=6), max_new_tokens=NEW, decoders_config=EAGER)
        assert torch.equal(out.sequences, decode(twin, inputs, max_new_tokens=NEW).sequences), length
        assert out.report.reused[0] in range(reused, length) if reused else out.report.reused == [0]
        model(whole["input_ids"])  # writes the long table into the user's own module
        engines.add(id(vars(model)["generate"].engine()))
    assert len(engines) == 1, "a table that a plain call has written is no change of the model"


def test_a_scheduler_decodes_both_sides_at_a_time() -> None:
    model = enabled("phi3")
    lengths = (20, 45, 11, 60)
    expected = [decode(model, texts(n), max_new_tokens=NEW).sequences[0, n:].tolist() for n in lengths]
    with Scheduler(model, strategy="prompt_lookup", max_new_tokens=NEW, do_sample=False, decoders_config=EAGER) as pool:
        handles = [pool.submit(texts(n)["input_ids"]) for n in lengths]
        assert [handle.result()[0, n:].tolist() for handle, n in zip(handles, lengths, strict=True)] == expected


def test_prompts_of_vectors_and_given_caches_are_on_the_side_of_the_whole_prompt() -> None:
    model, inputs = enabled("phi3"), texts(40)
    expected = decode(model, inputs, max_new_tokens=NEW).sequences[:, 40:]
    vectors = model.get_input_embeddings()(inputs["input_ids"]).detach()
    rest = dict(max_new_tokens=NEW, do_sample=False, decoders_config=EAGER)
    for count in (33, 40):
        part = {"inputs_embeds": vectors[:, :count]}
        own = model.generate(**part, max_new_tokens=NEW, do_sample=False)
        assert torch.equal(model.generate(**part, strategy="prompt_lookup", **rest), own)
    for count in (36, 20):
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(inputs["input_ids"][:, :count], use_cache=True, **{CACHE: cache})
        call = dict(**inputs, **{CACHE: cache}, strategy="prompt_lookup", **rest)
        if count > BORDER:
            assert torch.equal(model.generate(**call)[:, 40:], expected)
        else:
            with pytest.raises(
                ContextLengthError, match="computed with the table for 20 tokens, and the prompt has 40"
            ):
                model.generate(**call)


def test_tables_of_known_modules_are_fixed_and_others_follow_a_place_behind_the_text() -> None:
    for name, fixed in (("phi3", True), ("by layer", True), ("phimoe", False)):
        target = vars(enabled(name))["generate"].engine().target
        (module,) = (each for each in target.model.modules() if isinstance(each, RotaryByLength))
        assert module._settled[-1] is fixed, name
