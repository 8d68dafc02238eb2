"""Prompts with images or sounds: every design writes what transformers writes, under every strategy, alone and in ragged batches."""

from __future__ import annotations

import pytest
import torch

from decoders.common.transformers_compat import decoder_layers
from decoders.errors import UnsupportedError
from decoders.strategies import Lookahead, PromptLookup, TokenRecycling
from decoders.strategy import Strategy
from decoders.testing import Replay, assert_same_tokens, decode, tiny_model
from decoders.testing.images import BLIND, HEARING, SEEING, image_prompts

from ...turns import slow_but
from .conftest import EAGER, NEW, enabled, plain

#: Numbers of images by row: one alone, and rows with several, none and one.
ALONE, RAGGED = (1,), (2, 0, 1)
STRATEGIES = ("autoregressive", "prompt_lookup", "suffix", "lookahead", "token_recycling", "speculative", "replay")
#: One whose positions are those of tokens, one whose images take fewer, one whose images see themselves, and two that hear.
QUICK = ("llava", "qwen2_vl", "gemma3", "qwen2_audio", "qwen2_5_omni")


def strategy_of(kind: str, name: str, images: tuple[int, ...]) -> Strategy | str:
    if kind == "replay":
        rows = zip(plain(name, images), image_prompts(name, images)["attention_mask"], strict=True)
        return Replay(texts=tuple(tuple(row[int(mask.argmax()) :].tolist()) for row, mask in rows), branches=3)
    settings = {
        "lookahead": Lookahead(window=3, ngram=3, candidates=2),
        "prompt_lookup": PromptLookup(branches=2),
        "token_recycling": TokenRecycling(prompt_logits=True),  # is shown what the model makes of the prompt
    }
    return settings.get(kind, kind)


@pytest.mark.in_turns
@pytest.mark.parametrize("kind", STRATEGIES)
@pytest.mark.parametrize("images", [RAGGED, ALONE], ids=["ragged", "alone"])
@pytest.mark.parametrize("name", slow_but(QUICK, (*SEEING, *HEARING)))
def test_tokens_are_those_of_transformers(name: str, images: tuple[int, ...], kind: str) -> None:
    model, inputs, expected = enabled(name), image_prompts(name, images), plain(name, images)
    model.generate.forget()
    others = {"assistant_model": tiny_model("llama")} if kind == "speculative" else {}
    strategy = strategy_of(kind, name, images)
    out = decode(model, inputs, strategy, max_new_tokens=NEW, decoders_config=EAGER, **others)
    assert_same_tokens(model, inputs, expected, out.sequences, f"{name}, {kind}")
    assert out.report.reused == [0] * len(images)
    if kind == "replay":
        assert out.report.mean_accepted_length > 1.5


@pytest.mark.parametrize("name", slow_but(QUICK, (*SEEING, *HEARING)))
def test_the_image_decides_about_the_text(name: str) -> None:
    """Otherwise the tests here would say nothing."""
    inputs = image_prompts(name)
    other = inputs | {k: v for k, v in image_prompts(name, seed=3).items() if v.is_floating_point()}
    changed = decode(enabled(name), other, max_new_tokens=NEW).sequences
    assert not torch.equal(plain(name, ALONE), changed)


@pytest.mark.parametrize("name", [*SEEING, *HEARING])
def test_the_layers_that_strategies_read_and_cut_are_those_of_the_text(name: str) -> None:
    """The modules that read images and sounds have layers with an index, too."""
    model = enabled(name)
    assert len(decoder_layers(model)) == model.config.get_text_config(decoder=True).num_hidden_layers


@pytest.mark.parametrize("name", slow_but(["qwen2_vl"], SEEING))
def test_sampled_tokens_depend_on_the_seed_alone(name: str) -> None:
    model, inputs = enabled(name), image_prompts(name, RAGGED)
    options = dict(max_new_tokens=NEW, decoders_config=EAGER, do_sample=True, seed=11, temperature=0.7, top_k=50)
    expected = decode(model, inputs, "autoregressive", **options).sequences
    assert not torch.equal(expected, plain(name, RAGGED))
    for strategy in (PromptLookup(branches=2), Replay(texts=tuple(map(tuple, expected.tolist())))):
        out = decode(model, inputs, strategy, **options)
        assert_same_tokens(model, inputs, expected, out.sequences, f"{name}, sampled")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("mllama", "stored keys and values for layers \\[0, 2\\]: every layer must go through the cache"),
        pytest.param("paligemma", "differ from a plain forward", marks=pytest.mark.slow),
        ("voxtral_realtime", "You must specify exactly one of input_features or encoder_inputs_embeds"),
    ],
)
def test_designs_that_cannot_are_refused_with_their_reason(name: str, why: str) -> None:
    assert set(BLIND) == {"mllama", "paligemma", "voxtral_realtime"}
    with pytest.raises(UnsupportedError, match=why):
        enabled(name).generate(**image_prompts(name), strategy="autoregressive", max_new_tokens=4)
