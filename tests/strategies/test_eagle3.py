"""EAGLE-3: heads in both public formats draft what the paper's equations say, in batches, trees and recorded steps."""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

import decoders
from decoders.errors import SettingsError, UnsupportedError
from decoders.heads.eagle3_files import load_head, read_config
from decoders.strategies import Eagle3, PromptLookup
from decoders.strategies.merged import Merged
from decoders.strategy import Strategy
from decoders.testing import check_strategy, decode, prompts, tiny_model
from decoders.testing.conditions import Conditions
from decoders.testing.kit import Check, check_alone
from decoders.testing.models import VOCAB, Architecture
from decoders.testing.spy import Spy

from .conftest import of_shapes, paths_of

H, HEADS, KV, WIDE = 32, 4, 2, 48
LAYER = dict(
    hidden_size=H, intermediate_size=WIDE, num_attention_heads=HEADS, num_key_value_heads=KV, rms_norm_eps=1e-5,
    vocab_size=VOCAB, rope_theta=5000.0, max_position_embeddings=2048, hidden_act="silu", model_type="llama",
)  # fmt: skip
#: Three of four draft ids are the target's first ones, and the rest its last.
IDS = torch.cat([torch.arange(72), torch.arange(VOCAB - 24, VOCAB)])


def weights(seed: int = 0) -> dict[str, Tensor]:
    """A head that mostly says what the embedding of the last token says: random numbers would never be right."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int, scale: float = 0.15) -> Tensor:
        return torch.randn(shape, generator=generator) * scale

    return {
        "fc.weight": random(H, 3 * H), "norm.weight": 1 + random(H), "lm_head.weight": random(len(IDS), H, scale=0.5),
        "midlayer.hidden_norm.weight": 1 + random(H), "midlayer.input_layernorm.weight": 1 + random(H),
        "midlayer.post_attention_layernorm.weight": 1 + random(H),
        "midlayer.self_attn.q_proj.weight": random(H, 2 * H), "midlayer.self_attn.k_proj.weight": random(H // 2, 2 * H),
        "midlayer.self_attn.v_proj.weight": random(H // 2, 2 * H), "midlayer.self_attn.o_proj.weight": random(H, H),
        "midlayer.mlp.gate_proj.weight": random(WIDE, H), "midlayer.mlp.up_proj.weight": random(WIDE, H),
        "midlayer.mlp.down_proj.weight": random(H, WIDE),
        "d2t": IDS - torch.arange(len(IDS)), "t2d": torch.isin(torch.arange(VOCAB), IDS),
    }  # fmt: skip


_folders: list[tempfile.TemporaryDirectory] = []


@cache
def written(kind: str, **changes: Any) -> str:
    """A folder with a head in the format `kind`, the same in every run."""
    _folders.append(tempfile.TemporaryDirectory(prefix="eagle3-"))
    folder, state = Path(_folders[-1].name), weights()
    if kind == "authors":
        config = LAYER | dict(architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=len(IDS), num_hidden_layers=1)
        torch.save(state, folder / "pytorch_model.bin")
    else:
        config = dict(
            architectures=["Eagle3Speculator"], speculators_model_type="eagle3", draft_vocab_size=len(IDS),
            norm_before_residual=True, target_hidden_size=None, eagle_aux_hidden_state_layer_ids=[1, 2, 4],
            transformer_layer_config=LAYER | dict(num_hidden_layers=1), speculators_config=dict(algorithm="eagle3"),
        )  # fmt: skip
        state = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in state.items()}
        state["embed_tokens.weight"] = torch.randn(VOCAB, H, generator=torch.Generator().manual_seed(9))
        save_file(state, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config | changes))
    return str(folder)


@cache
def target() -> PreTrainedModel:
    options = dict(
        hidden_size=H, intermediate_size=WIDE, num_hidden_layers=5, num_attention_heads=HEADS, num_key_value_heads=KV,
        max_position_embeddings=512,
    )  # fmt: skip
    return decoders.enable(Architecture("llama", MappingProxyType(options))(0))


def norm(states: Tensor, weight: Tensor) -> Tensor:
    return weight * states * (states.pow(2).mean(-1, keepdim=True) + LAYER["rms_norm_eps"]).rsqrt()


def turned(states: Tensor) -> Tensor:
    """Rotary positions 0, 1, …; states: ``[heads, N, d]``."""
    half = states.shape[-1] // 2
    angles = torch.arange(states.shape[1])[:, None] * LAYER["rope_theta"] ** (-torch.arange(half) / half)
    first, second = states[..., :half], states[..., half:]
    return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1)


@torch.no_grad()
def by_the_paper(model: Any, text: Tensor, kind: str, length: int) -> list[int]:
    """The chain that a head drafts after `text` ``[n]``, from nothing, in plain equations."""
    w, speculators = weights(), kind == "speculators"
    layers = (0, 1, 3) if speculators else (1, 5 // 2 - 1, 5 - 4)
    table = model.get_input_embeddings().weight
    if speculators:
        table = torch.randn(VOCAB, H, generator=torch.Generator().manual_seed(9))
    seen: dict[int, Tensor] = {}
    hooks = [
        model.model.layers[i].register_forward_hook(lambda _, __, out, i=i: seen.update({i: out[0]}))
        for i in set(layers)
    ]
    model(text[None])
    for hook in hooks:
        hook.remove()
    features = torch.cat([seen[i] for i in layers], -1)[:-1] @ w["fc.weight"].T
    tokens, drafted = text[1:].tolist(), []
    for _ in range(length):
        normed = norm(features, w["midlayer.hidden_norm.weight"])
        read = torch.cat([norm(table[tokens], w["midlayer.input_layernorm.weight"]), normed], -1)
        q, k, v = (
            (read @ w[f"midlayer.self_attn.{name}_proj.weight"].T).view(len(read), -1, H // HEADS).transpose(0, 1)
            for name in "qkv"
        )
        k, v = k.repeat_interleave(HEADS // KV, 0), v.repeat_interleave(HEADS // KV, 0)
        scores = turned(q) @ turned(k).transpose(1, 2) / (H // HEADS) ** 0.5
        scores = scores.masked_fill(torch.ones(len(read), len(read)).triu(1).bool(), float("-inf"))
        attended = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1) @ w["midlayer.self_attn.o_proj.weight"].T
        states = (normed if speculators else features) + attended
        inner = norm(states, w["midlayer.post_attention_layernorm.weight"])
        gate = F.silu(inner @ w["midlayer.mlp.gate_proj.weight"].T) * (inner @ w["midlayer.mlp.up_proj.weight"].T)
        states = states + gate @ w["midlayer.mlp.down_proj.weight"].T
        best = int((norm(states[-1], w["norm.weight"]) @ w["lm_head.weight"].T).argmax())
        drafted.append(int(IDS[best]))
        tokens.append(drafted[-1])
        features = torch.cat([features, states[-1:]])
    return drafted


#: EAGLE-3.1 and P-EAGLE: fields of the config, and what they bring.
NEWER = {
    "3.1, each layer normed": dict(fc_norm=True, norm_output=True),
    "3.1, normed as a whole": dict(norm_before_fc=True),
    "two layers": dict(layers=2),
    "parallel": dict(speculators_model_type="peagle", mask_token_id=7),
    "parallel, two layers, normed": dict(layers=2, parallel_drafting=True, pard_token=9, fc_norm=True),
}


@cache
def newer(name: str) -> str:
    """A folder with a head like those that NeMo AutoModel (names with ``model.``) and `speculators` write."""
    fields, state = dict(NEWER[name]), weights(5)
    random = torch.Generator().manual_seed(6)
    count = fields.pop("layers", 1)
    if fields.get("norm_before_fc"):
        state["input_norm.weight"] = 1 + 0.3 * torch.randn(3 * H, generator=random)
    if fields.get("fc_norm"):
        state |= {f"fc_norm.{i}.weight": 1 + 0.3 * torch.randn(H, generator=random) for i in range(3)}
    if "parallel" in name:
        state["mask_hidden"] = torch.randn(1, 1, 3 * H, generator=random)
    for layer in range(1, count):
        for part, tensor in weights(7 + layer).items():
            own = part.removeprefix("midlayer.")
            if own != part and own != "hidden_norm.weight":
                wide = own.removeprefix("self_attn.")[:1] in "qkv" and "self_attn" in own
                state[f"layers.{layer}.{own}"] = tensor[:, :H].contiguous() if wide else tensor
    state = {part.replace("midlayer.", "layers.0."): tensor for part, tensor in state.items()}
    if "two layers" in name:
        state = {
            part if part in ("lm_head.weight", "d2t", "t2d", "mask_hidden") else f"model.{part}": t
            for part, t in state.items()
        }
    _folders.append(tempfile.TemporaryDirectory(prefix="eagle3-"))
    folder = Path(_folders[-1].name)
    save_file(state, folder / "model.safetensors")
    config = dict(
        architectures=["Eagle3Speculator"], draft_vocab_size=len(IDS), eagle_aux_hidden_state_layer_ids=[1, 2, 4],
        transformer_layer_config=LAYER | dict(num_hidden_layers=count),
    )  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config | fields))
    return str(folder)


@torch.no_grad()
def plainly(model: Any, text: Tensor, name: str, length: int) -> list[int]:
    """The chain that a newer head drafts after `text`, by transformers' layers over the whole text and the whole draft so far."""
    head = load_head(newer(name), torch.device("cpu"), torch.float32).head
    table, hidden = model.get_input_embeddings().weight, model(text[None], output_hidden_states=True).hidden_states
    features = torch.cat([hidden[layer + 1][0] for layer in (0, 1, 3)], -1)[:-1]

    def fused(states: Tensor) -> Tensor:
        w = {part: tensor for part, tensor in head.state_dict().items() if "norm" in part}
        if "as a whole" in name:
            states = norm(states, w["input_norm.weight"])
        if NEWER[name].get("fc_norm"):
            states = torch.cat([norm(part, w[f"fc_norm.{i}.weight"]) for i, part in enumerate(states.split(H, -1))], -1)
        return states @ head.fc.weight.T

    def run(read: Tensor, states: Tensor) -> Tensor:
        n = len(read)
        mask = torch.full((n, n), torch.finfo(torch.float32).min).triu(1)[None, None]
        rotary = head.rotary_emb(read[None], torch.arange(n)[None])
        states = eager(head, head.midlayer, read, states, rotary, mask)
        for layer in head.deeper:
            states = layer(states, position_embeddings=rotary, attention_mask=mask)
        return states[0]

    states, read = fused(features), table[text[1:]]
    if "parallel" in name:
        masks = (length - 1, -1)
        read = torch.cat([read, table[head.head_config.mask_token_id].expand(*masks)])
        given = run(read, torch.cat([states, fused(head.mask_hidden[0]).expand(*masks)]))[-length:]
        return IDS[(norm(given, head.norm.weight) @ head.lm_head.weight.T).argmax(-1)].tolist()
    drafted: list[int] = []
    for _ in range(length):
        given = run(read, states)[-1:]
        normed = norm(given, head.norm.weight)
        drafted.append(int(IDS[int((normed @ head.lm_head.weight.T).argmax())]))
        states = torch.cat([states, normed if NEWER[name].get("norm_output") else given])
        read = torch.cat([read, table[drafted[-1:]]])
    return drafted


