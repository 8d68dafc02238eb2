"""Products of few rows by our kernel, interpreted: right, with the same bits for any number of rows, in the place of layers."""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses import FakeTensorMode
from transformers.pytorch_utils import Conv1D

import decoders
from decoders.engine.model import kernels, self_check, torch_compat
from decoders.engine.model.kernels import interpreted, products
from decoders.engine.model.layout import probe_layout
from decoders.engine.model.weights import few_rows
from decoders.engine.model.weights.few_rows import multiply_few_rows
from decoders.engine.model.weights.layers import FewRowsLinear
from decoders.engine.model.weights.twin import share_weights
from decoders.settings import RuntimeSettings
from decoders.testing.exactness import decode, prompts
from decoders.testing.models import tiny_model

if not interpreted():
    pytest.skip("kernels are interpreted where there is no GPU and Triton is installed", allow_module_level=True)

from decoders.engine.model.kernels.products import product_or_none
from decoders.engine.model.kernels.products_triton import MOST_ROWS, _multiply, plan

DTYPES = {torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2**-11}
AS_IT_IS = {"compile": False, "reuse": False}


@pytest.fixture(autouse=True)
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU is taken for a CUDA device: its products are Triton's, of 16 bits in models."""
    monkeypatch.setitem(products._operators, "cpu", products.few_rows_on_cuda)
    monkeypatch.setattr(few_rows, "multiplies", lambda weight, exact: exact and weight.dtype.itemsize == 2)


