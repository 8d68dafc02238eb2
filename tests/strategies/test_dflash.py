"""DFlash: draft models in both formats draft what transformers' own generator drafts, in batches, trees and recorded steps."""

from __future__ import annotations

import copy
import json
import tempfile
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, PreTrainedModel

import decoders
from decoders.errors import SettingsError, UnsupportedError
from decoders.heads.dflash import DFlashConfig, DFlashNetwork
from decoders.heads.dflash_files import load_draft_model, read_config
from decoders.strategies import DFlash
from decoders.strategies.merged import Merged
from decoders.strategy import Strategy
from decoders.testing import Replay, check_strategy, decode, prompts, tiny_model
from decoders.testing.conditions import Conditions
from decoders.testing.kit import Check, check_alone
from decoders.testing.models import VOCAB, Architecture
from decoders.testing.spy import Spy

from ..turns import slow_but
from .conftest import of_shapes, paths_of

H, BLOCK, MASK, WINDOW = 32, 6, 3, 14
SHAPE = dict(
    hidden_size=H, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=12,
    rms_norm_eps=1e-5, max_position_embeddings=512, rope_theta=5000.0,
)  # fmt: skip
#: Formats, and the layers that their draft models read: the last one's hidden states are those behind the final norm.
LAYERS = {"authors": (0, 2), "transformers": (1, 3), "sliding": (3, 4)}
PARTS = {"fc.": "encoder.fc.", "hidden_norm.": "encoder.output_norm_enc."}


@cache
def weights() -> dict[str, Tensor]:
    """A network that drafts something else at every place, and mostly follows the embedding of the last token."""
    plain = LlamaConfig(**SHAPE, layer_types=["full_attention"] * 2)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        network = DFlashNetwork(DFlashConfig(plain, BLOCK, MASK, (0, 1)))
        return {
            name: torch.randn_like(tensor) * 0.2 + (tensor.dim() == 1) for name, tensor in network.state_dict().items()
        }


_folders: list[tempfile.TemporaryDirectory] = []


@cache
def written(kind: str, **changes: Any) -> str:
    """A folder with a draft model in the format `kind`, the same in every run."""
    _folders.append(tempfile.TemporaryDirectory(prefix="dflash-"))
    folder, state, layers = Path(_folders[-1].name), dict(weights()), list(LAYERS[kind])
    config = SHAPE | dict(block_size=BLOCK, layer_types=["full_attention"] * 2, hidden_act="silu")
    if kind == "authors":
        config |= dict(
            architectures=["DFlashDraftModel"], model_type="qwen3", num_target_layers=5, sliding_window=None,
            dflash_config=dict(mask_token_id=MASK, target_layer_ids=layers),
        )  # fmt: skip
        save_file(state, folder / "model.safetensors")
    else:
        types = ["sliding_attention", "full_attention"] if kind == "sliding" else config["layer_types"]
        del config["rope_theta"]
        config |= dict(
            architectures=["MuseGlimmerAssistantModel"], model_type="muse_glimmer_assistant", mask_token_id=MASK,
            target_layer_ids=layers, sliding_window=WINDOW, layer_types=types,
            rope_parameters=dict(rope_type="default", rope_theta=SHAPE["rope_theta"]),
        )  # fmt: skip
        for ours, theirs in PARTS.items():
            state = {theirs + n.removeprefix(ours) if n.startswith(ours) else n: t for n, t in state.items()}
        files = [f"model-0000{part + 1}-of-00002.safetensors" for part in range(2)]
        place = {name: files[index % 2] for index, name in enumerate(state)}
        for file in files:
            save_file({name: t for name, t in state.items() if place[name] == file}, folder / file)
        (folder / "model.safetensors.index.json").write_text(json.dumps(dict(metadata={}, weight_map=place)))
    (folder / "config.json").write_text(json.dumps(config | changes))
    return str(folder)


@cache
def target(name: str = "llama", positions: int = 512) -> PreTrainedModel:
    options = dict(
        hidden_size=H, intermediate_size=48, num_hidden_layers=5, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=positions,
    )  # fmt: skip
    return decoders.enable(Architecture(name, MappingProxyType(options))(0))