def eager(head: Any, layer: Any, read: Tensor, states: Tensor, rotary: Any, mask: Tensor) -> Tensor:
    """The first layer of a head, whose attention reads an embedding and a state side by side."""
    normed = layer.hidden_norm(states)
    side_by_side = torch.cat([layer.input_layernorm(read), normed], -1)[None]
    attended = layer.self_attn(side_by_side, position_embeddings=rotary, attention_mask=mask)[0]
    states = (normed if layer.norm_before_residual else states) + attended[0]
    return (states + layer.mlp(layer.post_attention_layernorm(states)))[None]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (place % 2)) for place, n in enumerate(NEWER)]
)
def test_newer_heads_draft_what_their_equations_say(name: str) -> None:
    model, inputs, spy = target(), prompts(3), Spy(Eagle3(head=newer(name), tree="none", length=4))
    out = decode(model, inputs, spy, max_new_tokens=8, decoders_config={"prefill_chunk": 7})
    assert torch.equal(out.sequences, decode(model, inputs, "autoregressive", max_new_tokens=8).sequences)
    for row, padding in enumerate((inputs["attention_mask"] == 0).sum(1).tolist()):
        for step in spy.seen:
            if not step.finished[row]:
                text = out.sequences[row, padding : padding + step.lengths[row]]
                assert step.draft.tokens[row].tolist() == plainly(model, text, name, 4)


