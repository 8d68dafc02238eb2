"""Multi-token prediction: the drafts that transformers' own ``MtpModel`` makes, in batches, trees and recorded steps."""

from __future__ import annotations

import copy
import functools
import sys
from types import MappingProxyType
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import decoders
from decoders.errors import SettingsError, UnsupportedError
from decoders.strategies import Mtp, PromptLookup
from decoders.strategies.merged import Merged
from decoders.strategies.mtp import ATTRIBUTE, use_mtp_layers
from decoders.strategy import Strategy
from decoders.testing import check_strategy, checks_for, decode, prompts, tiny_model
from decoders.testing.conditions import Conditions
from decoders.testing.kit import Check, check_alone
from decoders.testing.models import WINDOW, Architecture
from decoders.testing.spy import Spy

from ..turns import slow_but
from .conftest import of_shapes, paths_of

modeling = pytest.importorskip("transformers.modeling_layers")
if not hasattr(getattr(modeling, "MtpModel", None), "forward_layer"):
    pytest.skip("this transformers builds no MTP layers", allow_module_level=True)

SMALL = dict(
    hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512
)
EXPERTS = dict(moe_intermediate_size=24, num_experts_per_tok=2)
#: Designs whose layers transformers can build, each with as many as it may have, and any other design with some.
DESIGNS = {
    "llama": ("llama", SMALL | dict(num_hidden_layers=1), 3),
    "deepseek_v3": (
        "deepseek_v3",
        SMALL | EXPERTS | dict(
            num_hidden_layers=2, num_key_value_heads=4, n_routed_experts=4, n_group=2, topk_group=1, first_k_dense_replace=1,
            kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=12, num_nextn_predict_layers=2,
        ), 2,
    ),
    "glm4_moe": (
        "glm4_moe",
        SMALL | EXPERTS | dict(
            num_hidden_layers=2, head_dim=8, n_routed_experts=4, n_group=2, topk_group=1, first_k_dense_replace=1,
            num_nextn_predict_layers=2,
        ), 2,
    ),
    "mellum": (
        "mellum",
        SMALL | EXPERTS | dict(
            num_hidden_layers=2, head_dim=8, num_experts=4, sliding_window=WINDOW, num_nextn_predict_layers=1,
            layer_types=["full_attention", "sliding_attention"],
        ), 1,
    ),
}  # fmt: skip


@functools.cache
def with_layers(design: str) -> PreTrainedModel:
    """A tiny enabled model with random layers; those of ``llama`` do what its one decoder layer does, and are often right."""
    model_type, options, count = DESIGNS[design]
    model: Any = Architecture(model_type, MappingProxyType(options))(0)
    model.config.num_mtp_layers = count
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(1)
        layers = modeling.MtpModel(model, count).eval()
        for parameter in layers.layers.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.3)
        for layer in layers.layers if design == "llama" else ():
            layer.mtp_block.load_state_dict(model.model.layers[0].state_dict())
            layer.post_norm.load_state_dict(model.model.norm.state_dict())
            layer.enorm.weight.fill_(1)
            layer.eh_proj.weight.copy_(torch.eye(32, 64))
    use_mtp_layers(model, layers)
    return decoders.enable(model)


@torch.no_grad()
def drafted_by_transformers(model: Any, text: torch.Tensor) -> list[int]:
    """What ``MtpModel`` drafts after `text`, from nothing."""
    from transformers.cache_utils import MtpCache

    layers = vars(model)[ATTRIBUTE]
    hidden = model(text[None], output_hidden_states=True).hidden_states[-1][:, :-1]
    places = torch.arange(1, len(text))[None]
    tokens, _, _ = layers(text[None, 1:], hidden, None, places, MtpCache(config=model.config.get_mtp_config()))
    return tokens[0].tolist()


