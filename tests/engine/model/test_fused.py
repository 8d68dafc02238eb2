"""Layers that read the same input: who they are, one product for all, and each one's share of it."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import DynamicCache, LlamaConfig

from decoders.common.transformers_compat import set_attention
from decoders.engine.decode.drafters.modules import ModuleTwin, SlotPasses
from decoders.engine.model import torch_compat
from decoders.engine.model.blocks import PassInput
from decoders.engine.model.cache import CacheBuffers
from decoders.engine.model.kernels import attention as kernel
from decoders.engine.model.kernels import cpu, products
from decoders.engine.model.self_check import target_of
from decoders.engine.model.weights import few_rows, fused
from decoders.engine.model.weights import layers as replaced
from decoders.engine.model.weights.few_rows import multiply_few_rows
from decoders.engine.model.weights.quantization import Scheme, quantize
from decoders.heads.dflash import DFlashConfig, DFlashNetwork
from decoders.testing import tiny_model
from decoders.tree import Topology


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


by_our_kernels = pytest.mark.skipif(cpu.chosen().kernels is None, reason="there are no kernels for this CPU")


class Both(nn.Module):
    """Two layers that read the same, and one that reads what they give."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(32, 48, bias), nn.Linear(32, 16, bias), nn.Linear(64, 32, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.cat([self.up(x), self.gate(x)], -1))


GROUP = [("up", "gate")]


@pytest.mark.parametrize(
    "name, groups",
    [
        ("llama", ["q_proj k_proj v_proj", "gate_proj up_proj"]),
        ("qwen2", ["q_proj k_proj v_proj", "gate_proj up_proj"]),
        ("phi", ["q_proj k_proj v_proj fc1"]),  # attention and MLP read the same
        ("cohere", ["q_proj k_proj v_proj gate_proj up_proj"]),
        ("deepseek_v3", ["q_a_proj kv_a_proj_with_mqa", "gate_proj up_proj"]),
        ("mixtral", ["q_proj k_proj v_proj"]),
        ("gpt2", []),
    ],
)
def test_layers_that_read_the_same_are_found(name: str, groups: list[str]) -> None:
    target = target_of(tiny_model(name))
    first = [group for group in target.products.groups if ".0." in group[0]]
    assert [" ".join(path.rsplit(".", 1)[1] for path in group) for group in first] == groups


@by_our_kernels
@pytest.mark.parametrize("name", ["llama", "gptj", "cohere", "deepseek_v3"])
def test_a_pass_makes_every_product_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_of(tiny_model(name))
    made: Counter[tuple[int, ...]] = Counter()

    def counted(multiply: Callable[..., Any]) -> Callable[..., Any]:
        def counting(x: Tensor, matrices: list[Tensor], *more: Any) -> Any:
            made[tuple(matrix.data_ptr() for matrix in matrices)] += 1
            return multiply(x, matrices, *more)

        return counting

    monkeypatch.setattr(replaced, "product_or_none", counted(replaced.product_or_none))
    for name in ("gated_linear", "linear_to_residual", "linear_rotated"):
        monkeypatch.setitem(products.on_cpu, name, counted(products.on_cpu[name]))
    whole = products.on_cpu["decoder_layers"]
    monkeypatch.setitem(
        products.on_cpu, "decoder_layers", lambda x, reads, *given: counted(partial(whole, x))(reads, *given)
    )
    buffers, start = CacheBuffers.allocate(target.layout, 1, 16), torch.zeros(1, dtype=torch.int64)
    target.forward(
        PassInput(torch.arange(5)[None], start, Topology.chain(4).tensors(1, start.device), buffers, torch.arange(8))
    )
    layers = [module for module in target.model.modules() if type(module) in few_rows.KINDS.values()]
    multiplied = [place for matrices in made for place in matrices]
    assert sorted(multiplied) == sorted(layer.matrix().data_ptr() for layer in layers)
    assert set(made.values()) == {1}
    assert len(made) < len(layers)


