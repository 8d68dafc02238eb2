"""The target's first layers draft for it: the tokens are those of plain decoding, and nothing of the target is changed."""

from __future__ import annotations

import pytest
import torch

import decoders
from decoders.engine.first_layers import first_layers
from decoders.errors import SettingsError, UnsupportedError
from decoders.strategies import EarlyExit
from decoders.testing import assert_same_tokens, decode, prompts, tiny_model

EAGER = {"compile": False, "prefill_chunk": 8}
SAMPLING = dict(do_sample=True, seed=5, temperature=0.8, top_k=40)


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("tree", ["none", "static", "dynamic"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "deepseek_v3"])
def test_tokens_are_those_of_the_whole_model(name: str, tree: str) -> None:
    model, inputs = decoders.enable(tiny_model(name)), prompts(3)
    strategy = EarlyExit(exit_layer=1, length=3, tree=tree)
    expected = decode(model, inputs, max_new_tokens=16).sequences
    out = decode(model, inputs, strategy, max_new_tokens=16, decoders_config=EAGER)
    assert_same_tokens(model, inputs, expected, out.sequences, f"{name}, {tree}")
    plain = decode(model, inputs, "autoregressive", max_new_tokens=16, decoders_config=EAGER, **SAMPLING)
    drawn = decode(model, inputs, strategy, max_new_tokens=16, decoders_config=EAGER, **SAMPLING)
    assert_same_tokens(model, inputs, plain.sequences, drawn.sequences, f"{name}, {tree}, sampled")


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_the_first_layers_are_the_whole_model_where_later_ones_add_nothing(name: str) -> None:
    model = tiny_model(name)
    with torch.no_grad():
        for part, parameter in model.named_parameters():
            if ".1." in part and any(end in part for end in ("o_proj", "down_proj", "c_proj")):
                parameter.zero_()
    model = decoders.enable(model)
    out = decode(model, prompts(2), EarlyExit(exit_layer=1, length=4), max_new_tokens=20, decoders_config=EAGER)
    assert out.report.mean_accepted_length > 4


def test_the_cut_model_shares_weights_and_leaves_the_target_as_it_is() -> None:
    model = tiny_model("gemma2")
    layers, kinds = model.config.num_hidden_layers, list(model.config.layer_types)
    cut = first_layers(model, 1)
    assert {id(p) for p in cut.parameters()} < {id(p) for p in model.parameters()}
    assert cut.config.num_hidden_layers == 1
    assert (model.config.num_hidden_layers, model.config.layer_types) == (layers, kinds)
    assert len(model.model.layers) == layers


def test_transformers_argument_says_where_to_leave() -> None:
    model = decoders.enable(tiny_model("llama"))
    out = decode(model, prompts(), "early_exit", assistant_early_exit=1, max_new_tokens=6, decoders_config=EAGER)
    assert out.report.settings["exit_layer"] == 1


@pytest.mark.parametrize("layer", [2, 7])
def test_a_layer_that_is_not_an_inner_one_is_refused(layer: int) -> None:
    model = decoders.enable(tiny_model("llama"))
    with pytest.raises(SettingsError, match="layer 1 … 1"):
        decode(model, prompts(), EarlyExit(exit_layer=layer), max_new_tokens=4, decoders_config=EAGER)


def test_a_recurrent_target_cannot_draft_for_itself() -> None:
    model = decoders.enable(tiny_model("lfm2"))
    with pytest.raises(UnsupportedError, match="recurrent"):
        decode(model, prompts(), EarlyExit(exit_layer=1), max_new_tokens=4, decoders_config=EAGER)