@pytest.mark.parametrize(
    "design, compile",
    [
        ("llama", False),
        ("deepseek_v3", False),
        *(pytest.param(d, False, marks=pytest.mark.slow) for d in DESIGNS if d not in ("llama", "deepseek_v3")),
        pytest.param("llama", True, marks=pytest.mark.slow),
    ],
)
def test_drafts_are_those_of_transformers(design: str, compile: bool) -> None:
    model, inputs, spy = with_layers(design), prompts(3), Spy(Mtp())
    loop = {"compile": compile, "prefill_chunk": 7}
    out = decode(model, inputs, spy, max_new_tokens=16, decoders_config=loop)
    if design == "llama":
        assert out.report.mean_accepted_length > 1.3
    for row, padding in enumerate((inputs["attention_mask"] == 0).sum(1).tolist()):
        text = out.sequences[row, padding:]
        for step in spy.seen:
            if not step.finished[row]:
                assert step.draft.tokens[row].tolist() == drafted_by_transformers(model, text[: step.lengths[row]])


def test_a_tree_holds_the_chain_and_other_continuations() -> None:
    model, inputs = with_layers("llama"), prompts(2)
    chain = decode(model, inputs, Mtp(), max_new_tokens=16)
    for settings in (dict(tree="static", nodes=12), dict(tree="dynamic", nodes=12)):
        spy = Spy(Mtp(**settings))
        out = decode(model, inputs, spy, max_new_tokens=16)
        assert torch.equal(out.sequences, chain.sequences)
        assert out.report.steps <= chain.report.steps
        for row in range(2):
            length = spy.seen[0].lengths[row]
            text = out.sequences[row, inputs["input_ids"].shape[1] - length :][:length]
            assert tuple(drafted_by_transformers(model, text)) in paths_of(spy.seen[0].draft, row)


def test_tokens_that_others_have_drafted_leave_no_hole() -> None:
    model = with_layers("llama")
    inputs = {"input_ids": torch.tensor([[5, 6, 7, 8] * 6]), "attention_mask": torch.ones(1, 24, dtype=torch.int64)}
    own = Spy(Mtp(length=1))
    merged = Merged([PromptLookup(length=12), own])
    out = decode(model, inputs, merged, max_new_tokens=24)
    for step in own.seen:
        assert step.draft.tokens[0, 0] == drafted_by_transformers(model, out.sequences[0, : step.lengths[0]])[0]


#: What all that draft from the target's states share is checked with eagle3.
SHAPES: dict[Strategy, tuple[str, ...]] = {
    Mtp(): ("check_drafts",),
    Mtp(tree="static", nodes=12): ("check_draft_scores",),
    Mtp(tree="dynamic", nodes=8, length=2): (),
}


@pytest.mark.parametrize("strategy, check", of_shapes(SHAPES))
def test_strategy_conforms(strategy: Mtp, check: Check) -> None:
    check_alone(check, Conditions(models=(with_layers("llama"),)), strategy)


@pytest.mark.slow
@pytest.mark.parametrize("design", DESIGNS)
def test_strategy_conforms_on_every_design(design: str) -> None:
    checks = [c for c in checks_for(Mtp) if c.__name__ != "check_draft_tokens_are_accepted" or design == "llama"]
    for check in checks:
        check_alone(check, Conditions(models=(with_layers(design),)), Mtp())
    if design == "llama":
        check_strategy(Mtp(), models=[with_layers(design)], compile=True)


def test_what_cannot_be_had_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def call(model: Any, strategy: Any) -> None:
        decode(model, prompts(1), strategy, max_new_tokens=2)

    plain = decoders.enable(tiny_model("llama"))
    with pytest.raises(UnsupportedError, match="no multi-token-prediction layers"):
        call(plain, "mtp")
    plain.config.num_mtp_layers = 1
    with pytest.raises(UnsupportedError, match="cannot be loaded from"):
        call(plain, "mtp")
    with pytest.raises(SettingsError, match="length is 4, but the model predicts 3 tokens ahead: set length to 3"):
        call(with_layers("llama"), Mtp(length=4))
    use_mtp_layers(plain, None)
    monkeypatch.delattr(sys.modules["transformers.modeling_layers"], "MtpModel")
    with pytest.raises(UnsupportedError, match="newer transformers"):
        call(plain, "mtp")


