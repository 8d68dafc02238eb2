"""Tests the strategy with the conformance kit and against the paper's equations, the verifier, the observer, and the entry points."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from decoders_eagle.network import Network, load, save
from decoders_eagle.observer import Depths
from decoders_eagle.strategy import TinyEagle
from decoders_eagle.verifier import FirstChild
from torch import Tensor
from transformers import LlamaConfig

import decoders
from decoders.errors import SettingsError, UnsupportedError
from decoders.registry import registry
from decoders.testing import Spy, check_strategy, check_verifier, decode, prompts, tiny_model

H = 32


@pytest.fixture(scope="module")
def target() -> Any:
    return decoders.enable(tiny_model("llama", hidden_size=H))


def a_network(width: int = H) -> Network:
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation="eager",
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Network(config)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("eagle")
    save(a_network(), path)
    return str(path)


@torch.no_grad()
def by_the_paper(model: Any, network: Network, text: Tensor, length: int) -> list[int]:
    """The draft tokens of a chain after `text` ``[n]``, computed without a cache and without a window."""
    features = model(text[None], output_hidden_states=True).hidden_states[-1][:, :-1]
    tokens, drafted = text[None, 1:], []
    for _ in range(length):
        count = tokens.shape[1]
        mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
        states = network(
            model.get_input_embeddings()(tokens), features, attention_mask=mask, position_ids=torch.arange(count)[None]
        )
        drafted.append(int(model.lm_head(states[0, -1]).argmax()))
        tokens = torch.cat([tokens, torch.tensor([drafted[-1:]])], dim=1)
        features = torch.cat([features, states[:, -1:]], dim=1)
    return drafted


def test_passes_the_conformance_kit(target: Any, folder: str) -> None:
    check_strategy(TinyEagle(network=folder, length=3, nodes=12), models=[target])


def test_chains_are_those_of_the_papers_equations(target: Any, folder: str) -> None:
    inputs, spy = prompts(2), Spy(TinyEagle(network=folder, tree="none", length=3))
    out = decode(target, inputs, spy, max_new_tokens=10)
    assert torch.equal(out.sequences, decode(target, inputs, "autoregressive", max_new_tokens=10).sequences)
    network = load(Path(folder), torch.device("cpu"), torch.float32)
    compared = 0
    for row, padding in enumerate((inputs["attention_mask"] == 0).sum(1).tolist()):
        for step in spy.seen:
            if not step.finished[row]:
                text = out.sequences[row, padding:][: step.lengths[row]]
                assert step.draft.tokens[row].tolist() == by_the_paper(target, network, text, 3)
                compared += 1
    assert compared > 6


def test_its_own_verifier_is_exact_and_takes_its_trees(target: Any, folder: str) -> None:
    check_verifier(FirstChild)
    options = dict(strategy_config=dict(network=folder, tree="static", nodes=6), verifier="first_child")
    out = decode(target, prompts(2), "tiny_eagle", do_sample=True, max_new_tokens=12, **options)
    assert out.report.verifier == "first_child"


def test_the_observer_counts_what_steps_write(target: Any, folder: str) -> None:
    depths = next(observer for observer in registry().listening() if isinstance(observer, Depths))
    depths.counts.clear()
    out = decode(target, prompts(1), TinyEagle(network=folder), max_new_tokens=16)
    counts = depths.counts["tiny_eagle"]
    assert sum(count * steps for count, steps in counts.items()) == 16 and sum(counts.values()) == out.report.steps


def test_networks_that_do_not_fit_are_named(target: Any, folder: str, tmp_path: Path) -> None:
    with pytest.raises(
        UnsupportedError, match="tiny_eagle needs a network trained for the model: name its folder as network="
    ):
        decode(target, prompts(1), TinyEagle(), max_new_tokens=2)
    save(a_network(2 * H), tmp_path)
    with pytest.raises(SettingsError, match="for hidden size 64, this target has 32"):
        decode(target, prompts(1), TinyEagle(network=str(tmp_path)), max_new_tokens=2)
    (tmp_path / "config.json").write_text('{"hidden_size": 32, "num_attention_heads": 4}')
    with pytest.raises(SettingsError, match="do not fit its config"):
        decode(target, prompts(1), TinyEagle(network=str(tmp_path)), max_new_tokens=2)


def test_all_three_are_found_through_their_entry_points() -> None:
    found = registry()
    assert found.strategy("tiny_eagle") is TinyEagle and found.verifier("first_child") is FirstChild
    assert found.observers()["depths"].cls is Depths
    assert {plugin.name for plugin in found.plugins() if plugin.provider == "decoders-eagle"} == {
        "tiny_eagle", "first_child", "depths",
    }  # fmt: skip
