"""A tokenizer that is not the model's is refused where it is given."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import decoders
from decoders import Scheduler
from decoders.errors import SettingsError
from decoders.testing import tiny_model

from ..tokenizer_kinds import byte_level

BYTES = 264  # and merges


def tokenizer() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=byte_level(False), eos_token="</s>", pad_token="<pad>")


def model(rows: int, stops: Any = None) -> PreTrainedModel:
    built = tiny_model("llama", vocab_size=rows)
    built.generation_config.eos_token_id = stops
    return built


@pytest.mark.parametrize(
    "rows, stops, message",
    [
        (4096, None, "has 266 tokens, and LlamaForCausalLM has embeddings for 4,096. Pass the tokenizer that"),
        (8, None, r"has 266 tokens, and LlamaForCausalLM has embeddings for 8\. .* if you have added tokens"),
        (320, 3, "ends texts with token 264 .'</s>'., and LlamaForCausalLM with 3, which is the text '.' there"),
        (320, [319, 4], "with 319, which it lacks and 4, which is the text"),
    ],
)
def test_another_models_tokenizer_is_refused(rows: int, stops: Any, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        decoders.enable(model(rows, stops), tokenizer())
    with pytest.raises(SettingsError, match=message):
        Scheduler(model(rows, stops), tokenizer=tokenizer())
    plain = decoders.enable(model(rows, stops))
    with pytest.raises(SettingsError, match=message):
        plain.generate(torch.tensor([[1, 2]]), strategy="prompt_lookup", tokenizer=tokenizer(), max_new_tokens=2)


@pytest.mark.parametrize("rows, stops", [(266, 264), (320, None), (264, 264), (512, [3, 265])])
def test_padded_embeddings_and_several_stop_tokens_are_the_models_own(rows: int, stops: Any) -> None:
    decoders.enable(model(rows, stops), tokenizer())


@pytest.mark.parametrize(
    "given, said",
    [
        ("prompt_lookup", "not 'prompt_lookup': .* strategy='prompt_lookup'"),
        (SimpleNamespace(tokenizer=None), r"pass processor\.tokenizer"),
    ],
)
def test_what_is_no_tokenizer_is_refused(given: Any, said: str) -> None:
    target = model(320)
    with pytest.raises(SettingsError, match=said):
        decoders.enable(target, given)
    assert "generate" not in vars(target)


def test_a_misspelt_keyword_of_enable_gets_the_nearest_one() -> None:
    with pytest.raises(SettingsError, match="unknown setting 'tokeniser'.*Did you mean 'tokenizer'"):
        decoders.enable(model(320), tokeniser=tokenizer())