def tokens_and_drafts(model: Any, strategy: Strategy | None = None) -> tuple[list[list[int]], list[list[int]]]:
    """What is written, that of plain decoding, and the drafts on the way."""
    inputs, spy = prompts(2), Spy(strategy or Mtp())
    out = decode(model, inputs, spy, max_new_tokens=12, decoders_config={"compile": False}).sequences
    plain = decode(model, inputs, "autoregressive", max_new_tokens=12, decoders_config={"compile": False}).sequences
    assert torch.equal(out, plain)
    return out.tolist(), [step.draft.tokens.tolist() for step in spy.seen]


def test_layers_follow_the_dtype_of_the_model() -> None:
    model = with_layers.__wrapped__("llama")
    layers = vars(model)[ATTRIBUTE]
    before = tokens_and_drafts(model)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.to(torch.bfloat16)
    assert tokens_and_drafts(model)[1]
    assert {parameter.dtype for parameter in layers.layers.parameters()} == {torch.float32}  # they are the caller's
    model.to(torch.float32).load_state_dict(weights)
    assert tokens_and_drafts(model) == before


def test_layers_of_another_dtype_are_converted_and_written_to_as_they_change() -> None:
    model = with_layers.__wrapped__("llama")
    layers = copy.deepcopy(vars(model)[ATTRIBUTE]).to(torch.bfloat16)
    use_mtp_layers(model, layers)
    first = tokens_and_drafts(model)[1]
    assert {parameter.dtype for parameter in layers.parameters()} == {torch.bfloat16}
    with torch.no_grad():
        for layer in layers.layers:
            layer.eh_proj.weight.neg_()
    assert tokens_and_drafts(model)[1] != first


@pytest.mark.parametrize("design", slow_but(["llama"], DESIGNS))
def test_every_design_converts_its_layers(design: str) -> None:
    model = with_layers.__wrapped__(design)
    use_mtp_layers(model, vars(model)[ATTRIBUTE].to(torch.bfloat16))
    model.to(torch.float32)
    tokens_and_drafts(model)


def test_layers_read_the_embedding_of_the_model_that_they_draft_for() -> None:
    model, other = with_layers.__wrapped__("llama"), Architecture("llama", MappingProxyType(DESIGNS["llama"][1]))(7)
    expected, other.config.num_mtp_layers = tokens_and_drafts(model), 3
    elsewhere = modeling.MtpModel(other, 3).eval()
    elsewhere.layers.load_state_dict(vars(model)[ATTRIBUTE].layers.state_dict())
    use_mtp_layers(model, elsewhere)
    assert tokens_and_drafts(model) == expected
    assert elsewhere.embed_tokens is other.get_input_embeddings()


def test_what_are_no_layers_for_the_model_is_refused_at_once() -> None:
    model = with_layers.__wrapped__("llama")
    kept = vars(model)[ATTRIBUTE]
    wide = Architecture("llama", MappingProxyType(DESIGNS["llama"][1] | dict(hidden_size=64)))(0)
    wide.config.num_mtp_layers = 1
    for layers, message in [
        (torch.nn.Linear(2, 2), "an MtpModel of transformers or None, not Linear"),
        ("folder", "an MtpModel of transformers or None, not str"),
        (modeling.MtpModel(wide, 1), "for hidden size 64, this LlamaForCausalLM has hidden size 32"),
        (modeling.MtpModel(model, 0), "holds no layer"),
    ]:
        with pytest.raises(SettingsError, match=message):
            use_mtp_layers(model, layers)
        assert vars(model)[ATTRIBUTE] is kept
