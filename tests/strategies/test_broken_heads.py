"""Folders of heads and draft models that are wrong: what is said names the file, the field, and what it may be."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import decoders
from decoders.errors import SettingsError, UnsupportedError
from decoders.strategies import DFlash, Eagle3, Medusa
from decoders.strategy import Strategy
from decoders.testing import decode, prompts, tiny_model

from . import test_dflash, test_eagle1, test_eagle3
from .conftest import random_heads

#: How each kind of folder is written, and drafted with.
KINDS: dict[str, tuple[Callable[[], str], Callable[[str], Strategy]]] = {
    "eagle3": (lambda: test_eagle3.written("authors"), lambda folder: Eagle3(head=folder)),
    "speculators": (lambda: test_eagle3.written("speculators"), lambda folder: Eagle3(head=folder)),
    "dflash": (lambda: test_dflash.written("authors"), lambda folder: DFlash(draft_model=folder)),
    "shards": (lambda: test_dflash.written("sliding"), lambda folder: DFlash(draft_model=folder)),
    "medusa": (random_heads, lambda folder: Medusa(heads=folder)),
}
MASK = dict(mask_token_id=test_dflash.MASK, target_layer_ids=[0, 2])
SLIDING = dict(layer_types=["sliding_attention"] * 2)


def refused(kind: str, folder: Path, message: str, file: str = "config.json", error: Any = SettingsError) -> None:
    """A call with `folder` says `message` of a file."""
    with pytest.raises(error) as raised:
        decode(test_eagle3.target(), prompts(1), KINDS[kind][1](str(folder)), max_new_tokens=2)
    assert str(folder / file) in str(raised.value) and message in str(raised.value)


@pytest.fixture
def folder_of(tmp_path: Path) -> Callable[[str], Path]:
    def copied(kind: str) -> Path:
        return Path(shutil.copytree(KINDS[kind][0](), tmp_path / kind))

    return copied


@pytest.mark.parametrize(
    "kind, changes, message",
    [
        ("eagle3", dict(num_attention_heads=5), "num_attention_heads is 5, which does not divide hidden_size, 32"),
        ("eagle3", dict(num_attention_heads=0), "num_attention_heads: Input should be greater than or equal to 1 (got 0)"),
        ("eagle3", dict(num_key_value_heads=3), "num_key_value_heads is 3, which does not divide num_attention_heads, 4"),
        ("eagle3", dict(head_dim=7), "head_dim is 7, but rotary positions need an even number"),
        ("eagle3", dict(hidden_size="32"), "hidden_size: Input should be a number (got '32')"),
        ("eagle3", dict(hidden_size=None), "is not a config of an EAGLE-3 head: it has no hidden_size"),
        ("eagle3", dict(rms_norm_eps="a"), "rms_norm_eps: Input should be a number (got 'a')"),
        ("eagle3", dict(rope_theta=0), "rope_theta: Input should be greater than 0 (got 0)"),
        ("eagle3", dict(hidden_act="silo"), "hidden_act: Unknown activation. Did you mean 'silu'?"),
        ("eagle3", dict(rope_scaling=dict(type="weird")), "rope_scaling: Unknown rope_type 'weird'. Choose from: default, dynamic"),
        ("eagle3", dict(rope_scaling=dict(type=["yarn"])), "rope_scaling: Unknown rope_type ['yarn']"),
        ("eagle3", dict(rope_scaling=dict(rope_type="llama3")), "low_freq_factor"),
        ("eagle3", dict(rope_scaling=dict(rope_type="linear", factor="x")), "transformers cannot build this Llama layer: unsupported"),
        ("eagle3", dict(rope_scaling=5), "rope_scaling: Input should be a valid dictionary (got 5)"),
        ("eagle3", dict(draft_vocab_size="x"), "draft_vocab_size: Input should be a number (got 'x')"),
        ("eagle3", dict(architectures=5), "architectures: Input should be a valid list (got 5)"),
        ("eagle3", dict(eagle_config=[1]), "eagle_config: Input should be"),
        ("speculators", dict(eagle_aux_hidden_state_layer_ids=5), "eagle_aux_hidden_state_layer_ids: Input should be a valid list"),
        (
            "speculators",
            dict(eagle_aux_hidden_state_layer_ids=["a", 1, 2]),
            "eagle_aux_hidden_state_layer_ids.0: Input should be a number (got 'a')",
        ),
        ("speculators", dict(transformer_layer_config=[]), "transformer_layer_config: Input should be a valid dictionary"),
        (
            "speculators",
            dict(transformer_layer_config=dict(hidden_size=32, num_attention_heads=5, vocab_size=128)),
            "config.json, transformer_layer_config: num_attention_heads is 5",
        ),
        ("dflash", dict(block_size=1), "block_size: Input should be greater than or equal to 2 (got 1)"),
        ("dflash", dict(block_size=-3), "block_size: Input should be greater than or equal to 2 (got -3)"),
        ("dflash", dict(block_size=True), "block_size: Input should be a number (got True)"),
        ("dflash", dict(block_size="x"), "block_size: Input should be a number (got 'x')"),
        ("dflash", dict(dflash_config=5), "dflash_config: Input should be a valid dictionary (got 5)"),
        ("dflash", dict(dflash_config=MASK | dict(mask_token_id="a")), "mask_token_id: Input should be a number (got 'a')"),
        ("dflash", dict(dflash_config=MASK | dict(target_layer_ids=3)), "target_layer_ids: Input should be a valid list"),
        ("dflash", dict(dflash_config=MASK | dict(target_layer_ids=["q", 1])), "target_layer_ids.0: Input should be a number"),
        ("dflash", SLIDING | dict(sliding_window="a"), "sliding_window: Input should be a number (got 'a')"),
        ("dflash", dict(layer_types="full"), "layer_types: Input should be a valid list (got 'full')"),
        ("dflash", dict(num_attention_heads=5), "num_attention_heads is 5, which does not divide hidden_size, 32"),
        ("dflash", dict(head_dim=7), "head_dim is 7, but rotary positions need an even number"),
        ("dflash", dict(hidden_act="foo"), "hidden_act: Unknown activation. Choose from: gelu"),
        ("medusa", dict(heads=2.5), "heads: Input should be a valid integer"),
        ("medusa", dict(heads=0), "heads: Input should be greater than or equal to 1 (got 0)"),
        ("medusa", dict(heads=None), "is not a config of Medusa heads: it has no heads"),
        ("medusa", dict(projection="half"), "projection: Input should be 'tied', 'low_rank' or 'full' (got 'half')"),
        ("medusa", dict(rank=3), "projection low_rank needs a rank"),
        ("medusa", dict(tree=[[0.5]]), "tree: the tree must be a list of paths of ranks, such as [[0], [0, 1]] (got [[0.5]])"),
    ],
)  # fmt: skip
def test_a_field_that_cannot_be_is_named(
    kind: str, changes: dict[str, Any], message: str, folder_of: Callable[[str], Path]
) -> None:
    folder = folder_of(kind)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    refused(kind, folder, message)


@pytest.mark.parametrize("kind", ["eagle3", "dflash", "medusa"])
@pytest.mark.parametrize("text", ["[]", "null", "3", '"x"'])
def test_a_config_that_is_no_object_is_said_to_be(kind: str, text: str, folder_of: Callable[[str], Path]) -> None:
    folder = folder_of(kind)
    (folder / "config.json").write_text(text)
    refused(kind, folder, f"{text} is not an object")


@pytest.mark.parametrize("content", [[1, 2], {"fc.weight": 1}])
def test_weights_that_are_none_are_said_to_be(content: Any, folder_of: Callable[[str], Path]) -> None:
    folder = folder_of("eagle3")
    torch.save(content, folder / "pytorch_model.bin")
    refused("eagle3", folder, "must hold a mapping of names to tensors", "pytorch_model.bin")


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": {"a": 1}}'])
def test_an_index_of_weights_that_is_none_is_said_to_be(text: str, folder_of: Callable[[str], Path]) -> None:
    folder = folder_of("shards")
    (folder / "model.safetensors.index.json").write_text(text)
    refused("shards", folder, "dflash: ", "model.safetensors.index.json")


@pytest.mark.parametrize(
    "changes, error, message",
    [
        (dict(d2t=lambda t: t + 500), UnsupportedError, "d2t and t2d name different tokens of the target"),
        (dict(d2t=lambda t: t + 500, t2d=None), UnsupportedError, "names tokens outside of 0 … 127, or a token twice"),
        (dict(d2t=lambda t: t[:0], t2d=None), UnsupportedError, "a 1-D tensor with at least one entry, not [0]"),
        (dict(d2t=None, t2d=lambda t: ~t | t), SettingsError, "d2t and t2d name 128 tokens, but draft_vocab_size"),
        (dict(d2t=None, t2d=lambda t: t & ~t), UnsupportedError, "t2d names no token of the target"),
        (
            dict(d2t=lambda t: t[:5], t2d=None),
            SettingsError,
            "name 5 tokens, but draft_vocab_size in config.json is 96",
        ),
    ],
)
def test_tables_of_a_smaller_vocabulary_that_do_not_fit_are_named(
    changes: dict[str, Callable[[Tensor], Tensor] | None], error: Any, message: str, folder_of: Callable[[str], Path]
) -> None:
    folder = folder_of("speculators")
    state = load_file(folder / "model.safetensors")
    for name, change in changes.items():
        table = state.pop(name)
        if change is not None:
            state[name] = change(table)
    save_file(state, folder / "model.safetensors")
    refused("speculators", folder, message, "model.safetensors", error)


def test_layers_for_a_head_that_reads_none_are_refused(tmp_path: Path) -> None:
    torch.save(test_eagle1.weights(bias=False), tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text(json.dumps(test_eagle1.CONFIG))
    with pytest.raises(SettingsError, match=r"layers=\(0, 1\), but the head in .* leave layers= out") as raised:
        decode(test_eagle1.target(), prompts(1), Eagle3(head=str(tmp_path), layers=(0, 1)), max_new_tokens=2)
    assert str(tmp_path) in str(raised.value)


def test_a_head_of_another_width_is_said_to_be_before_its_layers() -> None:
    model = decoders.enable(tiny_model("llama"))
    for layers in (None, (0, 1, -1)):
        with pytest.raises(
            SettingsError, match="models/target/eagle3 reads layers of hidden size 256, this model's is 32"
        ):
            decode(model, prompts(1), Eagle3(head="demo", layers=layers), max_new_tokens=2)
