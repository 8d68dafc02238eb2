"""Layers with a config of their own: copies, layers of another model, and drafts that share layers with their target."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

import decoders
from decoders.common.transformers_compat import attention_of, decoder_layers, set_attention
from decoders.engine.model.attention import attend_by, module_configs
from decoders.engine.model.weights.twin import share_weights
from decoders.strategies import PromptLookup, Speculative
from decoders.testing import assert_same_tokens, decode, prompts, tiny_draft, tiny_model
from decoders.testing.images import SEEING

from .references import EAGER, NEW


def put(model: PreTrainedModel, place: int, layer: nn.Module) -> None:
    """Makes `layer` a decoder layer of `model`."""
    layers = decoder_layers(model)
    holder = next(m for m in model.modules() if isinstance(m, nn.ModuleList) and list(m) == layers)
    holder[place] = layer


def copied(model: PreTrainedModel) -> None:
    put(model, 0, copy.deepcopy(decoder_layers(model)[0]))


def grafted(model: PreTrainedModel) -> None:
    put(model, -1, decoder_layers(copy.deepcopy(model))[-1])


@pytest.mark.parametrize("change", [copied, grafted])
@pytest.mark.parametrize("design", ["llama", "gemma2", "gpt2", "gpt_oss"])
def test_a_layer_with_a_config_of_its_own_decodes(design: str, change: Callable[[PreTrainedModel], None]) -> None:
    model, inputs = tiny_model(design), prompts(2)
    change(model)
    before = {place: attention_of(config) for place, config in module_configs(model).items()}
    expected = decode(model, inputs, max_new_tokens=NEW).sequences
    decoders.enable(model)
    for strategy in ("autoregressive", PromptLookup(length=4)):
        out = decode(model, inputs, strategy, max_new_tokens=NEW, decoders_config=EAGER)
        assert_same_tokens(model, inputs, expected, out.sequences, design)
    assert before == {place: attention_of(config) for place, config in module_configs(model).items()}


@pytest.mark.parametrize("used_before", [False, True])
def test_a_draft_may_share_layers_with_its_target(used_before: bool) -> None:
    model, draft, inputs = tiny_model("llama"), tiny_draft("llama"), prompts(2)
    put(draft, 0, decoder_layers(model)[0])
    expected = decode(model, inputs, max_new_tokens=NEW).sequences
    decoders.enable(model)
    if used_before:
        decode(model, inputs, "autoregressive", max_new_tokens=NEW, decoders_config=EAGER)
    options = dict(assistant_model=draft, max_new_tokens=NEW, decoders_config=EAGER)
    out = decode(model, inputs, Speculative(length=4), **options)
    assert_same_tokens(model, inputs, expected, out.sequences, "llama")


@pytest.mark.parametrize("design", ["gemma3", "qwen2_vl"])
def test_attention_of_towers_is_that_of_set_attn_implementation(design: str) -> None:
    model = SEEING[design]()
    theirs, ours = share_weights(model), share_weights(model)
    theirs.set_attn_implementation("decoders")
    attend_by(ours, "decoders")
    names = [{p: attention_of(c) for p, c in module_configs(each).items()} for each in (theirs, ours)]
    assert names[0] == names[1]


def test_a_model_within_a_model_attends_likewise_if_its_config_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """In transformers 5.17, ``set_attn_implementation`` leaves out models whose config is of the class of the whole model's config."""

    def set_own(self: PreTrainedModel, name: str) -> None:
        set_attention(self.config, name)

    model = tiny_model("gemma2")
    model.config = copy.deepcopy(model.config)
    monkeypatch.setattr(PreTrainedModel, "set_attn_implementation", set_own)
    attend_by(model, "decoders")
    assert {attention_of(config) for config in module_configs(model).values()} == {"decoders"}


def test_positions_that_generate_has_noted_are_not_the_copys() -> None:
    model = tiny_model("llama")
    model.rope_deltas = torch.tensor([[3]])
    assert share_weights(model).rope_deltas is None
    assert model.rope_deltas.item() == 3