@pytest.mark.parametrize(
    "kinds, parts",
    [
        ("AAA", ["012"]),
        ("A-A-A", ["024"]),  # between the layers those of an adapter, which are of another kind
        ("AABB", ["01", "23"]),
        ("ABAB", ["02"]),  # at one time there is one product
        ("AB-", []),
    ],
)
def test_layers_of_a_kind_are_multiplied_as_one_whatever_is_between_them(kinds: str, parts: list[str]) -> None:
    group = tuple(map(str, range(len(kinds))))
    same = fused.same_kind([group], lambda path: None if kinds[int(path)] == "-" else kinds[int(path)])
    assert list(map("".join, same)) == parts


@by_our_kernels
def test_layers_with_other_biases_are_no_part_of_a_product() -> None:
    target = target_of(tiny_model("gptj"))  # q, k and v have no bias, the MLP that reads the same has
    layers = {path.rsplit(".", 1)[1]: part for path, part in target.model.named_modules() if ".h.0." in path}
    assert layers["q_proj"].group == tuple(layers[name] for name in ("q_proj", "k_proj", "v_proj"))
    assert layers["fc_in"].group is None


def test_a_layer_that_runs_twice_shares_with_none() -> None:
    module = Both()
    with fused.SharedInputs(module) as shared:
        x = torch.randn(1, 32)
        module(x)
        module.up(x)
    assert shared.groups() == []
    assert not module.up._forward_pre_hooks


def test_groups_that_would_run_at_the_same_time_are_not_both_made() -> None:
    layers = nn.ModuleDict({name: nn.Linear(8, 8) for name in "abcd"})
    with fused.SharedInputs(layers) as shared:
        left, right = torch.randn(2, 1, 8)
        for name, x in zip("abcd", (left, right, left, right), strict=True):
            layers[name](x)
    assert shared.groups() == [("a", "c")]


def test_layers_that_get_their_input_by_keyword_are_in_no_group() -> None:
    layers = nn.ModuleDict({name: nn.Linear(8, 8) for name in "ab"})
    with fused.SharedInputs(layers) as shared:
        x = torch.randn(1, 8)
        layers["a"](x)
        layers["b"](input=x)
    assert shared.groups() == []


@by_our_kernels
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_shares_have_the_bits_of_products_of_their_own(dtype: torch.dtype, bias: bool) -> None:
    plain = Both(bias).to(dtype)
    alone, together = copy.deepcopy(plain), copy.deepcopy(plain)
    multiply_few_rows(alone)
    multiply_few_rows(together, GROUP)
    assert together.up.group == together.gate.group == (together.up, together.gate)
    for rows in (1, 2, 3, 9, 17):
        x = torch.randn(rows, 32).to(dtype)
        assert torch.equal(together(x), alone(x))


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_quantized_shares_have_the_bits_of_products_of_their_own(scheme: Scheme) -> None:
    plain = Both(bias=True)
    alone, together = copy.deepcopy(plain), copy.deepcopy(plain)
    assert len(quantize(alone, scheme, None, smallest=0).weights) == 3
    quantize(together, scheme, None, smallest=0, groups=GROUP)
    assert together.up.group == (together.up, together.gate)
    for rows in (1, 2, 9):
        x = torch.randn(rows, 32)
        assert torch.equal(together(x), alone(x))


def test_another_input_gets_a_product_of_its_own() -> None:
    module = Both()
    expected = copy.deepcopy(module)
    multiply_few_rows(module, GROUP)
    left, right = torch.randn(2, 3, 32)
    module.up(left)
    torch.testing.assert_close(module.gate(right), expected.gate(right))
    module.up(left)
    left.mul_(2)
    torch.testing.assert_close(module.gate(left), expected.gate(left))


@by_our_kernels
def test_nothing_is_kept_once_the_last_layer_had_its_share() -> None:
    module = Both()
    multiply_few_rows(module, GROUP)
    module(torch.randn(3, 32))
    assert vars(replaced._products) == dict(source=None, by=None, result=None, writes=0)


def traced(function: Callable[..., object], *arguments: Tensor) -> torch.fx.GraphModule:
    """As the compiler has a graph when the pass sees it: without writes."""
    return make_fx(torch.func.functionalize(function, remove="mutations_and_views"))(*arguments)


def product_count(graph: torch.fx.Graph) -> int:
    return sum(getattr(node.target, "namespace", "").startswith("decoders") for node in graph.nodes)