@pytest.mark.parametrize(
    "kind, compile",
    [
        ("authors", False),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("speculators", False), ("authors", True))),
    ],
)
def test_chains_are_those_of_the_papers_equations(kind: str, compile: bool) -> None:
    model, inputs, spy = target(), prompts(3), Spy(Eagle3(head=written(kind), tree="none", length=3))
    loop = {"compile": compile, "prefill_chunk": 7}
    out = decode(model, inputs, spy, max_new_tokens=16, decoders_config=loop)
    assert torch.equal(out.sequences, decode(model, inputs, "autoregressive", max_new_tokens=16).sequences)
    for row, padding in enumerate((inputs["attention_mask"] == 0).sum(1).tolist()):
        text = out.sequences[row, padding:]
        for step in spy.seen:
            if not step.finished[row]:
                expected = by_the_paper(model, text[: step.lengths[row]], kind, 3)
                assert step.draft.tokens[row].tolist() == expected


def test_tokens_that_others_have_drafted_leave_no_hole() -> None:
    model, own = target(), Spy(Eagle3(head=written("authors"), tree="none", length=2))
    inputs = {"input_ids": torch.tensor([[5, 6, 7, 8] * 6]), "attention_mask": torch.ones(1, 24, dtype=torch.int64)}
    out = decode(model, inputs, Merged([PromptLookup(length=12), own]), max_new_tokens=24)
    for step in own.seen:
        text = out.sequences[0, : step.lengths[0]]
        assert step.draft.tokens[0].tolist() == by_the_paper(model, text, "authors", 2)


