"""Linear layers that read weights where they are: which ones, that they compute the same, and that changed weights count at once."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

import decoders
from decoders.engine.model.kernels import cpu
from decoders.engine.model.weights.few_rows import KINDS, multiply_few_rows
from decoders.engine.model.weights.layers import FewRowsLinear
from decoders.engine.model.weights.twin import share_weights
from decoders.testing import prompts, tiny_model
from decoders.testing.exactness import decode

from ...turns import slow_but

pytestmark = pytest.mark.skipif(cpu.chosen().kernels is None, reason="there are no kernels for this CPU")


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def logits(model: PreTrainedModel, n: int = 5) -> Tensor:
    return model(input_ids=torch.arange(n)[None] % 7, use_cache=False).logits


def replaced(module: nn.Module) -> set[str]:
    return {path for path, part in module.named_modules(remove_duplicate=False) if type(part) in KINDS.values()}


@pytest.mark.parametrize("name", ["llama", "gpt2", "phi", "gemma2", "falcon", "mixtral", "deepseek_v3"])
def test_a_twin_computes_the_models_logits_by_the_models_own_weights(name: str) -> None:
    model = tiny_model(name)
    twin = share_weights(model)
    multiply_few_rows(twin)
    torch.testing.assert_close(logits(twin), logits(model), rtol=1e-4, atol=1e-4)
    assert replaced(twin) and not replaced(model)
    assert [*map(id, twin.parameters())] == [*map(id, model.parameters())]


def test_every_plain_linear_is_replaced_under_all_its_names() -> None:
    model = tiny_model("llama")
    linears = {path for path, module in model.named_modules() if type(module) is nn.Linear}
    multiply_few_rows(model)
    assert replaced(model) == linears
    layer = nn.Linear(8, 8)
    twice = nn.ModuleDict({"a": layer, "b": layer})
    multiply_few_rows(twice)
    assert replaced(twice) == {"a", "b"}


def test_unlike_layers_are_left_alone() -> None:
    class Odd(nn.Linear):
        pass

    exchanged, parametrized = nn.Linear(8, 8), nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
    exchanged.forward = lambda x: x  # type: ignore[method-assign]
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
    multiply_few_rows(module)
    assert [type(m) for m in module] == classes


def test_hooks_of_a_layer_still_run() -> None:
    layer, seen = nn.Linear(8, 8), []
    layer.register_forward_hook(lambda *args: seen.append(args[-1]))
    multiply_few_rows(layer)
    output = layer(torch.randn(2, 8))
    assert seen[0] is output


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_gpt2s_layer_is_multiplied_as_it_is_stored(dtype: torch.dtype) -> None:
    layer, x = Conv1D(24, 16).to(dtype), torch.randn(3, 16).to(dtype)
    plain = layer(x)
    multiply_few_rows(layer)
    assert type(layer) is KINDS[Conv1D]
    torch.testing.assert_close(layer(x), plain)


def test_gpt2s_layer_may_read_the_same_input_as_the_first_layer_of_an_adapter() -> None:
    layers, x = nn.ModuleDict({"base": Conv1D(24, 16), "adapter": nn.Linear(16, 4, bias=False)}), torch.randn(3, 16)
    plain = [layer(x) for layer in layers.values()]
    multiply_few_rows(layers, [("base", "adapter")])
    assert replaced(layers) == {"base", "adapter"}
    torch.testing.assert_close([layer(x) for layer in layers.values()], plain)


def test_a_row_of_a_float32_adapter_has_the_same_bits_among_hundreds_of_rows_if_other_layers_have_16_bits() -> None:
    layers = nn.ModuleDict({"base": nn.Linear(448, 448).bfloat16(), "a": nn.Linear(448, 8), "b": Conv1D(448, 8)})
    multiply_few_rows(layers)
    x = torch.randn(600, 448, generator=torch.Generator().manual_seed(0))
    assert torch.equal(layers["a"](x)[:7], layers["a"](x[:7]))
    assert torch.equal(layers["b"](x[:, :8])[:7], layers["b"](x[:7, :8]))


def test_wrong_type_of_input_raises_pytorchs_own_error() -> None:
    layer = nn.Linear(8, 8)
    multiply_few_rows(layer)
    with pytest.raises(RuntimeError, match="dtype"):
        layer(torch.randn(2, 8, dtype=torch.bfloat16))


def strided(tensor: Tensor) -> Tensor:
    """The same values with gaps between them."""
    return torch.stack([tensor, tensor], -1)[..., 0]


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: layer.weight.mul_(2),
        lambda layer: layer.bias.data.add_(1),
        lambda layer: setattr(layer.weight, "data", layer.weight.data * 3),
        lambda layer: setattr(layer.weight, "data", (layer.weight.data * 3).t().contiguous().t()),
        lambda layer: setattr(layer.weight, "data", strided(layer.weight.data)),
        lambda layer: setattr(layer.bias, "data", strided(layer.bias.data)),
        lambda layer: setattr(layer, "weight", nn.Parameter(-layer.weight)),
    ],
    ids=["in place", "bias in place", "data", "by columns", "with gaps", "bias with gaps", "another parameter"],
)
def test_what_is_done_to_a_weight_counts_in_the_next_product(change: Callable[[nn.Linear], object]) -> None:
    layers = nn.ModuleDict({name: nn.Linear(24, 16) for name in "qkv"})
    plain, x = copy.deepcopy(layers), torch.randn(3, 24)
    multiply_few_rows(layers, [("q", "k", "v")])
    assert all(layer.group is not None for layer in layers.values())
    for change_of in (lambda layer: None, change):
        change_of(layers["k"]), change_of(plain["k"])
        for name, layer in layers.items():
            torch.testing.assert_close(layer(x), plain[name](x))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_changed_weights_count_in_the_next_pass_of_a_twin(name: str) -> None:
    model = tiny_model(name)
    twin = share_weights(model)
    multiply_few_rows(twin)
    head = model.get_output_embeddings()  # gpt2's is tied
    head.weight.mul_(2)
    head.weight.data = head.weight.data + 0.1
    torch.testing.assert_close(logits(twin), logits(model), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("compile", slow_but([False], [False, True]))
@pytest.mark.usefixtures("traced_only")
def test_changed_weights_count_in_the_next_call_and_nothing_is_compiled_anew(compile: bool) -> None:
    model = decoders.enable(tiny_model("llama", num_hidden_layers=1))
    settings = {"compile": compile}
    weight = model.model.layers[0].mlp.up_proj.weight
    changes: list[Callable[[], object]] = [
        lambda: None,
        lambda: weight.mul_(-3),
        lambda: setattr(weight, "data", weight.data * -2),
        lambda: setattr(weight, "data", weight.data.t().contiguous().t()),
    ]
    for number, change in enumerate(changes):
        change()
        out = decode(model, prompts(1), "prompt_lookup", max_new_tokens=8, decoders_config=settings)
        assert torch.equal(out.sequences, decode(model, prompts(1), max_new_tokens=8).sequences)
        if number in (1, 2):  # stored otherwise, as then, it is another graph
            assert out.report.compilations == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_decoding_makes_no_copy_of_a_weight(dtype: torch.dtype) -> None:
    model = decoders.enable(tiny_model("llama", hidden_size=136, intermediate_size=264).to(dtype))
    decode(model, prompts(2), "prompt_lookup", max_new_tokens=8, decoders_config={"compile": False})
    own = {parameter.data_ptr() for parameter in model.parameters()}
    sizes = {parameter.numel() for parameter in model.parameters() if parameter.dim() == 2}
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if type(thing) in (Tensor, nn.Parameter)]
    assert not [t.shape for t in tensors if t.numel() in sizes and t.data_ptr() not in own]
    layer = vars(model)["generate"]._engine.target.model.model.layers[0].mlp.up_proj
    assert type(layer) is FewRowsLinear and layer.weight is model.model.layers[0].mlp.up_proj.weight
