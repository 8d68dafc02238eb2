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
from safetensors.torch import load_file, save_file
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

from ..turns import slow_but
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


WINDOWS = dict(layers=2, layer_types=("sliding_attention", "full_attention"), sliding_window=6)
#: EAGLE-3.1, P-EAGLE and EAGLE-4: fields of the config, and what they bring.
NEWER = {
    "3.1, each layer normed": dict(fc_norm=True, norm_output=True),
    "3.1, normed as a whole": dict(norm_before_fc=True),
    "two layers": dict(layers=2),
    "parallel": dict(speculators_model_type="peagle", mask_token_id=7),
    "parallel, two layers, normed": dict(layers=2, parallel_drafting=True, pard_token=9, fc_norm=True),
    "windowed": dict(WINDOWS, norm_before_residual=True),
    "parallel, windowed": dict(WINDOWS, parallel_drafting=True, ptd_token_id=4),
    "EAGLE-4": dict(
        architectures=["LlamaForCausalLMEagle4"], enable_fc_norm=True, norm_output=True, sliding_window=6,
        efficient_lm_head_config=dict(type="low_rank", rank=4, num_candidates=3),
    ),
    "EAGLE-4 without a low rank": dict(
        architectures=["LlamaForCausalLMEagle4"], layer_types=("full_attention",), sliding_window=6,
        efficient_lm_head_config=dict(type="weighted_low_rank", rank=4, num_candidates=3, smooth_factor=10),
    ),
}  # fmt: skip