@pytest.mark.parametrize("tree", ["static", "dynamic"])
def test_a_tree_holds_the_chain(tree: str) -> None:
    model, inputs = target(), prompts(2)
    spy = Spy(Eagle3(head=written("authors"), tree=tree, length=3, nodes=20))
    out = decode(model, inputs, spy, max_new_tokens=8)
    for row in range(2):
        length = spy.seen[0].lengths[row]
        text = out.sequences[row, inputs["input_ids"].shape[1] - length :][:length]
        assert tuple(by_the_paper(model, text, "authors", 3)) in paths_of(spy.seen[0].draft, row)


TREE = Eagle3(head=written("authors"), length=3, nodes=40, children=32, beam=4)
#: Each check of what depends on the shape of a draft is made of one shape, and of the first what all that read states share.
SHAPES: dict[Strategy, tuple[str, ...]] = {
    TREE: ("check_drafts", "check_draft_tokens_are_accepted"),
    Eagle3(head=written("speculators"), tree="static", length=2, nodes=24, children=24): ("check_draft_scores",),
    Eagle3(head=newer("parallel"), length=4, nodes=16): (),
    Eagle3(head=written("speculators"), tree="none", length=3): ("check_on_device",),
}


@pytest.mark.parametrize("strategy, check", of_shapes(SHAPES))
def test_strategy_conforms(strategy: Eagle3, check: Check) -> None:
    check_alone(check, Conditions(models=(target(),)), strategy)


@pytest.mark.slow
def test_strategy_conforms_compiled() -> None:
    check_strategy(TREE, models=[target()], compile=True)


