"""EAGLE and EAGLE-2 heads, which read what the target's output head reads: the authors' files, drafts as their equations say."""

from __future__ import annotations

import json
from functools import cache
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import decoders
from decoders.errors import SettingsError, UnsupportedError
from decoders.heads.eagle3 import EagleConfig
from decoders.heads.eagle3_files import read_config
from decoders.strategies import Eagle3, PromptLookup
from decoders.strategies.merged import Merged
from decoders.testing import check_strategy, checks_for, decode, prompts
from decoders.testing.conditions import Conditions
from decoders.testing.kit import check_alone
from decoders.testing.models import VOCAB, Architecture
from decoders.testing.spy import Spy

H, HEADS, KV, WIDE, THETA, EPS = 32, 4, 2, 48, 10000.0, 1e-6
CONFIG = dict(
    architectures=["LlamaForCausalLM"], model_type="llama", num_hidden_layers=1, hidden_size=H, intermediate_size=WIDE,
    num_attention_heads=HEADS, num_key_value_heads=KV, vocab_size=VOCAB, rms_norm_eps=EPS, rope_theta=THETA,
    max_position_embeddings=512, hidden_act="silu",
)  # fmt: skip


@cache
def target() -> Any:
    options = dict(
        hidden_size=H, intermediate_size=WIDE, num_hidden_layers=2, num_attention_heads=HEADS, num_key_value_heads=KV,
        max_position_embeddings=512,
    )  # fmt: skip
    return decoders.enable(Architecture("llama", MappingProxyType(options))(0))


