"""Levels that other libraries have packed are multiplied by as they are: nothing is quantized a second time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import decoders
from decoders.engine.model.self_check import target_of
from decoders.engine.model.weights import packed, quantized
from decoders.engine.model.weights.packed import FORMATS, Format
from decoders.engine.model.weights.quantization import take_packed
from decoders.engine.model.weights.quantized import QuantizedLinear
from decoders.engine.model.weights.twin import share_weights
from decoders.testing import tiny_model
from decoders.testing.exactness import decode, prompts

NAMES = ["gptq", "older gptq", "awq", "compressed-tensors"]


@pytest.fixture(autouse=True)
def _kernels() -> None:
    if not quantized.has_kernels():
        pytest.skip("there is no compiler")


def words(numbers: Tensor, bits: int, dim: int, order: tuple[int, ...]) -> Tensor:
    count = 32 // bits
    parts = numbers.long().unflatten(dim, (-1, count)).unbind(dim + 1)
    whole = sum(parts[order[place] if order else place] << (bits * place) for place in range(count))
    return torch.where(whole >= 1 << 31, whole - (1 << 32), whole).int()  # type: ignore[operator, arg-type]


class Packed(nn.Module):
    """A layer as a library has it, which makes numbers of its levels in every pass.

    Args:
        order: of the groups of inputs, other than the layout says: such layers are left alone.
    """

    def __init__(
        self, form: Format, bits: int, groups: int, like: nn.Linear, middle: bool, order: Tensor | None = None
    ):
        super().__init__()
        self.in_features, self.out_features, self.bias = like.in_features, like.out_features, like.bias
        most, draws = (1 << bits) - 1, torch.Generator().manual_seed(self.out_features)
        levels = torch.randint(0, most + 1, (self.out_features, self.in_features), generator=draws)
        zeros = torch.randint(1, most + 1, (self.out_features, groups), generator=draws)
        if middle:
            zeros = torch.full_like(zeros, 1 << (bits - 1))
        scales = (torch.rand(self.out_features, groups, generator=draws) * 0.2 / most).to(like.weight.dtype)
        each = (levels.unflatten(1, (groups, -1)) - zeros[..., None]).float() * scales.float()[..., None]
        each = each if order is None else each[:, order]
        self.matrix = each.flatten(1).to(like.weight.dtype)
        stored = [
            tensor.t().contiguous() if form.inputs_first else tensor for tensor in (levels, scales, zeros - form.less)
        ]
        self.register_buffer(form.levels, words(stored[0], bits, form.packed, form.order))
        self.register_buffer(form.scales, stored[1])
        if form.inputs_first or not middle:
            self.register_buffer(form.zeros, words(stored[2], bits, form.zeros_packed, form.order))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.matrix, self.bias)


def packed_model(form: Format, bits: int = 4, size: int = 32, middle: bool = False, **options: Any) -> PreTrainedModel:
    model = tiny_model("llama", hidden_size=128, intermediate_size=256, num_hidden_layers=2).bfloat16()
    for path, layer in [*model.named_modules()]:
        if isinstance(layer, nn.Linear) and path != "lm_head":
            model.set_submodule(path, Packed(form, bits, layer.in_features // size, layer, middle, **options))
    return model


@pytest.mark.parametrize("form", FORMATS, ids=NAMES)
@pytest.mark.parametrize(("bits", "middle"), [(4, False), (4, True), (8, True)])
def test_a_librarys_levels_are_multiplied_by(form: Format, bits: int, middle: bool) -> None:
    if form.order and bits == 8:
        pytest.skip("AWQ has 4 bits")
    model = packed_model(form, bits, middle=middle)
    target = target_of(model)
    assert len(target.products.quantized.layers) == 2 * 7 and target.checks.rejected is None
    assert all(type(layer) is QuantizedLinear for layer, _ in target.products.quantized.layers.values())
    layer = model.model.layers[0].mlp.up_proj
    found = packed.format_of(layer)
    assert found is not None and found[1] == bits
    levels, scales, zeros = found[0].unpacked(bits, *found[0].sources(layer))
    whole = ((levels.float().unflatten(1, (4, -1)) - zeros[..., None]) * scales[..., None]).flatten(1)
    assert torch.equal(whole.bfloat16(), layer.matrix)


def test_every_strategy_writes_the_same_tokens_with_them() -> None:
    model = decoders.enable(packed_model(FORMATS[0]))
    options = dict(max_new_tokens=12, decoders_config={"compile": False})
    plain, drafted = (decode(model, prompts(1, 30), name, **options) for name in ("autoregressive", "prompt_lookup"))
    assert torch.equal(plain.sequences, drafted.sequences)


def test_other_layers_stay_as_they_are() -> None:
    """8 bits whose zero is not their middle, groups that no kernel takes, and levels in another order of their groups."""
    for model in (
        packed_model(FORMATS[0], 8), packed_model(FORMATS[0], 4, 4), packed_model(FORMATS[1], order=torch.tensor([1, 0, 2, 3]))
    ):  # fmt: skip
        twin = share_weights(model)
        layers = [layer for path, layer in twin.named_modules() if "mlp.up" in path]
        assert not any("mlp.up" in path for path in take_packed(twin).layers)
        assert all(type(layer) is Packed for layer in layers)


def test_what_a_library_does_before_the_first_pass_is_done_to_the_twin_alone() -> None:
    """compressed-tensors unpacks a model then, and removes the hook that does it."""
    model = tiny_model("llama")
    unpacked: list[nn.Module] = []

    def unpack(module: Any, given: object) -> None:
        unpacked.append(module)
        module.first_pass.remove()

    model.first_pass = model.register_forward_pre_hook(unpack)
    target = target_of(model)
    assert target.model in unpacked and model not in unpacked
    model(torch.tensor([[1]]))
    model(torch.tensor([[1]]))
    assert unpacked.count(model) == 1