@cache
def newer(name: str) -> str:
    """A folder with a head like those that NeMo AutoModel (names with ``model.``), `speculators` and EAGLE-4's exports write."""
    fields, state = dict(NEWER[name]), weights(5)
    random = torch.Generator().manual_seed(6)
    count = fields.pop("layers", 1)
    if fields.get("norm_before_fc"):
        state["input_norm.weight"] = 1 + 0.3 * torch.randn(3 * H, generator=random)
    if fields.get("fc_norm") or fields.get("enable_fc_norm"):
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
    layer = LAYER | dict(num_hidden_layers=count)
    if "EAGLE-4" in name:
        del state["d2t"], state["t2d"]
        state["lm_head.weight"] = torch.randn(VOCAB, H, generator=random)
        if "without" not in name:
            state["efficient_lm_head.weight"] = torch.randn(VOCAB, 4, generator=random)
            state["efficient_lm_head_down_proj.weight"] = torch.randn(4, H, generator=random)
        config = layer | fields | dict(eagle_config=dict(eagle_aux_hidden_state_layer_ids=[0, 1, 3]))
    else:
        layer |= {part: fields.pop(part) for part in ("layer_types", "sliding_window") if part in fields}
        config = dict(
            architectures=["Eagle3Speculator"], draft_vocab_size=len(IDS), eagle_aux_hidden_state_layer_ids=[1, 2, 4],
            transformer_layer_config=layer, **fields,
        )  # fmt: skip
    _folders.append(tempfile.TemporaryDirectory(prefix="eagle3-"))
    folder = Path(_folders[-1].name)
    save_file(state, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@cache
def tensors(folder: str) -> dict[str, Tensor]:
    """What a folder's file holds, read without the package, by the names of `speculators`."""
    file = Path(folder) / "model.safetensors"
    state = load_file(file) if file.exists() else torch.load(Path(folder) / "pytorch_model.bin", weights_only=True)
    return {name.removeprefix("model.").replace("midlayer.", "layers.0."): tensor for name, tensor in state.items()}


@torch.no_grad()
def by_the_paper(model: Any, text: Tensor, name: str, length: int) -> list[int]:
    """The chain that a head drafts after `text` ``[n]``, from nothing, in plain equations."""
    w = tensors(newer(name) if name in NEWER else written(name))
    fields: dict[str, Any] = NEWER.get(name, dict(norm_before_residual=name == "speculators"))
    count = fields.get("layers", 1)
    ids = IDS if "d2t" in w else torch.arange(VOCAB)
    windowed = fields.get(
        "layer_types", ["sliding_attention"] * ("sliding_window" in fields) or ["full_attention"] * count
    )
    table = w.get("embed_tokens.weight", model.get_input_embeddings().weight)
    hidden = model(text[None], output_hidden_states=True).hidden_states
    read_layers = (1, 5 // 2 - 1, 5 - 4) if name == "authors" else (0, 1, 3)
    features = torch.cat([hidden[layer + 1][0] for layer in read_layers], -1)[:-1]
    context = len(features)

    def fused(states: Tensor) -> Tensor:
        if fields.get("norm_before_fc"):
            states = norm(states, w["input_norm.weight"])
        if fields.get("fc_norm") or fields.get("enable_fc_norm"):
            states = torch.cat([norm(part, w[f"fc_norm.{i}.weight"]) for i, part in enumerate(states.split(H, -1))], -1)
        return states @ w["fc.weight"].T

    def run(read: Tensor, states: Tensor) -> Tensor:
        slots = torch.arange(len(read))
        for layer in range(count):
            own = {
                n.removeprefix(f"layers.{layer}."): part for n, part in w.items() if n.startswith(f"layers.{layer}.")
            }
            if layer:
                side_by_side, residual = norm(states, own["input_layernorm.weight"]), states
            else:
                normed = norm(states, own["hidden_norm.weight"])
                side_by_side = torch.cat([norm(read, own["input_layernorm.weight"]), normed], -1)
                residual = normed if fields.get("norm_before_residual") else states
            q, k, v = (
                (side_by_side @ own[f"self_attn.{part}_proj.weight"].T).view(len(read), -1, H // HEADS).transpose(0, 1)
                for part in "qkv"
            )
            k, v = k.repeat_interleave(HEADS // KV, 0), v.repeat_interleave(HEADS // KV, 0)
            sees = slots <= slots[:, None]
            if (
                windowed[layer] == "sliding_attention"
            ):  # of drafted tokens it ends with the context, of masks with themselves
                ends = slots if "parallel" in name else slots.clamp(max=context - 1)
                sees &= slots > ends[:, None] - fields["sliding_window"]
            scores = turned(q) @ turned(k).transpose(1, 2) / (H // HEADS) ** 0.5
            weights = scores.masked_fill(~sees, float("-inf")).softmax(-1)
            states = residual + (weights @ v).transpose(0, 1).flatten(1) @ own["self_attn.o_proj.weight"].T
            inner = norm(states, own["post_attention_layernorm.weight"])
            gate = F.silu(inner @ own["mlp.gate_proj.weight"].T) * (inner @ own["mlp.up_proj.weight"].T)
            states = states + gate @ own["mlp.down_proj.weight"].T
        return states

    def best(states: Tensor) -> list[int]:
        normed = norm(states, w["norm.weight"])
        logits = normed @ w["lm_head.weight"].T
        if "efficient_lm_head.weight" in w:
            low = normed @ w["efficient_lm_head_down_proj.weight"].T @ w["efficient_lm_head.weight"].T
            kept = torch.zeros_like(low, dtype=torch.bool).scatter(-1, low.topk(3).indices, True)
            logits = logits.masked_fill(~kept, float("-inf"))
        return ids[logits.argmax(-1)].tolist()

    states, read = fused(features), table[text[1:]]
    if "parallel" in name:
        mask = next(fields[part] for part in ("mask_token_id", "pard_token", "ptd_token_id") if part in fields)
        read = torch.cat([read, table[mask].expand(length - 1, -1)])
        return best(run(read, torch.cat([states, fused(w["mask_hidden"][0]).expand(length - 1, -1)]))[-length:])
    drafted: list[int] = []
    for _ in range(length):
        given = run(read, states)[-1:]
        drafted += best(given)
        states = torch.cat([states, norm(given, w["norm.weight"]) if fields.get("norm_output") else given])
        read = torch.cat([read, table[drafted[-1:]]])
    return drafted


QUICK = ("3.1, each layer normed", "parallel, two layers, normed", "windowed", "EAGLE-4")


@pytest.mark.parametrize("name", slow_but(QUICK, NEWER))
def test_newer_heads_draft_what_their_equations_say(name: str) -> None:
    model, inputs, spy = target(), prompts(3), Spy(Eagle3(head=newer(name), tree="none", length=4))
    out = decode(model, inputs, spy, max_new_tokens=8, decoders_config={"prefill_chunk": 7})
    assert torch.equal(out.sequences, decode(model, inputs, "autoregressive", max_new_tokens=8).sequences)
    for row, padding in enumerate((inputs["attention_mask"] == 0).sum(1).tolist()):
        for step in spy.seen:
            if not step.finished[row]:
                text = out.sequences[row, padding : padding + step.lengths[row]]
                assert step.draft.tokens[row].tolist() == by_the_paper(model, text, name, 4)


@pytest.mark.parametrize(
    "kind, compile",
    slow_but([("authors", False)], [("authors", False), ("speculators", False), ("authors", True)]),
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
    Eagle3(head=newer("EAGLE-4"), length=3, nodes=16): (),
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
    with pytest.raises(SettingsError, match="reads 96 numbers per token, and 2 layers"):
        call(Eagle3(head=written("authors"), layers=(0, 1)))
    with pytest.raises(SettingsError, match="vocabulary of 130"):
        call(Eagle3(head=written("authors", vocab_size=130)))
    with pytest.raises(SettingsError, match="norm_before_fc and fc_norm are both true"):
        call(Eagle3(head=written("speculators", norm_before_fc=True, fc_norm=True)))
    with pytest.raises(UnsupportedError, match="attn_norm is true, use_rope is false: only Llama layers"):
        call(Eagle3(head=written("authors", attn_norm=True, use_rope=False)))
    with pytest.raises(UnsupportedError, match="partial_rotary_factor is 0.5"):
        call(Eagle3(head=written("authors", partial_rotary_factor=0.5)))
    with pytest.raises(
        UnsupportedError, match="num_hidden_layers is 1, and layer_types are sliding_attention, full_att"
    ):
        call(Eagle3(head=written("authors", layer_types=("sliding_attention", "full_attention"))))
    with pytest.raises(SettingsError, match="has layers with a sliding window, but no field sliding_window"):
        call(Eagle3(head=written("authors", layer_types=("sliding_attention",))))
    with pytest.raises(SettingsError, match="drafts all tokens in one pass, which needs a mask_token_id"):
        call(Eagle3(head=written("speculators", speculators_model_type="peagle")))
    with pytest.raises(UnsupportedError, match="1 layer of 'qwen3'; only Llama layers"):
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
