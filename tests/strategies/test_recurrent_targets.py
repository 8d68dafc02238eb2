"""Drafters that read the target's hidden states, grammars and bfloat16 on targets with recurrent layers."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, modeling_layers

import decoders
from decoders.common.transformers_compat import cache_keyword, cache_of
from decoders.engine.decode import engine
from decoders.errors import UnsupportedError
from decoders.strategies import DFlash, Eagle3, EarlyExit, Medusa, Mtp, PromptLookup
from decoders.strategies.merged import Merged
from decoders.strategies.mtp import use_mtp_layers
from decoders.strategy import Strategy
from decoders.testing import RECURRENT, Replay, assert_same_tokens, decode, prompts, tiny_model
from decoders.testing.models import Architecture

from ..turns import slow_but
from . import test_dflash, test_eagle1
from .conftest import needs_mtp, random_heads
from .test_eagle3 import written

NEW = 16
EAGER = {"compile": False, "prefill_chunk": 7}
SAMPLING: dict[str, Any] = dict(do_sample=True, seed=5, temperature=0.8, top_k=40)
QUICK = ("granitemoehybrid", "lfm2")
LOW_LAYERS = test_dflash.Names(mask_token_id=test_dflash.MASK, target_layer_ids=(0, 1))
DRAFTERS = ("eagle3 chain", "eagle3 tree", "medusa", "merged")


@functools.cache
def enabled(name: str) -> PreTrainedModel:
    return decoders.enable(tiny_model(name))


def drafter(kind: str) -> Strategy:
    head: dict[str, Any] = dict(head=written("authors"), layers=(0, 1, -1))
    if kind == "eagle3 chain":
        return Eagle3(tree="none", length=4, **head)
    if kind == "eagle3 tree":
        return Eagle3(nodes=10, length=3, **head)
    medusa = Medusa(heads=random_heads(), nodes=12)
    return medusa if kind == "medusa" else Merged([PromptLookup(length=3), medusa])


def cases() -> list[Any]:
    return [
        pytest.param(name, kind, marks=() if name in QUICK else pytest.mark.slow)
        for name in RECURRENT
        for kind in DRAFTERS
        if not (name == "zamba2" and kind.startswith("eagle3"))  # layers of two classes
    ]


@pytest.mark.in_turns
@pytest.mark.parametrize("name, kind", cases())
def test_heads_draft_for_recurrent_targets(name: str, kind: str) -> None:
    model, inputs = enabled(name), prompts(3)
    for sampling in ({}, SAMPLING):
        plain = decode(model, inputs, "autoregressive", max_new_tokens=NEW, decoders_config=EAGER, **sampling)
        out = decode(model, inputs, drafter(kind), max_new_tokens=NEW, decoders_config=EAGER, **sampling)
        assert_same_tokens(model, inputs, plain.sequences, out.sequences, f"{name}, {kind}")
        assert out.report.drafted > 0


@pytest.mark.parametrize("name", slow_but(QUICK[:1], RECURRENT))
def test_grammars_guide_recurrent_targets(name: str, byte_tokenizer: Any) -> None:
    tokenizer = byte_tokenizer(["<end>"], eos_token="<end>")
    model = decoders.enable(tiny_model(name), tokenizer)
    inputs, grammar = prompts(2), decoders.regex("(ab|ba)+c{3}[0-9]{2,}")
    options: dict[str, Any] = dict(max_new_tokens=NEW, decoders_config=EAGER, grammar=grammar, eos_token_id=0)
    plain = decode(model, inputs, "autoregressive", **options)
    for strategy in ("grammar", Merged([PromptLookup(length=4), Medusa(heads=random_heads(), nodes=8)])):
        assert decode(model, inputs, strategy, **options).sequences.tolist() == plain.sequences.tolist()


@pytest.mark.parametrize("name", slow_but(QUICK[:1], RECURRENT))
def test_bfloat16_tokens_are_those_of_plain_decoding_up_to_rounding(name: str) -> None:
    """At every place the token is plain decoding's, or one whose logit is as high but for rounding."""
    model = decoders.enable(tiny_model(name).to(torch.bfloat16))
    inputs = prompts(2)
    plain = decode(model, inputs, "autoregressive", max_new_tokens=NEW, decoders_config=EAGER).sequences
    start = [int(row.nonzero()[0]) for row in inputs["attention_mask"]]
    replay = Replay(texts=tuple(tuple(row[s:].tolist()) for row, s in zip(plain, start, strict=True)), branches=2)
    out = decode(model, inputs, replay, max_new_tokens=NEW, decoders_config=EAGER)
    with torch.no_grad():
        logits = model(out.sequences[:1]).logits.float()  # the first row has no padding
    written_ = out.sequences[0, inputs["input_ids"].shape[1] :]
    before = logits[0, inputs["input_ids"].shape[1] - 1 : -1]
    missing = before.amax(-1) - before.gather(1, written_[:, None])[:, 0]
    assert (missing <= 0.1 * before.abs().amax()).all()
    assert out.report.accepted > NEW