def weights(bias: bool) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int, scale: float = 0.15) -> Tensor:
        return torch.randn(shape, generator=generator) * scale

    state = {
        "embed_tokens.weight": target().get_input_embeddings().weight.detach().clone(), "fc.weight": random(H, 2 * H, scale=0.4),
        "layers.0.post_attention_layernorm.weight": 1 + random(H),
        "layers.0.self_attn.q_proj.weight": random(H, H), "layers.0.self_attn.k_proj.weight": random(H // 2, H),
        "layers.0.self_attn.v_proj.weight": random(H // 2, H), "layers.0.self_attn.o_proj.weight": random(H, H),
        "layers.0.mlp.gate_proj.weight": random(WIDE, H), "layers.0.mlp.up_proj.weight": random(WIDE, H),
        "layers.0.mlp.down_proj.weight": random(H, WIDE),
    }  # fmt: skip
    return state | ({"fc.bias": random(H)} if bias else {})


@pytest.fixture(scope="module", params=[True, False], ids=["bias", "no bias"])
def folder(tmp_path_factory, request):
    path = tmp_path_factory.mktemp("eagle")
    torch.save(weights(request.param), path / "pytorch_model.bin")
    (path / "config.json").write_text(json.dumps(CONFIG))
    if request.param:
        (path / "bias").touch()
    return path


def turned(states: Tensor) -> Tensor:
    """Rotary positions 0, 1, …; states: ``[heads, N, d]``."""
    half = states.shape[-1] // 2
    angles = torch.arange(states.shape[1])[:, None] * THETA ** (-torch.arange(half) / half)
    first, second = states[..., :half], states[..., half:]
    return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1)


@torch.no_grad()
def by_the_paper(w: dict[str, Tensor], text: Tensor, length: int) -> list[int]:
    """The chain that a head drafts after `text` ``[n]``, from nothing, in plain equations."""
    model = target()
    w = {name.removeprefix("layers.0."): tensor for name, tensor in w.items()}
    features = model(text[None], output_hidden_states=True).hidden_states[-1][0, :-1]
    tokens, drafted = text[1:].tolist(), []
    for _ in range(length):
        read = torch.cat([w["embed_tokens.weight"][tokens], features], -1) @ w["fc.weight"].T + w.get("fc.bias", 0)
        q, k, v = (
            (read @ w[f"self_attn.{name}_proj.weight"].T).view(len(read), -1, H // HEADS).transpose(0, 1)
            for name in "qkv"
        )
        k, v = k.repeat_interleave(HEADS // KV, 0), v.repeat_interleave(HEADS // KV, 0)
        scores = turned(q) @ turned(k).transpose(1, 2) / (H // HEADS) ** 0.5
        scores = scores.masked_fill(torch.ones(len(read), len(read)).triu(1).bool(), float("-inf"))
        states = read + (scores.softmax(-1) @ v).transpose(0, 1).flatten(1) @ w["self_attn.o_proj.weight"].T
        inner = w["post_attention_layernorm.weight"] * states * (states.pow(2).mean(-1, keepdim=True) + EPS).rsqrt()
        gate = F.silu(inner @ w["mlp.gate_proj.weight"].T) * (inner @ w["mlp.up_proj.weight"].T)
        states = states + gate @ w["mlp.down_proj.weight"].T
        drafted.append(int(model.lm_head(states[-1]).argmax()))
        tokens.append(drafted[-1])
        features = torch.cat([features, states[-1:]])
    return drafted


def test_chains_are_those_of_the_papers_equations(folder) -> None:
    inputs, spy = prompts(3), Spy(Eagle3(head=str(folder), tree="none", length=3))
    own = torch.load(folder / "pytorch_model.bin", weights_only=True)
    out = decode(target(), inputs, spy, max_new_tokens=12, decoders_config={"prefill_chunk": 7})
    assert torch.equal(out.sequences, decode(target(), inputs, "autoregressive", max_new_tokens=12).sequences)
    compared = 0
    for row, padding in enumerate((inputs["attention_mask"] == 0).sum(1).tolist()):
        for step in spy.seen:
            if not step.finished[row]:
                text = out.sequences[row, padding:][: step.lengths[row]]
                assert step.draft.tokens[row].tolist() == by_the_paper(own, text, 3)
                compared += 1
    assert compared > 6


def test_it_merges_with_drafters_that_read_layers(folder) -> None:
    strategy = Merged([PromptLookup(length=3), Eagle3(head=str(folder), tree="static", length=2, nodes=6)])
    out = decode(target(), prompts(2), strategy, max_new_tokens=10)
    assert torch.equal(out.sequences, decode(target(), prompts(2), "autoregressive", max_new_tokens=10).sequences)


@pytest.mark.parametrize(
    "name",
    [
        "check_drafts",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("check_on_device", "check_sampling_equals_autoregressive")),
    ],
)
def test_strategy_conforms(folder, name) -> None:
    if (folder / "bias").exists():
        check = next(check for check in checks_for(Eagle3) if check.__name__ == name)
        strategy = Eagle3(head=str(folder), length=3, nodes=20, children=8, beam=4)
        check_alone(check, Conditions(models=(target(),)), strategy)


@pytest.mark.slow
def test_strategy_conforms_in_every_check(folder) -> None:
    check_strategy(Eagle3(head=str(folder), length=3, nodes=20, children=8, beam=4), models=[target()])


def test_config_tells_the_generation(folder, tmp_path) -> None:
    config = read_config(folder)
    assert isinstance(config, EagleConfig)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"architectures": ["LlamaForCausalLMEagle3"]}))
    assert not isinstance(read_config(tmp_path), EagleConfig)
    window = {"layer_types": ["sliding_attention"], "sliding_window": 8}
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | window))
    with pytest.raises(UnsupportedError, match="EAGLE and EAGLE-2 heads with a sliding window"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | window | {"architectures": ["LlamaForCausalLMEagle4"]}))
    assert not isinstance(newest := read_config(tmp_path), EagleConfig) and newest.windows == (8,)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"hidden_size": 64}))
    torch.save(weights(True), tmp_path / "pytorch_model.bin")
    with pytest.raises(SettingsError, match="do not fit its config"):
        decode(target(), prompts(1), Eagle3(head=str(tmp_path)), max_new_tokens=2)
