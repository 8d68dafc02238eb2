"""What surrounds products on a CPU: norms, gated activations, rotary positions, writes to the cache, by every variant."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from decoders.engine.model.kernels import cpu
from decoders.engine.model.slot_cache import quantize_slots

from .variants import IN_TURN

#: Types, and how far a result is rounded.
DTYPES = {torch.float32: 2**-22, torch.bfloat16: 2**-8, torch.float16: 2**-11}

pytestmark = [
    pytest.mark.skipif(cpu.chosen().kernels is None, reason="there are no kernels for this CPU"),
    pytest.mark.parametrize("dtype", DTYPES, ids=str),
    pytest.mark.parametrize("variant", IN_TURN),
]


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def drawn(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(ours: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    assert ours.dtype == dtype
    assert ((ours.double() - exact).abs() <= 3 * DTYPES[dtype] * exact.abs() + 1e-6).all()


@pytest.mark.parametrize("width", [1, 15, 16, 96, 577])
def test_norms_are_right_and_a_row_has_the_same_bits_among_any_others(
    variant: str, dtype: torch.dtype, width: int
) -> None:
    kernels = cpu.loaded(variant)
    x, weight = drawn(9, 40, width, dtype=dtype), drawn(width, dtype=dtype, seed=1)
    wide = x.double()
    quotient = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
    for one_added in (False, True):
        whole = kernels.rms_norm(x, weight, 1e-5, one_added, False)
        assert_close(whole, quotient * (weight.double() + one_added), dtype)
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert torch.equal(kernels.rms_norm(x[:count, :1], weight, 1e-5, one_added, False), whole[:count, :1])
    # Rows with others between them, as heads have.
    turned = x.transpose(0, 1)
    assert torch.equal(kernels.rms_norm(turned, weight, 1e-5, True, False), whole.transpose(0, 1))


def test_a_quotient_is_rounded_first_where_the_model_does(variant: str, dtype: torch.dtype) -> None:
    x, weight = drawn(5, 64, dtype=dtype), drawn(64, dtype=dtype, seed=1)
    quotient = (x.double() * torch.rsqrt(x.double().pow(2).mean(-1, keepdim=True) + 1e-6)).to(dtype)
    ours = cpu.loaded(variant).rms_norm(x, weight, 1e-6, False, True)
    # Summed in another order a quotient may round to its neighbour.
    assert (
        (ours.double() - (weight * quotient).double()).abs()
        <= 4 * DTYPES[dtype] * quotient.abs().double() * weight.abs()
    ).all()


@pytest.mark.parametrize(
    "kind,activation", [(0, F.silu), (1, functools.partial(F.gelu, approximate="tanh"))], ids=["silu", "gelu"]
)
def test_activations_multiply_by_their_neighbours(variant: str, dtype: torch.dtype, kind: int, activation: Any) -> None:
    kernels = cpu.loaded(variant)
    x = torch.cat([drawn(700, 74, dtype=dtype) * 8, torch.tensor([0.0, -200, 200, 1e-6]).to(dtype).expand(700, 4)], 1)
    # A product by one is exact.
    one = torch.eye(x.shape[1], dtype=dtype)
    gated = lambda x: kernels.gated_linear(x, list(one.chunk(2)), [], [], 1, kind)  # noqa: E731
    whole = gated(x)
    gate, up = x.double().chunk(2, -1)
    exact = activation(gate) * up
    assert (
        (whole.double() - exact).abs()
        <= 3 * DTYPES[dtype] * (exact.abs() + torch.finfo(dtype).smallest_normal) + 2e-6 * up.abs()
    ).all()
    for rows in (1, 2, 7):
        torch.set_num_threads(rows)
        assert torch.equal(gated(x[:rows]), whole[:rows])


def split(kernels: cpu.Kernels, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The operator's queries, keys and product with one head each, ``x`` ``[B, N, 3, D]``: a product by one is exact."""
    width = x.shape[3]
    one = torch.eye(3 * width, dtype=x.dtype).split(width)
    around = None, None, 0.0, False, False, cos, sin
    return kernels.linear_rotated(x.flatten(2), list(one), [], [], 1, *around, 1, width)


@pytest.mark.parametrize("width", [2, 16, 80])
def test_rotary_positions_have_the_bits_of_torch(variant: str, dtype: torch.dtype, width: int) -> None:
    kernels = cpu.loaded(variant)
    x = drawn(3, 5, 3, width, dtype=dtype)
    for rows in (1, 3):  # one row of positions is that of all
        angles = drawn(rows, 5, width, dtype=torch.float32, seed=1) * 30
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        queries, keys, _ = split(kernels, x, cos, sin)
        expected = apply_rotary_pos_emb(x.transpose(1, 2), x.transpose(1, 2), cos, sin)[0]
        assert torch.equal(torch.cat([queries.transpose(1, 2), keys], 1), expected[:, :2])