class Products(torch_compat.TorchDispatchMode):
    """Counts products by the kernel."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.count += func is torch.ops.decoders.few_rows_linear.default
        return func(*args, **(kwargs or {}))


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def product_of(x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    product = product_or_none(x, [matrix], [] if bias is None else [bias])
    assert product is not None
    return product


@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from([1, 2, 15, 16, 17, 40, 130]),
    st.integers(1, 40),
    st.sampled_from([1, 63, 64, 100, 257, 530]),
    st.sampled_from(list(DTYPES)),
    st.booleans(),
    st.booleans(),
)
def test_a_product_is_that_of_float64_within_rounding(
    rows: int, outputs: int, inputs: int, dtype: torch.dtype, with_bias: bool, transposed: bool
) -> None:
    x, matrix = random(rows, inputs, dtype=dtype), random(outputs, inputs, dtype=dtype, seed=1)
    bias = random(outputs, dtype=dtype, seed=2) if with_bias else None
    exact = x.double() @ matrix.double().T + (bias.double() if bias is not None else 0)
    if transposed:  # as Conv1D keeps it
        matrix = matrix.t().contiguous().t()
    product = product_of(x, matrix, bias)
    assert product.dtype == dtype and product.shape == (rows, outputs)
    scale = x.double().abs() @ matrix.double().abs().T + 1
    assert ((product - exact).abs() <= exact.abs() * DTYPES[dtype] + scale * 1e-6).all()


@functools.cache
def product_of_all(dtype: torch.dtype, inputs: int) -> tuple[torch.Tensor, ...]:
    x, matrix, bias = random(70, inputs, dtype=dtype), random(70, inputs, dtype=dtype, seed=1), random(70, dtype=dtype)
    return x, matrix, bias, product_of(x, matrix, bias)


@settings(max_examples=2, deadline=None)
@example(1, 69, 1040, torch.float32)  # stretches that depended on the number of rows would have other lengths
@given(st.integers(1, 70), st.integers(0, 69), st.sampled_from([96, 1040]), st.sampled_from(list(DTYPES)[:2]))
def test_a_row_has_the_same_bits_however_many_there_are(rows: int, first: int, inputs: int, dtype: torch.dtype) -> None:
    x, matrix, bias, whole = product_of_all(dtype, inputs)
    part = slice(first, first + rows)
    assert torch.equal(product_of(x[part], matrix, bias), whole[part])


@pytest.mark.in_turns
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("sizes", [(64, 128), (128, 64, 64)])
def test_several_matrices_are_one_product_in_which_a_row_has_the_same_bits(
    sizes: tuple[int, ...], with_bias: bool
) -> None:
    """In sums of two stretches: 530 terms."""
    x, matrices = random(130, 530), [random(size, 530, seed=size + i) for i, size in enumerate(sizes)]
    biases = [random(size, seed=9 + i) for i, size in enumerate(sizes)] if with_bias else []
    whole = product_or_none(x[:20], matrices, biases)
    joint = F.linear(x.double(), torch.cat(matrices).double(), torch.cat(biases).double() if biases else None)
    torch.testing.assert_close(whole.double(), joint[:20], rtol=1e-5, atol=1e-4)
    assert torch.equal(product_or_none(x[17:18], matrices, biases), whole[17:18])
    many = product_or_none(x[None], matrices, biases)  # by torch
    torch.testing.assert_close(many[0].double(), joint, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("sizes", [(64, 128)])
def test_a_node_has_the_same_bits_alone_and_in_a_batch_of_more_rows_than_a_program_has(sizes: tuple[int, ...]) -> None:
    x, matrices = random(8, 32, 530, dtype=torch.float16), [random(size, 530, dtype=torch.float16) for size in sizes]
    whole = product_or_none(x, matrices, [])
    for row in (0, 5, 7):
        assert torch.equal(product_or_none(x[row : row + 1], matrices, []), whole[row : row + 1])
        assert torch.equal(product_or_none(x[row, 3:4], matrices, []), whole[row, 3:4])


def test_rows_may_have_more_than_two_to_the_31_numbers(tmp_path: Path) -> None:
    inputs, far, terms = 1 << 28, 1 << 31, 8  # row 8 begins at number 2^31
    # A sparse file: neither memory nor disk is needed. In 32 bits the number would be -2^31, which is in the file, too.
    x = torch.from_file(str(tmp_path / "x"), shared=True, size=2 * far + inputs, dtype=torch.float16)[far:]
    (tmp_path / "x").unlink()  # the mapping stays
    x[far : far + terms] = torch.arange(terms)
    matrix, out = torch.ones(1, terms, dtype=torch.float16), torch.zeros(9, 1, dtype=torch.float16)
    _multiply[(1, 1, 1)](
        x, *[matrix] * 6, out, 9, 1, inputs, terms, 1, terms, 1, 0,
        TILES=1, TILE=16, BLOCK=32, STEP=64, WHOLE=True, BIAS=False, MATRICES=1, KIND=-1,
    )  # fmt: skip
    assert out.flatten().tolist() == [0.0] * 8 + [28.0]


def test_rows_may_have_any_shape_and_strides() -> None:
    matrix, x = random(40, 96), random(3, 5, 2, 96)
    expected = product_of(x.reshape(-1, 96), matrix, None).view(3, 5, 2, 40)
    assert torch.equal(product_of(x, matrix, None), expected)
    assert torch.equal(product_of(x.transpose(0, 2), matrix, None), expected.transpose(0, 2))
    narrow = product_of(x[..., :64].clone(), matrix[:, :64].clone(), None)
    assert torch.equal(product_of(x[..., :64], matrix[:, :64], None), narrow)


@pytest.mark.parametrize(
    "sizes", [(3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192), (128256, 2048), (28672, 4096), (7, 5)]
)
@pytest.mark.parametrize("itemsize", [2, 4])
def test_a_plan_covers_every_sum_and_keeps_a_large_card_busy(sizes: tuple[int, int], itemsize: int) -> None:
    outputs, inputs = sizes
    block, stretches, stretch, step = plan(outputs, inputs, itemsize)
    assert (stretches - 1) * stretch < inputs <= stretches * stretch and stretch % step == 0
    programs = -(-outputs // block) * stretches
    assert programs >= 256 or inputs < 1024


def test_the_operator_is_traced_with_any_number_of_rows() -> None:
    matrix, bias = random(40, 96), random(40)
    seen: list[tuple[Any, ...]] = []

    def noted(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        seen.append(tuple(node.target for node in graph.graph.nodes if node.op == "call_function"))
        return graph.forward

    compiled = torch.compile(lambda x: product_of(x, matrix, bias), backend=noted, fullgraph=True, dynamic=True)
    for rows in (2, 5, 20):
        assert torch.equal(compiled(random(rows, 96)), product_of(random(rows, 96), matrix, bias))
    assert len(seen) == 1 and torch.ops.decoders.few_rows_linear.default in seen[0]


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_layers_of_16_bits_multiply_few_rows_by_the_kernel_and_many_by_torch(name: str) -> None:
    model = tiny_model(name).bfloat16()
    twin = share_weights(model)
    multiply_few_rows(twin)
    kinds = {type(module) for module in twin.modules()}
    assert kinds & set(few_rows.KINDS.values()) and not kinds & {nn.Linear, Conv1D}
    assert not {type(module) for module in model.modules()} & set(few_rows.KINDS.values())
    layer, own = next((a, b) for a, b in zip(twin.modules(), model.modules(), strict=True) if type(b) in few_rows.KINDS)
    x = random(MOST_ROWS + 1, layer.matrix().shape[1], dtype=torch.bfloat16)
    torch.testing.assert_close(
        layer(x), own(x), rtol=2**-7, atol=2**-7
    )  # torch's own kernels: which, depends on the processor
    assert torch.equal(layer(x[None, :-1]), product_of(x[None, :-1], layer.matrix(), own.bias))
    assert layer(x[:0]).shape == (0, layer.matrix().shape[0])
    with torch.no_grad():
        compiled = torch.compile(layer, backend="eager", fullgraph=True, dynamic=True)
        assert all(torch.equal(compiled(x[:rows]), layer(x[:rows])) for rows in (2, 5, len(x)))
    with pytest.raises(RuntimeError, match="dtype"):
        layer(x.float())


@pytest.mark.parametrize("name", ["llama", "qwen2"])  # without biases, and with them
def test_layers_that_read_the_same_input_are_one_product_and_nothing_is_copied(name: str) -> None:
    sizes = dict(hidden_size=128, head_dim=64, num_attention_heads=2, num_key_value_heads=1, intermediate_size=64)
    model = tiny_model(name, num_hidden_layers=1, **sizes).bfloat16()
    twin = share_weights(model)
    groups = probe_layout(twin, 1).shared_inputs
    multiply_few_rows(twin, groups)
    own, ours = model.get_decoder().layers[0], share_weights(twin).get_decoder().layers[0]
    attention = [getattr(ours.self_attn, f"{part}_proj") for part in "qkv"]
    for layers, parent in ((attention, own.self_attn), ([ours.mlp.gate_proj, ours.mlp.up_proj], own.mlp)):
        # A copy of the tree has groups of its own layers.
        assert all(len(layer.group) == len(layers) and layer in layer.group for layer in layers)
        x, plain = (
            random(3, 128, dtype=torch.bfloat16),
            {id(layer.weight): layer for layer in parent.children() if hasattr(layer, "weight")},
        )
        with torch.no_grad(), Products() as products:
            results = [layer(x) for layer in layers]
        assert products.count == 1
        for result, layer in zip(results, layers, strict=True):
            torch.testing.assert_close(result, plain[id(layer.weight)](x), rtol=0.02, atol=0.02)


def test_layers_of_another_kind_between_them_part_no_group() -> None:
    """As an adapter's, that read the same input; too narrow, of another type, or without a bias."""
    layers = nn.ModuleDict({name: nn.Linear(64, 64).bfloat16() for name in "qkv"})
    layers.update({"narrow": nn.Linear(64, 8).bfloat16(), "fp16": nn.Linear(64, 64).half()})
    layers["plain"] = nn.Linear(64, 64, bias=False).bfloat16()
    alone, order = share_weights(layers), ("q", "narrow", "k", "plain", "v")
    multiply_few_rows(alone)
    multiply_few_rows(layers, [("q", "narrow", "k", "fp16", "plain", "v")])
    x = random(3, 64, dtype=torch.bfloat16)
    with torch.no_grad(), Products() as products:
        results = [layers[name](x) for name in order]
    assert products.count == 3  # q, k and v together
    assert all(torch.equal(result, alone[name](x)) for name, result in zip(order, results, strict=True))


