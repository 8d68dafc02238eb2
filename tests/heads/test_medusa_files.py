"""Heads on disk: our format, the authors', and what is neither."""

from __future__ import annotations

import json
import pickle
import shutil

import pytest
import torch
from safetensors.torch import save_file

from decoders.errors import SettingsError, UnsupportedError
from decoders.heads.medusa import HeadsConfig, MedusaHeads, find_heads, load_heads, save_heads
from decoders.testing import tiny_model

H, V, HEADS = 6, 11, 3
HIDDEN = torch.randn(5, H, generator=torch.Generator().manual_seed(1))


class ResBlock(torch.nn.Module):
    """As in the authors' code."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(H, H)

    def forward(self, x):
        return x + torch.nn.functional.silu(self.linear(x))


@pytest.fixture
def upstream():
    """The authors' module; its state dict is their checkpoint."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return torch.nn.ModuleList(
            torch.nn.Sequential(*([ResBlock()] * 2), torch.nn.Linear(H, V, bias=False)) for _ in range(HEADS)
        )


def random_heads(projection="tied", rank=0, tree=None) -> MedusaHeads:
    config = HeadsConfig(
        heads=HEADS, layers=2, hidden_size=H, vocab_size=V, projection=projection, rank=rank, tree=tree
    )
    heads = MedusaHeads(config)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(3))
    return heads


@pytest.mark.parametrize(("projection", "rank"), [("tied", 0), ("low_rank", 2), ("full", 0)])
def test_what_is_saved_is_loaded(tmp_path, projection, rank):
    heads = random_heads(projection, rank, tree=((0,), (0, 1)))
    save_heads(heads, tmp_path / "heads")
    loaded = load_heads(tmp_path / "heads")
    assert loaded.config == heads.config
    lm_head = torch.randn(V, H)
    torch.testing.assert_close(loaded(HIDDEN, lm_head), heads(HIDDEN, lm_head).detach())
    assert not any(p.requires_grad for p in loaded.parameters())


def test_heads_are_read_once_and_again_when_the_files_change(tmp_path):
    save_heads(random_heads(), tmp_path)
    first = load_heads(tmp_path)
    assert load_heads(tmp_path) is first
    save_heads(random_heads(tree=((0,),)), tmp_path)
    assert load_heads(tmp_path).config.tree == ((0,),)


@pytest.mark.parametrize("prefix", ["", "medusa_head."])
@pytest.mark.parametrize("form", ["medusa_lm_head.pt", "medusa_lm_head.safetensors"])
def test_the_authors_checkpoints_load(tmp_path, upstream, form, prefix):
    state = {prefix + name: tensor.clone() for name, tensor in upstream.state_dict().items()}
    assert f"{prefix}0.0.linear.weight" in state and f"{prefix}0.2.weight" in state
    if form.endswith(".pt"):
        torch.save(state, tmp_path / form)
    else:
        save_file(state, tmp_path / form)
    (tmp_path / "config.json").write_text('{"medusa_num_heads": 3, "medusa_num_layers": 2}')
    for place in (tmp_path, tmp_path / form):
        heads = load_heads(place)
        assert (heads.config.heads, heads.config.layers, heads.config.projection) == (HEADS, 2, "full")
        scores = heads(HIDDEN, torch.zeros(V, H))
        for k, head in enumerate(upstream):
            torch.testing.assert_close(scores[:, k], head(HIDDEN).detach())


class Trap:
    def __reduce__(self):
        return exec, ("raise SystemExit('code of a checkpoint was run')",)


def test_code_in_a_checkpoint_is_not_run(tmp_path):
    (tmp_path / "medusa_lm_head.pt").write_bytes(pickle.dumps({"0.1.weight": Trap()}, protocol=2))
    with pytest.raises(SettingsError, match="medusa_lm_head.pt cannot be read"):
        load_heads(tmp_path)


def test_what_holds_no_heads_is_told_apart(tmp_path, upstream):
    with pytest.raises(SettingsError, match="holds no Medusa heads"):
        load_heads(tmp_path)
    save_file({"model.embed.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(SettingsError, match=r"0\.0\.linear\.weight.*this file has model\.embed\.weight"):
        load_heads(tmp_path)
    save_heads(random_heads(), tmp_path)
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace('"layers": 2', '"layers": 3'))
    with pytest.raises(SettingsError, match="do not fit"):
        load_heads(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(SettingsError, match="config.json is not JSON"):
        load_heads(tmp_path)
    state = upstream.state_dict()
    del state["1.2.weight"]
    torch.save(state, tmp_path / "broken.pt")
    with pytest.raises(SettingsError, match="holds no Medusa heads"):
        load_heads(tmp_path / "broken.pt")


@pytest.mark.parametrize("tree", [7, "paths", [1, 2], [["a"]], {"0": 1}])
def test_a_tree_that_is_none_is_said_to_be(tmp_path, tree):
    save_heads(random_heads(), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tree": tree}))
    with pytest.raises(SettingsError, match="must be a list of paths of ranks"):
        load_heads(tmp_path)


def test_heads_are_found_beside_the_model(tmp_path):
    model = tiny_model("llama")
    with pytest.raises(UnsupportedError, match="decoders train medusa"):
        find_heads(None, model)
    with pytest.raises(SettingsError, match="no heads at 'nowhere'"):
        find_heads("nowhere", model)
    model.config.name_or_path = str(tmp_path)
    with pytest.raises(UnsupportedError):
        find_heads(None, model)
    save_heads(random_heads(), tmp_path / "medusa")
    assert find_heads(None, model) == tmp_path / "medusa"
    shutil.rmtree(tmp_path / "medusa")