def test_numbers_behind_the_turned_ones_stay(variant: str, dtype: torch.dtype) -> None:
    x, angles = drawn(1, 4, 3, 10, dtype=dtype), drawn(1, 4, 6, dtype=torch.float32)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    ours, own = split(cpu.loaded(variant), x, cos, sin)[1], x.transpose(1, 2)[:, 1:2]
    assert torch.equal(ours[..., :6], apply_rotary_pos_emb(own[..., :6], own[..., :6], cos, sin)[0])
    assert torch.equal(ours[..., 6:], own[..., 6:])


def test_keys_and_values_go_to_their_slots(variant: str, dtype: torch.dtype) -> None:
    kernels = cpu.loaded(variant)
    cache = torch.zeros(2, 2, 3, 12, 8, dtype=dtype)
    new = drawn(2, 4, 3, 8, dtype=dtype).transpose(1, 2)
    slots = torch.tensor([[0, 3, 4, -1], [7, 2, 11, 10]])
    kernels.write_to_cache(cache[0], cache[1], slots, new, 2 * new, None, None)
    expected = torch.zeros_like(cache)
    for row in range(2):
        for node, slot in enumerate(slots[row].tolist()):
            expected[0, row, :, slot], expected[1, row, :, slot] = new[row, :, node], 2 * new[row, :, node]
    assert torch.equal(cache, expected)
    with pytest.raises(RuntimeError, match="a slot outside the cache"):
        kernels.write_to_cache(cache[0], cache[1], slots + 12, new, new, None, None)
    assert torch.equal(cache, expected)


@pytest.mark.parametrize("factor", [1.0, 0.0, 1e-7, 300.0])
def test_an_int8_cache_has_the_bits_of_torch(variant: str, dtype: torch.dtype, factor: float) -> None:
    levels, scales = torch.zeros(2, 2, 3, 12, 8, dtype=torch.int8), torch.zeros(2, 2, 3, 12, 1, dtype=dtype)
    new = drawn(2, 4, 3, 8, dtype=dtype).transpose(1, 2) * factor
    slots = torch.tensor([[0, 3, 4, -1], [7, 2, 11, 10]])
    cpu.loaded(variant).write_to_cache(*levels, slots, new, -new, *scales)
    row = torch.arange(2)[:, None]
    for own, scale, states in zip(levels, scales, (new, -new), strict=True):
        expected, expected_scale = quantize_slots(states)
        assert torch.equal(own[row, :, slots].transpose(1, 2), expected)
        assert torch.equal(scale[row, :, slots].transpose(1, 2), expected_scale)
    new[1, 0, 2, 3] = float("nan")
    cpu.loaded(variant).write_to_cache(*levels, slots, new, new, *scales)
    assert scales[:, row, :, slots].isnan().sum() == 2, "a scale of each buffer"
    with pytest.raises(RuntimeError, match="a scale for every head and slot"):
        cpu.loaded(variant).write_to_cache(*levels, slots, new, new, *scales[:, :, :, :5])


def test_a_planted_wrong_norm_is_found(variant: str, dtype: torch.dtype) -> None:
    kernels = cpu.loaded(variant)
    assert cpu.check(kernels) is None
    wrong = replace(kernels, rms_norm=lambda x, weight, *more: kernels.rms_norm(x, weight, *more) * 1.01)
    assert cpu.check(wrong) == "a wrong norm of float32"
    wrong = replace(kernels, gated_linear=lambda *given: kernels.gated_linear(*given) + 0.01)
    assert cpu.check(wrong) == "a wrong activation of float32"
    wrong = replace(kernels, linear_to_residual=lambda *given: kernels.linear_to_residual(*given)[::-1])
    assert cpu.check(wrong) == "a wrong sum of float32"
    wrong = replace(
        kernels, linear_rotated=lambda *given: kernels.linear_rotated(*given[:-4], *given[-3:-5:-1], *given[-2:])
    )
    assert cpu.check(wrong) == "wrong rotary positions of float32"
    wrong = replace(kernels, write_to_cache=lambda *given: kernels.write_to_cache(given[1], given[0], *given[2:]))
    assert cpu.check(wrong) == "a wrong write of float32 to the cache"
