"""Products by matrices of 8 and 4 bits, by every variant of the CPU's kernels that this machine runs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decoders.engine.model.kernels import cpu
from decoders.engine.model.kernels.cpu import Kernels, build, four_bits

from .variants import IN_TURN, VARIANTS

if not VARIANTS or build.compiler() is None:
    pytest.skip("kernels are compiled where there is a compiler", allow_module_level=True)

DTYPES = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10}
#: Bits, inputs, groups of inputs: whole steps of a kernel, and inputs that end within a step.
SHAPES = [
    (8, 64, 1),
    (8, 37, 1),
    (8, 9000, 1),
    (8, 192, 6),
    (8, 4, 1),
    (4, 8, 1),
    (4, 32, 1),
    (4, 416, 13),
    (4, 512, 4),
    (4, 768, 3),
    (4, 1536, 3),
    (4, 120, 5),
]


@pytest.fixture(scope="module", params=IN_TURN)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return cpu.loaded(request.param)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def quantized(bits: int, inputs: int, groups: int, outputs: int, seed: int = 1) -> tuple[torch.Tensor, ...]:
    """Levels and scales as the kernels take them, and the matrix that they stand for, in float64. With 4 bits, `outputs` is rounded
    up to whole panels.
    """
    outputs += -outputs % four_bits.PANEL if bits == 4 else 0
    generator = torch.Generator().manual_seed(seed)
    most = 8 if bits == 4 else 128
    values = torch.randint(-most, most, (outputs, inputs), generator=generator)
    steps, middles = torch.rand(2, outputs, groups, generator=generator).div(most)
    matrix = values.double().view(outputs, groups, -1) * steps[..., None]
    if bits == 8:
        return values.to(torch.int8), steps, matrix.view(outputs, inputs)
    matrix = (matrix + middles[..., None]).view(outputs, inputs)
    return four_bits.packed((values + 8).to(torch.uint8)), four_bits.with_offsets(steps, middles), matrix


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from([1, 2, 5, 7, 33, 70, 130]),
    st.sampled_from([1, 3, 4, 9, 24, 37]),
    st.sampled_from(SHAPES),
    st.sampled_from(list(DTYPES)),
    st.booleans(),
    st.sampled_from([1, 2]),
)
def test_a_product_is_that_of_the_dequantized_matrix(
    kernels: Kernels,
    rows: int,
    outputs: int,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    with_bias: bool,
    digits: int,
) -> None:
    levels, scales, matrix = quantized(*shape, outputs)
    outputs = len(matrix)
    x, bias = random(rows, shape[1]).to(dtype), random(outputs, seed=2).to(dtype)
    product = kernels.quantized_linear(x, [levels], [scales], [bias] if with_bias else [], digits)
    assert product.dtype == dtype and product.shape == (rows, outputs)
    exact = x.double() @ matrix.T + (bias.double() if with_bias else 0)
    largest = x.double().abs().amax(-1, keepdim=True) * matrix.abs().sum(-1)
    rounding = largest * (2e-5 if digits == 1 else 1e-6)
    assert ((product - exact).abs() <= exact.abs() * DTYPES[dtype] + rounding + 1e-6).all()


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("digits", [1, 2])
@pytest.mark.parametrize("shape", [(8, 416, 1), (8, 9000, 1), (4, 416, 13)])
def test_a_row_has_the_same_bits_for_any_number_of_rows_and_threads(
    kernels: Kernels, shape: tuple[int, int, int], digits: int, threads: int
) -> None:
    levels, scales, _ = quantized(*shape, outputs=43)
    x, before = random(140, shape[1]), torch.get_num_threads()
    whole = kernels.quantized_linear(x, [levels], [scales], [], digits)
    torch.set_num_threads(threads)
    try:
        for rows in (1, 2, 3, 4, 5, 6, 7, 13, 64, 65, 139):
            part = kernels.quantized_linear(x[140 - rows :], [levels], [scales], [], digits)
            assert torch.equal(part, whole[140 - rows :]), rows
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("bits", [8, 4])
def test_several_matrices_are_one_product_with_the_same_bits(kernels: Kernels, bits: int) -> None:
    made = [quantized(bits, 416, 1 if bits == 8 else 13, outputs, seed=outputs)[:2] for outputs in (33, 7, 21)]
    x, biases = random(2, 3, 416), [random(len(levels)) for levels, _ in made]
    levels, scales = [list(part) for part in zip(*made, strict=True)]
    together = kernels.quantized_linear(x, levels, scales, biases, 1)
    alone = [kernels.quantized_linear(x, [lv], [sc], [b], 1) for lv, sc, b in zip(levels, scales, biases, strict=True)]
    assert torch.equal(together, torch.cat(alone, -1))


def test_scales_of_bfloat16_have_the_bits_of_equal_ones_of_float32(kernels: Kernels) -> None:
    levels, scales, _ = quantized(4, 416, 13, outputs=9)
    short = scales.bfloat16()
    x = random(5, 416)
    assert torch.equal(*(kernels.quantized_linear(x, [levels], [s], [], 1) for s in (short, short.float())))


def test_int8_levels_are_read_where_they_are(kernels: Kernels) -> None:
    levels, scales, _ = quantized(8, 96, 1, outputs=9)
    x, wide = random(5, 96), torch.zeros(9, 130, dtype=torch.int8)
    wide[:, :96] = levels
    assert torch.equal(*(kernels.quantized_linear(x, [lv], [scales], [], 1) for lv in (levels, wide[:, :96])))


@pytest.mark.parametrize("inputs", [65536, 65600])
def test_sums_of_the_largest_integers_do_not_overflow(kernels: Kernels, inputs: int) -> None:
    levels, scales = torch.full((3, inputs), -128, dtype=torch.int8), torch.ones(3, 1)
    x = torch.full((2, inputs), 1 - 1 / 254)  # integers whose lower byte is -128, if 1 is 127 · 256
    x[:, 0] = 1
    exact = x.double().sum(-1, keepdim=True).mul(-128).expand(2, 3)
    product = kernels.quantized_linear(x, [levels], [scales], [], 1)
    torch.testing.assert_close(product.double(), exact, rtol=1e-6, atol=0)


def test_rows_of_zeros_and_of_numbers_that_are_none(kernels: Kernels) -> None:
    levels, scales, _ = quantized(8, 96, 1, outputs=9)
    x = random(4, 96)
    x[0], x[1, 3], x[2, 5] = 0, torch.inf, torch.nan
    product = kernels.quantized_linear(x, [levels], [scales], [], 1)
    assert not product[0].any() and product[1:3].isnan().all() and product[3].isfinite().all()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda x, levels, scales: (x, [levels], [scales[:, :, :5].contiguous()]), "groups are multiples of 8"),
        (lambda x, levels, scales: (x, [levels[:9]], [scales[:9]]), "panels of 16 outputs"),
        (lambda x, levels, scales: (x, [levels.repeat(1, 2)[:, : levels.shape[1]]], [scales]), "panels of 16 outputs"),
        (lambda x, levels, scales: (x[:, :32], [levels], [scales]), "have the inputs of x"),
        (lambda x, levels, scales: (x, [levels] * 4, [scales] * 4), "one to three"),
    ],
)
def test_what_does_not_fit_is_refused(kernels: Kernels, change: object, says: str) -> None:
    levels, scales, _ = quantized(4, 416, 13, outputs=9)
    with pytest.raises(RuntimeError, match=says):
        kernels.quantized_linear(*change(random(2, 416), levels, scales), [], 1)  # type: ignore[operator]


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_four_bits_have_the_least_squared_error_of_some_ranges(kernels: Kernels, dtype: torch.dtype) -> None:
    matrix = random(6, 192).to(dtype)
    levels, scales = kernels.round_to_four_bits(matrix, 32)
    step, middle = scales.float().unbind(1)
    assert levels.max() == 15 and levels.min() == 0
    groups = matrix.float().view(6, 6, 32)
    off = (levels.view(6, 6, 32).float() - 8) * step[..., None] + middle[..., None] - groups
    whole = (groups.amax(-1) - groups.amin(-1)) / 15
    assert (off.square().mean(-1) <= whole.square() / 11).all()
    assert off.norm() / groups.norm() < 0.09


def test_levels_that_were_four_bits_before_are_found_again(kernels: Kernels) -> None:
    values = torch.randint(0, 16, (5, 64), generator=torch.Generator().manual_seed(0))
    values[:, ::32], values[:, 1::32] = 0, 15
    levels, _ = kernels.round_to_four_bits((values - 8) * 0.25 + 1, 32)
    assert torch.equal(levels, values.to(torch.uint8))


def test_a_wrong_kernel_is_noticed(kernels: Kernels) -> None:
    assert cpu.check(kernels) is None

    def planted(x: torch.Tensor, *more: object) -> torch.Tensor:
        product = kernels.quantized_linear(x, *more)
        return product + (1e-4 if len(x) == 1 else 0)

    wrong = Kernels(**{**vars(kernels), "quantized_linear": planted})
    assert "one row has other bits" in (cpu.check(wrong) or "")