def test_a_weight_that_is_given_other_strides_is_still_read_as_it_lies() -> None:
    layers = nn.ModuleList([nn.Linear(128, 64, bias=False).bfloat16() for _ in range(3)])
    multiply_few_rows(layers, [("0", "1", "2")])
    x = random(3, 128, dtype=torch.bfloat16)
    with torch.no_grad():
        expected = [layer(x) for layer in layers]
        run = torch.compile(lambda x: [layer(x) for layer in layers], backend="eager", fullgraph=True)
        assert all(map(torch.equal, run(x), expected))
        weight = layers[1].weight
        weight.data = weight.data.t().contiguous().t()
        assert all(map(torch.equal, [layer(x) for layer in layers], expected))
        # torch 2.11 does not look at the strides again; there the engine compiles anew, because it compares them (weights/state.py).
        assert torch.__version__.startswith("2.11.") or all(map(torch.equal, run(x), expected))


def test_other_layers_and_float32_are_left_alone() -> None:
    layers = nn.ModuleDict(
        {"wide": nn.Linear(8, 8), "own": nn.Linear(8, 8).bfloat16(), "plain": nn.Linear(8, 8).bfloat16()}
    )
    layers["own"].forward = lambda x: x
    multiply_few_rows(layers)
    assert [type(layer) for layer in layers.values()] == [nn.Linear, nn.Linear, FewRowsLinear]