def test_a_design_whose_own_paths_differ_is_decoded_as_its_own_generate_does() -> None:
    """Nemotron-H's scan over many tokens raises small time steps to ``time_step_min``, its update by one token does not: transformers'
    cached logits differ from those of a plain forward. What a step verifies is the update, as in transformers' own decoding."""
    options = dict(RECURRENT["nemotron_h"].options) | dict(
        layers_block_type=["mamba", "attention", "moe", "mamba"], n_routed_experts=4, num_experts_per_tok=2, n_group=1,
        topk_group=1, moe_intermediate_size=24, moe_shared_expert_intermediate_size=24,
    )  # fmt: skip
    model = Architecture("nemotron_h", MappingProxyType(options))(0)
    ids = prompts()["input_ids"]
    with torch.no_grad():
        cache = {cache_keyword(model): cache_of(model(ids[:, :12], use_cache=True))}
        stepped = torch.cat([model(ids[:, i : i + 1], **cache).logits for i in range(12, 24)], 1)
        assert (stepped - model(ids).logits[:, 12:]).abs().max() > 1e-3, (
            "transformers has changed: compare with it here"
        )
    decoders.enable(model)
    plain = decode(model, prompts(2), "autoregressive", max_new_tokens=NEW, decoders_config=EAGER)
    out = decode(model, prompts(2), drafter("merged"), max_new_tokens=NEW, decoders_config=EAGER)
    assert_same_tokens(model, prompts(2), plain.sequences, out.sequences, "nemotron_h with experts")


@pytest.mark.parametrize("kind", ["eagle chain", pytest.param("dflash", marks=pytest.mark.slow)])
def test_drafts_go_through_a_head_that_reads_a_setting_of_the_decoder(kind: str, tmp_path: Path) -> None:
    """Falcon-H1 multiplies its logits by a number that its decoder keeps."""
    if kind == "dflash":
        strategy: Strategy = DFlash(draft_model=test_dflash.written("authors", dflash_config=LOW_LAYERS))
    else:
        torch.save(test_eagle1.weights(bias=False), tmp_path / "pytorch_model.bin")
        (tmp_path / "config.json").write_text(json.dumps(test_eagle1.CONFIG))
        strategy = Eagle3(head=str(tmp_path), tree="none", length=3)
    model, inputs = enabled("falcon_h1"), prompts(3)
    for sampling in ({}, SAMPLING):
        plain = decode(model, inputs, "autoregressive", max_new_tokens=NEW, decoders_config=EAGER, **sampling)
        out = decode(model, inputs, strategy, max_new_tokens=NEW, decoders_config=EAGER, **sampling)
        assert_same_tokens(model, inputs, plain.sequences, out.sequences, f"falcon_h1, {kind}")
        assert out.report.drafted > 0


def test_a_head_that_cannot_tell_the_layers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "decoder_layers", lambda model: [])
    with pytest.raises(UnsupportedError, match="Zamba2ForCausalLM has no list of decoder layers"):
        decode(enabled("zamba2"), prompts(), drafter("eagle3 chain"), max_new_tokens=4, decoders_config=EAGER)


def with_layers(name: str, **options: Any) -> PreTrainedModel:
    """A target with one random layer that predicts a token more."""
    architecture = RECURRENT[name]
    model: Any = Architecture(architecture.model_type, MappingProxyType(dict(architecture.options) | options))(0)
    config = model.config.get_text_config(decoder=True)
    config.num_mtp_layers, config.mtp_layer_types, config.mtp_mlp_layer_types = 1, ["full_attention"], ["dense"]
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(1)
        layers = modeling_layers.MtpModel(model, 1).eval()
        for parameter in layers.layers.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.3)
    use_mtp_layers(model, layers)
    return decoders.enable(model)


@pytest.mark.slow
@needs_mtp
@pytest.mark.parametrize(
    "name",
    [
        "qwen3_next",
        *(
            pytest.param(n, marks=pytest.mark.slow)
            for n in ("qwen3_5", "olmo_hybrid", "granitemoehybrid", "kimi_linear")
        ),
    ],
)
def test_layers_for_further_tokens_draft_for_recurrent_targets(name: str) -> None:
    """Where these layers have attention; that of Qwen3-Next's last layer says which norms they get."""
    ends_in_attention = dict(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
    dense = dict(mlp_layer_types=["dense", "sparse"]) if name == "kimi_linear" else {}
    model, inputs = with_layers(name, **ends_in_attention, **dense), prompts(3)
    for sampling in ({}, SAMPLING):
        plain = decode(model, inputs, "autoregressive", max_new_tokens=NEW, decoders_config=EAGER, **sampling)
        for settings in ({}, dict(tree="static", nodes=4)):
            out = decode(model, inputs, Mtp(**settings), max_new_tokens=NEW, decoders_config=EAGER, **sampling)
            assert_same_tokens(model, inputs, plain.sequences, out.sequences, f"{name}, mtp, {settings}")
            assert out.report.drafted > 0


@needs_mtp
def test_layers_that_transformers_builds_wrong_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="MtpModel cannot run its layers of Qwen3NextForCausalLM"):
        decode(with_layers("qwen3_next"), prompts(), Mtp(), max_new_tokens=4, decoders_config=EAGER)


def test_layers_with_a_state_are_refused_as_drafts() -> None:
    with pytest.raises(UnsupportedError, match="recurrent"):
        decode(enabled("qwen3_next"), prompts(), EarlyExit(exit_layer=2), max_new_tokens=4, decoders_config=EAGER)


@needs_mtp
def test_models_without_mtp_layers_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="no multi-token-prediction layers"):
        decode(enabled("qwen3_next"), prompts(), Mtp(), max_new_tokens=4, decoders_config=EAGER)