def test_what_a_config_says_of_layers() -> None:
    assert read_config(written("authors")).layers_of(32) == (1, 15, 28)
    assert read_config(written("speculators")).layers == (0, 1, 3)
    spec_forge = written("authors", eagle_config=MappingProxy(eagle_aux_hidden_state_layer_ids=(0, 2, 4)))
    assert read_config(spec_forge).layers == (0, 2, 4)


class MappingProxy(dict):
    """A dict that can be an argument of a cached function."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(sorted(self.items())))


def test_what_cannot_be_had_says_why(tmp_path: Path) -> None:
    def call(strategy: Any, model: Any = None) -> None:
        decode(model or target(), prompts(1), strategy, max_new_tokens=2)

    with pytest.raises(UnsupportedError, match="name its folder as head="):
        call("eagle3")
    with pytest.raises(SettingsError, match="there is no head at"):
        call(Eagle3(head=str(tmp_path / "nowhere")))
    with pytest.raises(SettingsError, match="reads layers 1, 0, -2 of a target that has 2"):
        call(Eagle3(head=written("authors")), decoders.enable(tiny_model("llama")))
    with pytest.raises(SettingsError, match="reads 96 numbers of a token, 2 layers"):
        call(Eagle3(head=written("authors"), layers=(0, 1)))
    with pytest.raises(SettingsError, match="vocabulary of 130"):
        call(Eagle3(head=written("authors", vocab_size=130)))
    with pytest.raises(SettingsError, match="norm_before_fc and fc_norm are both true"):
        call(Eagle3(head=written("speculators", norm_before_fc=True, fc_norm=True)))
    with pytest.raises(SettingsError, match="drafts in parallel, and no mask_token_id"):
        call(Eagle3(head=written("speculators", speculators_model_type="peagle")))
    with pytest.raises(UnsupportedError, match="1 layers of 'qwen3'; only Llama layers"):
        call(
            Eagle3(head=written("speculators", transformer_layer_config=MappingProxy(LAYER | dict(model_type="qwen3"))))
        )
    with pytest.raises(SettingsError, match="fc.weight is .* not"):
        load_head(written("authors", target_hidden_size=16), torch.device("cpu"), torch.float32)
    broken = Path(written("speculators", draft_vocab_size=len(IDS) + 0.0))
    (broken / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(SettingsError, match="cannot be read"):
        call(Eagle3(head=str(broken)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["authors", pytest.param("speculators", marks=pytest.mark.slow)])
def test_heads_draft_for_targets_in_bfloat16(kind: str) -> None:
    """The head is taken in the target's dtype; its chains are the rounded equations', give or take near-ties."""
    options = dict(
        hidden_size=H, intermediate_size=WIDE, num_hidden_layers=5, num_attention_heads=HEADS, num_key_value_heads=KV,
        max_position_embeddings=512,
    )  # fmt: skip
    architecture = Architecture("llama", MappingProxyType(options))
    model, rounded = decoders.enable(architecture(0).to(torch.bfloat16)), architecture(0).to(torch.bfloat16).float()
    inputs = prompts(2)
    plain = decode(model, inputs, "autoregressive", max_new_tokens=16)
    for tree in ("static", "dynamic"):
        spy = Spy(Eagle3(head=written(kind), tree=tree, length=3, nodes=12))
        assert torch.equal(decode(model, inputs, spy, max_new_tokens=16).sequences, plain.sequences)
        assert spy.seen[0].draft.tokens.min() >= 0
    spy = Spy(Eagle3(head=written(kind), tree="none", length=1))
    decode(model, inputs, spy, max_new_tokens=16)
    alike = []
    for row, padding in enumerate((inputs["attention_mask"] == 0).sum(1).tolist()):
        for step in spy.seen:
            if not step.finished[row]:
                text = plain.sequences[row, padding:][: step.lengths[row]]
                alike.append(step.draft.tokens[row].tolist() == by_the_paper(rounded, text, kind, 1))
    assert sum(alike) >= 0.8 * len(alike) > 10
