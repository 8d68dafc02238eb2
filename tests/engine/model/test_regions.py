"""A pass compiled layer by layer computes what the uncompiled one does, for every kind of structure."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from decoders.common.transformers_compat import decoder_layers
from decoders.enabling import graphs_compiled
from decoders.engine.model import torch_compat
from decoders.engine.model.blocks import PassInput
from decoders.engine.model.cache import CacheBuffers
from decoders.engine.model.compiled import regions
from decoders.engine.model.compiled.background import BackgroundCompile
from decoders.engine.model.compiled.regions import RegionalForward, fixed, layers_as_regions
from decoders.engine.model.kernels import cpu
from decoders.engine.model.self_check import target_of
from decoders.testing import tiny_model
from decoders.testing.models import ARCHITECTURES
from decoders.tree import Topology

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


class Pass:
    """A target, and its forward pass as a function of tensors."""

    def __init__(self, model) -> None:
        self.target = target_of(model)
        self.compiled = RegionalForward(self.run, self.target.model)

    def run(self, nodes, base, tree, buffers, view):
        result = self.target.forward(PassInput(nodes, base, tree, buffers, view))
        return result.logits, result.hidden

    def arguments(self, rows: int, nodes: int = 11, slots: int = 176, view: int = 80, base: int = 19) -> tuple:
        buffers = CacheBuffers.allocate(self.target.layout, rows, slots)
        fixed(*((t, (1, 3)) for t in (*buffers.keys, *buffers.values)))
        tokens = torch.arange(rows * nodes).reshape(rows, nodes) % 50
        tree = Topology.chain(nodes).tensors(rows, CPU)
        return tokens, torch.full((rows,), base), tree, buffers, torch.arange(slots)[:view]

    def check(self, *sizes: int, atol: float = 1e-4) -> None:
        ours, theirs = self.arguments(*sizes), self.arguments(*sizes)
        for got, expected in zip(self.compiled(*ours), self.run(*theirs), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=atol)
        for got, expected in zip(ours[3].keys + ours[3].values, theirs[3].keys + theirs[3].values, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", sorted(set(ARCHITECTURES) - {"gpt_neo"}))  # whose attention has no layer_idx
def test_every_layer_is_found(name):
    model = tiny_model(name)
    layers = decoder_layers(model)
    assert len(layers) == model.config.get_text_config(decoder=True).num_hidden_layers
    with layers_as_regions(model) as functions:
        assert functions and all("forward" in vars(layer) for layer in layers)
    assert not any("forward" in vars(layer) for layer in layers)


def test_marked_layers_compute_the_same_uncompiled():
    model = tiny_model("gemma3")
    tokens = torch.arange(6)[None]
    plain = model(tokens, use_cache=False).logits
    with layers_as_regions(model):
        assert torch.equal(model(tokens, use_cache=False).logits, plain)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_compiled_by_regions_equals_uncompiled(name):
    forward = Pass(tiny_model(name))
    forward.compiled.compile(*forward.arguments(1))
    before = graphs_compiled()
    # Granite's scores are not scaled: its softmax is sharp, and last bits show. One logit in four thousand differs by 1.3e-4.
    atol = 2e-4 if name == "granite" else 1e-4
    forward.check(1, 3, 176, 80, 19, atol=atol)
    forward.check(1, 9, 176, 96, 60, atol=atol)
    forward.check(1, 33, 304, 240, 200, atol=atol)
    assert graphs_compiled() == before


@pytest.mark.slow
def test_layers_that_read_the_same_are_multiplied_once(monkeypatch):
    if (kernels := cpu.chosen().kernels) is None:
        pytest.skip("there are no kernels for this CPU")
    left: list[int] = []
    plain = torch_compat.EqualOnce.__call__

    def counted(self, graph: torch.fx.Graph) -> None:
        plain(self, graph)
        left.append(sum(node.target is kernels.few_rows_linear for node in graph.nodes))

    monkeypatch.setattr(torch_compat.EqualOnce, "__call__", counted)
    forward = Pass(tiny_model("llama"))
    with torch._inductor.config.patch(force_disable_caches=True):
        forward.compiled.compile(*forward.arguments(1))
    # A layer's: queries, keys and values; the attention's output; gate and up; down. One more for the head. Without the pass, 7.
    assert left and all(count in (4, 1, 4 + 1, 2 * 4 + 1) for count in left)
    forward.check(1, 3, 176, 80, 19)


@pytest.mark.slow
def test_two_or_more_rows_are_one_more_graph():
    forward = Pass(tiny_model("llama"))
    forward.compiled.compile(*forward.arguments(1))
    forward.compiled.compile(*forward.arguments(3))
    before = graphs_compiled()
    for rows in (1, 2, 3, 5, 9):
        forward.check(rows, 9, 176, 96, 60)
    assert graphs_compiled() == before


def test_functions_that_graphs_were_made_of_live_as_long_as_the_graphs(monkeypatch):
    """Dynamo guards their code by identity: with it gone, a graph of a model with many layers is made once more, in the next call."""
    made: list[weakref.ref] = []
    plain = regions._region

    def noted(function: Callable) -> Callable:
        region = plain(function)
        made.append(weakref.ref(region))
        return region

    monkeypatch.setattr(regions, "_region", noted)
    monkeypatch.setattr(torch_compat, "compiled_whole", lambda function, **options: function)
    forward = Pass(tiny_model("llama"))
    forward.compiled.compile(*forward.arguments(1))
    gc.collect()
    assert made and all(region() is not None for region in made)


@pytest.mark.slow
def test_depth_adds_no_region_and_new_weights_no_graph():
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=5, num_attention_heads=4, pad_token_id=0
    )
    model = LlamaForCausalLM(config).eval()
    forward = Pass(model)
    forward.compiled.compile(*forward.arguments(1))
    assert forward.compiled.regional
    before = graphs_compiled()
    model.model.layers[2].mlp.up_proj.weight.mul_(3)
    model.lm_head.weight.mul_(2)
    forward.check(1, 3, 176, 80, 19)
    assert graphs_compiled() == before


@pytest.mark.slow
def test_tokens_are_the_same_across_the_switch_from_uncompiled_to_compiled():
    forward = Pass(tiny_model("llama"))

    def decode(job: BackgroundCompile | None) -> list[int]:
        _, base, tree, buffers, slots = forward.arguments(1, 2, 176, 80, 0)
        written = [1]
        for step in range(60):
            if job is not None and step == 30:
                assert job.wait()
            run = forward.compiled if job is not None and job.poll() else forward.run
            nodes = torch.tensor([[written[-1], -1]])
            logits, _ = run(nodes, base + step, tree, buffers, slots)
            written.append(int(logits[0, 0].argmax()))
        return written

    expected = decode(None)
    job = BackgroundCompile("forward", lambda: forward.compiled.compile(*forward.arguments(1)))
    assert decode(job) == expected
    assert job.ready


@pytest.mark.slow
def test_what_regions_cannot_hold_is_compiled_as_a_whole(monkeypatch):
    forward = Pass(tiny_model("llama"))

    def broken(*args, **kwargs):
        raise RuntimeError("no regions today")

    monkeypatch.setattr("decoders.engine.model.compiled.regions._region", lambda function: broken)
    forward.compiled.compile(*forward.arguments(1))
    assert forward.compiled.regional is False
    monkeypatch.undo()
    forward.check(1, 3, 176, 80, 19)