def test_what_is_written_into_weights_is_seen_at_once() -> None:
    model = tiny_model("llama").bfloat16()
    twin = share_weights(model)
    multiply_few_rows(twin)
    head = model.get_output_embeddings()
    x = random(2, head.in_features, dtype=torch.bfloat16)
    before = twin.get_output_embeddings()(x)
    with torch.no_grad():
        head.weight.mul_(2)
    assert torch.equal(twin.get_output_embeddings()(x), before * 2)
    head.weight.data = head.weight.data * 0.5
    assert torch.equal(twin.get_output_embeddings()(x), before)


@pytest.mark.slow
def test_strategies_write_the_same_tokens_in_bfloat16() -> None:
    model = decoders.enable(tiny_model("llama", num_hidden_layers=1).bfloat16())
    options: dict[str, Any] = dict(max_new_tokens=5, decoders_config=AS_IT_IS)
    expected = decode(model, prompts(1), "autoregressive", **options).sequences
    out = decode(model, prompts(1), "prompt_lookup", **options)
    assert torch.equal(out.sequences, expected)
    assert out.report.same_bits


def test_products_on_a_device_are_the_kernels_in_16_bits_and_if_they_have_to_be_exact(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(products, "has_kernel", lambda device: True)
    with FakeTensorMode():
        single, narrow = (torch.empty(4, 4, dtype=dtype, device="cuda") for dtype in (torch.float32, torch.bfloat16))
    assert products.multiplies(narrow) and not products.multiplies(narrow, exact=False)
    assert not products.multiplies(single)


def test_kernels_are_launched_on_the_device_of_their_first_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches on the current device, which need not be a model's."""
    current: list[Any] = []
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext(current.append(device)))
    with FakeTensorMode():
        x = torch.empty(2, device="cuda:3")
    assert kernels._on_own_device(lambda first, second: (first, second, *current))(x, 5) == (x, 5, x.device)


def test_a_setting_gives_exact_products_up(monkeypatch: pytest.MonkeyPatch) -> None:
    for check in ("check_tree_logits", "brief_check"):  # interpreted, they take longest
        monkeypatch.setattr(self_check, check, lambda *_: None)
    model = decoders.enable(tiny_model("llama", num_hidden_layers=1).bfloat16())
    engine = vars(model)["generate"].engine
    for exact in (False, True):
        settings = AS_IT_IS | {"exact_products": exact}
        decode(model, prompts(1, length=3), "autoregressive", max_new_tokens=1, decoders_config=settings)
        target = engine(RuntimeSettings(exact_products=exact)).target
        layers = [module for module in target.model.modules() if isinstance(module, nn.Linear)]
        assert {isinstance(layer, FewRowsLinear) for layer in layers} == {exact}
