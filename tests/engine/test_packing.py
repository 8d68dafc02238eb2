"""Packed weights multiply as the originals do, follow them when they change, and leave alone what is no plain layer."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from transformers.pytorch_utils import Conv1D

import decoders
from decoders.engine.model import torch_compat
from decoders.engine.model.weights.freed import free_originals, restore_originals
from decoders.engine.model.weights.packing import PackedLinear, PackedWeight, pack
from decoders.engine.model.weights.twin import share_weights
from decoders.errors import UnsupportedError
from decoders.testing import prompts, tiny_model
from decoders.testing.exactness import decode


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def logits(model, n: int = 5):
    return model(input_ids=torch.arange(n)[None] % 7, use_cache=False).logits


@pytest.mark.parametrize("name", ["llama", "gpt2", "phi", "gemma2", "falcon", "mixtral", "deepseek_v3"])
def test_packed_twin_computes_the_models_logits(name):
    model = tiny_model(name)
    twin = share_weights(model)
    packing = pack(twin, smallest=0)
    assert len(packing) > 0
    torch.testing.assert_close(logits(twin), logits(model), rtol=1e-4, atol=1e-4)
    assert not any(isinstance(module, PackedLinear) for module in model.modules())


def test_every_plain_linear_of_a_llama_is_packed_and_small_ones_are_left_alone():
    model = tiny_model("llama")
    twin = share_weights(model)
    linears = [path for path, module in model.named_modules() if type(module) is nn.Linear]
    assert set(pack(twin, smallest=0).layers) == set(linears)
    assert len(pack(share_weights(model))) == 0  # 32 x 48 at most


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_have_the_same_bits_whatever_their_number(dtype):
    layer = nn.Linear(96, 160).to(dtype)
    pack(nn.ModuleList([layer]), smallest=0)
    x = torch.randn(33, 96).to(dtype)
    whole = layer(x)
    for rows in (2, 3, 9, 17):
        assert torch.equal(layer(x[:rows]), whole[:rows])


def test_tied_and_shared_weights_are_packed_once():
    model = tiny_model("gpt2")  # head tied to the embeddings
    packing = pack(share_weights(model), smallest=0)
    again = pack(share_weights(model), smallest=0)
    assert [id(w) for w in packing.weights] == [id(w) for w in again.weights]
    layer = nn.Linear(8, 8)
    twice = nn.ModuleDict({"a": layer, "b": layer, "c": nn.Linear(8, 8)})
    twice["c"].weight = layer.weight
    packing = pack(twice, smallest=0)
    assert len(packing) == 1
    assert set(packing.layers) == {"a", "b", "c"}


def test_unlike_layers_are_left_alone():
    class Odd(nn.Linear):
        pass

    exchanged, parametrized = nn.Linear(8, 8), nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
    exchanged.forward = lambda x: x
    pruned = prune.l1_unstructured(nn.Linear(8, 8), "weight", amount=0.5)
    module = nn.ModuleList(
        [
            Odd(8, 8),
            exchanged,
            parametrized,
            pruned,
            nn.Linear(8, 8, device="meta"),
            nn.Linear(8, 8, dtype=torch.float64),
            nn.Embedding(8, 8),
        ]
    )
    classes = [type(m) for m in module]
    assert len(pack(module, smallest=0)) == 0
    assert [type(m) for m in module] == classes


@pytest.fixture
def _without_instructions(monkeypatch):
    """As on a processor that has none for types of 16 bits."""
    monkeypatch.setattr(torch_compat, "_computes_in", lambda dtype: False)


@pytest.mark.usefixtures("_without_instructions")
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)])
def test_types_without_instructions_are_packed_and_multiplied_in_float32(dtype):
    layers = nn.ModuleDict({name: nn.Linear(96, 160) for name in ("alone", "q", "k")}).to(dtype)
    layers["conv"] = Conv1D(160, 96).to(dtype)
    plain = copy.deepcopy(layers)
    packing = pack(layers, smallest=0, groups=[("q", "k")])
    assert {weight.packed.dtype for weight in packing.weights} == {torch.float32} and len(packing) == 3
    x = torch.randn(5, 96).to(dtype)
    for name, layer in layers.items():
        out = layer(x)
        torch.testing.assert_close(out, copy.deepcopy(plain[name]).float()(x.float()).to(dtype))
        assert torch.equal(out[:2], layer(x[:2])), name
        assert torch.equal(packing.layers[name].weight.dense()[packing.layers[name].place], plain[name].weight), name
        assert torch.equal(torch.compile(layer, fullgraph=True)(x), out), name
    layers["k"].weight.mul_(2)
    layers["k"].bias.mul_(2)
    assert packing.repack() == 1
    torch.testing.assert_close(layers["k"](x), plain["k"](x) * 2)
    torch.testing.assert_close(layers["q"](x), plain["q"](x))
    with pytest.raises(RuntimeError, match="dtype"):
        layers["alone"](x.float())


@pytest.mark.usefixtures("_without_instructions")
def test_a_model_without_instructions_decodes_and_gets_its_weights_back():
    model = tiny_model("llama", hidden_size=128, intermediate_size=256).bfloat16()
    before = copy.deepcopy(model.state_dict())
    settings = {"compile": False, "weights": "packed", "reuse": False}
    decoders.enable(model)
    expected = decode(model, prompts(2), "autoregressive", max_new_tokens=12, decoders_config=settings)
    for strategy in ("prompt_lookup", "lookahead"):
        out = decode(model, prompts(2), strategy, max_new_tokens=12, decoders_config=settings)
        assert torch.equal(out.sequences, expected.sequences)
    with pytest.raises(UnsupportedError, match="freed"):
        model(prompts(2)["input_ids"])
    decoders.disable(model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_hooks_of_a_packed_layer_still_run():
    layer, seen = nn.Linear(8, 8), []
    layer.register_forward_hook(lambda *args: seen.append(args[-1]))
    pack(nn.ModuleList([layer]), smallest=0)
    output = layer(torch.randn(2, 8))
    assert seen[0] is output


def test_conv1d_is_packed_transposed():
    layer = Conv1D(24, 16)
    x = torch.randn(3, 16)
    plain = layer(x)
    pack(nn.ModuleList([layer]), smallest=0)
    assert type(layer) is not Conv1D
    torch.testing.assert_close(layer(x), plain)


def test_wrong_type_of_input_raises_pytorchs_own_error():
    layer = nn.Linear(8, 8)
    pack(nn.ModuleList([layer]), smallest=0)
    with pytest.raises(RuntimeError, match="dtype"):
        layer(torch.randn(2, 8, dtype=torch.bfloat16))


def test_changed_weights_are_packed_again_into_the_same_tensors():
    model = tiny_model("gpt2")
    twin = share_weights(model)
    packing = pack(twin, smallest=0)
    tensors = [id(weight.packed) for weight in packing.weights]
    assert packing.repack() == 0
    model.transformer.h[0].mlp.c_fc.weight.mul_(1.5)
    model.transformer.h[1].attn.c_attn.weight.data = model.transformer.h[1].attn.c_attn.weight.data * 0.5
    assert packing.repack() == 2
    assert [id(weight.packed) for weight in packing.weights] == tensors
    torch.testing.assert_close(logits(twin), logits(model), rtol=1e-4, atol=1e-4)


def test_two_twins_do_not_share_a_copy_that_is_out_of_date():
    model = tiny_model("llama")
    first = pack(share_weights(model), smallest=0)
    model.lm_head.weight.mul_(2)
    twin = share_weights(model)
    pack(twin, smallest=0)
    torch.testing.assert_close(logits(twin), logits(model), rtol=1e-4, atol=1e-4)
    assert first.repack() == 1


def test_freed_memory_is_that_of_layers_that_only_multiply():
    model = tiny_model("gpt2")
    packing = pack(share_weights(model), smallest=0)
    head = model.lm_head.weight
    freed = free_originals(model, packing)
    assert freed.nbytes == packing.nbytes - head.nbytes
    restore_originals(freed, packing)


def test_weights_that_cannot_all_be_freed_are_all_given_back(monkeypatch):
    model = tiny_model("llama")
    before, objects = copy.deepcopy(model.state_dict()), dict(model.named_parameters())
    packing = pack(share_weights(model), smallest=0)
    settle, settled = PackedWeight.settle, []

    def short_of_memory(weight):
        settled.append(weight)
        if len(settled) == 3:
            raise MemoryError
        settle(weight)

    monkeypatch.setattr(PackedWeight, "settle", short_of_memory)
    with pytest.raises(MemoryError):
        free_originals(model, packing)
    assert {k: id(v) for k, v in model.named_parameters()} == {k: id(v) for k, v in objects.items()}
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