def drafts_of_transformers(model: Any, text: Tensor, kind: str, tokens: int, monkeypatch: Any) -> dict[int, list[int]]:
    """What ``DFlashTokenCandidateGenerator`` drafts in a call, by the length of the text before it."""
    generator = pytest.importorskip("transformers.generation.candidate_generator").DFlashTokenCandidateGenerator
    assistant = pytest.importorskip("transformers.models.muse_glimmer_assistant")
    if kind == "authors":  # the same network in transformers' form
        folder = written("transformers", target_layer_ids=Ints(LAYERS["authors"]))
    else:
        folder = written(kind)
    drafter = assistant.MuseGlimmerAssistantModel.from_pretrained(folder).eval()
    drafts: dict[int, list[int]] = {}
    plain = generator.get_candidates

    def noted(self: Any, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        candidates, logits = plain(self, input_ids, *args, **kwargs)
        drafts[input_ids.shape[1]] = candidates[0, input_ids.shape[1] :].tolist()
        return candidates, logits

    with monkeypatch.context() as patch:
        patch.setattr(generator, "get_candidates", noted)
        model.generate(
            input_ids=text[None], attention_mask=torch.ones_like(text)[None], assistant_model=drafter,
            speculation_type="dflash", max_new_tokens=tokens, do_sample=False,
        )  # fmt: skip
    return {length: draft for length, draft in drafts.items() if draft}


class Ints(list):
    """A list that can be an argument of a cached function."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(self))


@pytest.mark.parametrize(
    "kind, compile",
    slow_but(
        [("sliding", False)], [("sliding", False), ("authors", False), ("transformers", False), ("sliding", True)]
    ),
)
def test_drafts_are_those_of_transformers(kind: str, compile: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs, spy = target(), prompts(2), Spy(DFlash(draft_model=written(kind)))
    loop = {"compile": compile, "prefill_chunk": 7}
    out = decode(model, inputs, spy, max_new_tokens=24, decoders_config=loop)
    assert torch.equal(out.sequences, decode(model, inputs, "autoregressive", max_new_tokens=24).sequences)
    compared = 0
    for row, padding in enumerate((inputs["attention_mask"] == 0).sum(1).tolist()):
        text = inputs["input_ids"][row, padding:]
        expected = drafts_of_transformers(model, text, kind, 24, monkeypatch)
        for step in spy.seen:
            if not step.finished[row] and step.lengths[row] in expected:  # it stops drafting a step early
                assert step.draft.tokens[row].tolist() == expected[step.lengths[row]]
                compared += 1
    assert compared > 20


def drafted(model: Any, text: Tensor, **settings: Any) -> list[int]:
    """The chain drafted after `text`, from nothing."""
    spy = Spy(DFlash(draft_model=written("authors"), **settings))
    decode(model, {"input_ids": text[None], "attention_mask": torch.ones_like(text)[None]}, spy, max_new_tokens=1)
    return spy.seen[0].draft.tokens[0].tolist()


@pytest.mark.parametrize("length, theirs", [(5, 5), (2, 12)], ids=["within the window", "beyond it"])
def test_accepted_tokens_leave_no_hole(length: int, theirs: int) -> None:
    model, inputs = target(), prompts(3)
    out = decode(model, inputs, "autoregressive", max_new_tokens=24)
    texts = [row[mask.argmax() :] for row, mask in zip(out.sequences, inputs["attention_mask"], strict=True)]
    own = Spy(DFlash(draft_model=written("authors"), length=length))
    known = Replay(texts=tuple(tuple(text.tolist()) for text in texts), length=theirs, wrong_every=7)
    again = decode(model, inputs, Merged([known, own]), max_new_tokens=24)
    assert torch.equal(again.sequences, out.sequences) and again.report.mean_accepted_length > 2
    for step in own.seen:
        for row, text in enumerate(texts):
            if not step.finished[row]:
                assert step.draft.tokens[row].tolist() == drafted(model, text[: step.lengths[row]], length=length)


def test_low_precision_drafts_for_the_same_tokens() -> None:
    model, inputs = decoders.enable(copy.deepcopy(decoders.disable(target())).bfloat16()), prompts(3)
    decoders.enable(target())
    out = decode(model, inputs, DFlash(draft_model=written("sliding"), tree="static"), max_new_tokens=16)
    assert torch.equal(out.sequences, decode(model, inputs, "autoregressive", max_new_tokens=16).sequences)


@pytest.mark.parametrize("tree", ["static", "dynamic"])
def test_a_tree_holds_the_chain(tree: str) -> None:
    model, inputs = target(), prompts(2)
    chain = Spy(DFlash(draft_model=written("authors"), length=3))
    decode(model, inputs, chain, max_new_tokens=8)
    spy = Spy(DFlash(draft_model=written("authors"), tree=tree, length=3, nodes=20))
    decode(model, inputs, spy, max_new_tokens=8)
    for row in range(2):
        assert tuple(chain.seen[0].draft.tokens[row].tolist()) in paths_of(spy.seen[0].draft, row)


TREE = DFlash(draft_model=written("authors"), tree="dynamic", length=3, nodes=40, children=32)
#: What all that draft from the target's states share is checked with eagle3.
SHAPES: dict[Strategy, tuple[str, ...]] = {
    TREE: ("check_drafts", "check_draft_tokens_are_accepted"),
    DFlash(draft_model=written("transformers"), tree="static", length=3, nodes=24, children=8): ("check_draft_scores",),
    DFlash(draft_model=written("sliding")): (),
}


@pytest.mark.parametrize("strategy, check", of_shapes(SHAPES))
def test_strategy_conforms(strategy: DFlash, check: Check) -> None:
    check_alone(check, Conditions(models=(target(),)), strategy)


@pytest.mark.slow
def test_strategy_conforms_compiled() -> None:
    check_strategy(TREE, models=[target()], compile=True)


def test_an_embedding_with_a_norm_of_its_own_is_read_without(monkeypatch: pytest.MonkeyPatch) -> None:
    model, text = decoders.enable(tiny_model("llama")), torch.arange(5, 20)
    folder = written("authors", dflash_config=Names(mask_token_id=MASK, target_layer_ids=(0, 1)))
    plain = Spy(DFlash(draft_model=folder))
    inputs = {"input_ids": text[None], "attention_mask": torch.ones_like(text)[None]}
    decode(model, inputs, plain, max_new_tokens=1)
    table: Any = model.get_input_embeddings()
    table.embed_norm = torch.nn.Identity()
    monkeypatch.setattr(decoders.engine.model.target.Target, "embed", None)
    normed = Spy(DFlash(draft_model=folder))
    decode(model, inputs, normed, max_new_tokens=1)
    assert torch.equal(plain.seen[0].draft.tokens, normed.seen[0].draft.tokens)


class Names(dict):
    """A dict that can be an argument of a cached function."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(sorted(self.items())))


def test_what_a_config_says() -> None:
    assert read_config(written("transformers")).layers == (1, 3)
    silent = read_config(written("authors", num_target_layers=36, dflash_config=Names(mask_token_id=MASK)))
    assert silent.layers == (1, 33) and silent.block_size == BLOCK
    window = dict(layer_types=Ints(["sliding_attention"] * 2), sliding_window=WINDOW)
    # Of transformers' window the token itself is no part.
    assert read_config(written("authors", **window)).layer.sliding_window == WINDOW
    assert read_config(written("sliding")).layer.sliding_window == WINDOW + 1


def test_what_cannot_be_had_says_why(tmp_path: Path) -> None:
    def call(draft_model: str | None, model: Any = None, **settings: Any) -> None:
        decode(model or target(), prompts(1), DFlash(draft_model=draft_model, **settings), max_new_tokens=2)

    with pytest.raises(UnsupportedError, match="name its folder as draft_model=.*`decoders train dflash` makes one"):
        call(None)
    with pytest.raises(SettingsError, match="there is no draft model at"):
        call(str(tmp_path / "nowhere"))
    with pytest.raises(SettingsError, match="it has no block_size"):
        call(written("authors", block_size=None))
    with pytest.raises(SettingsError, match="reads layers 0, 2 of a target that has 2"):
        call(written("authors"), decoders.enable(tiny_model("llama")))
    with pytest.raises(SettingsError, match="length is 6, but the draft model in .* was trained to draft 5"):
        call(written("authors"), length=BLOCK)
    with pytest.raises(SettingsError, match=f"embeds token {VOCAB} as its mask"):
        call(written("transformers", mask_token_id=VOCAB))
    with pytest.raises(UnsupportedError, match="but a sliding window of only"):
        call(written("sliding", sliding_window=4))
    with pytest.raises(UnsupportedError, match="types are linear_attention"):
        call(written("sliding", layer_types=Ints(["linear_attention"] * 2)))
    with pytest.raises(SettingsError, match="fc.weight is .* not"):
        load_draft_model(written("authors", head_dim=12, hidden_size=16), torch.device("cpu"), torch.float32)
    broken = Path(written("sliding", block_size=BLOCK + 0.0))
    next(broken.glob("*-of-*")).write_bytes(b"nothing")
    with pytest.raises(SettingsError, match="cannot be read"):
        call(str(broken))
    next(broken.glob("*-of-*")).unlink()
    with pytest.raises(SettingsError, match="has no weights: model-0000"):
        call(str(broken))