@by_our_kernels
def test_the_compiler_leaves_one_of_equal_products() -> None:
    def shares(x: Tensor, other: Tensor, weight: Tensor) -> list[Tensor]:
        # Equal values are told by how they are computed.
        return [products.product_or_none(t.abs().round(), [weight], []) for t in (x, x, other)]

    given = (*torch.randn(2, 3, 16), torch.randn(8, 16))
    module = traced(shares, *given)
    assert product_count(module.graph) == 3
    torch_compat.EqualOnce()(module.graph)
    module.recompile()
    assert product_count(module.graph) == 2
    for left, right in zip(module(*given), shares(*given), strict=True):
        assert torch.equal(left, right)


@by_our_kernels
def test_equal_products_of_matrices_as_they_are_are_one() -> None:
    def shares(x: Tensor, weight: Tensor) -> list[Tensor]:
        multiply = products.product_or_none
        return [multiply(x, [weight, weight], []), multiply(x, [weight, weight], []), multiply(x, [weight], [])]

    module = traced(shares, torch.randn(3, 16), torch.randn(8, 16))
    torch_compat.EqualOnce()(module.graph)
    assert product_count(module.graph) == 2


@by_our_kernels
def test_what_is_drawn_or_written_between_is_not_equal() -> None:
    def shares(x: Tensor, weight: Tensor) -> list[Tensor]:
        multiply = products.product_or_none
        drawn = [multiply(torch.rand_like(x), [weight], []) for _ in range(2)]
        before = multiply(x, [weight], [])
        changed = x.clone()
        changed.mul_(2)
        return [*drawn, before, multiply(changed, [weight], [])]

    module = traced(shares, torch.randn(3, 16), torch.randn(8, 16))
    torch_compat.EqualOnce()(module.graph)
    assert product_count(module.graph) == 4


def drafting_network() -> DFlashNetwork:
    config = LlamaConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, vocab_size=64,
        num_key_value_heads=2,
    )  # fmt: skip
    set_attention(config, "sdpa")
    return DFlashNetwork(DFlashConfig(config, 5, 0, (0, 1))).eval()


@by_our_kernels
def test_a_drafting_network_attends_by_the_targets_kernel() -> None:
    plain, tree = drafting_network(), Topology.branches(2, 2).tensors(1, torch.device("cpu"))
    base, states, results = torch.tensor([0]), torch.randn(1, 5, 128), []
    for attends in ("sdpa", "cpu"):
        twin = ModuleTwin(plain, (torch.zeros(1, 1, 128),), torch.device("cpu"), attends)
        assert twin.attends == attends
        passes = SlotPasses(twin, 1, 64, 8, lambda function: function)
        with torch.no_grad():
            passes(base, torch.ones(1, 6, 256), context=True)
            results.append(passes(base + 6, states, tree=tree))
    torch.testing.assert_close(*results)


@by_our_kernels
def test_a_drafting_network_whose_code_does_not_take_the_kernels_mask_keeps_pytorchs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernel, "pack_mask", lambda *_: torch.zeros(1))
    assert ModuleTwin(drafting_network(), (torch.zeros(1, 1, 128),), torch.device("cpu"), "cpu").attends == "sdpa"


@by_our_kernels
def test_a_drafting_network_multiplies_them_as_one() -> None:
    """Its context asks for two of the three that are multiplied as one."""
    plain = drafting_network()
    twin = ModuleTwin(plain, (torch.zeros(1, 1, 128),), torch.device("cpu"))
    for layer in twin.module.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for alike in ((attention.q_proj, attention.k_proj, attention.v_proj), (mlp.gate_proj, mlp.up_proj)):
            assert all(set(part.group) == set(alike) for part in alike)
    states, features = torch.randn(1, 3, 128), torch.randn(1, 6, 256)
    results = []
    for network in (plain, twin.module):
        cache, mask = DynamicCache(), torch.zeros(1, 1, 3, 9)
        network(features, attention_mask=mask, position_ids=torch.arange(6)[None], cache=cache, context=True)
        results.append(network(states, attention_mask=mask, position_ids=torch.arange(6, 9)[None], cache=cache))
    torch.testing.assert_close(*results)
