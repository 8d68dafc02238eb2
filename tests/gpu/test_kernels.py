"""The kernels compiled, on a device: right, and with the same bits for any number of rows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from decoders.engine.model.kernels.products import product_or_none
from decoders.engine.model.kernels.products import rms_norm_on_cuda as rms_norm

pytestmark = pytest.mark.usefixtures("cuda")

ROWS = (1, 2, 3, 4, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128)
SIZES = [(3072, 2048), (2048, 2048), (512, 2048), (16384, 2048), (2048, 8192), (128256, 2048), (130, 100)]


def product_of(x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    product = product_or_none(x, [matrix], [] if bias is None else [bias])
    assert product is not None
    return product


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
def test_a_row_of_a_product_has_the_same_bits_for_any_number_of_rows(
    outputs: int, inputs: int, transposed: bool, dtype: torch.dtype
) -> None:
    x, matrix = (torch.randn(rows, inputs, device="cuda").to(dtype) for rows in (128, outputs))
    bias = torch.randn(outputs, device="cuda").to(dtype)
    if transposed:
        matrix = matrix.t().contiguous().t()
    whole = product_of(x, matrix, bias)
    exact = F.linear(x.float(), matrix.float(), bias.float())
    torch.testing.assert_close(whole.float(), exact, rtol=torch.finfo(dtype).eps, atol=0.05)
    for rows in ROWS:
        assert torch.equal(product_of(x[:rows], matrix, bias), whole[:rows]), rows
        assert torch.equal(product_of(x[-rows:], matrix, bias), whole[-rows:]), rows


@pytest.mark.parametrize("sizes", [(2048, 512, 512), (8192, 8192)])
def test_a_row_of_several_products_in_one_has_the_same_bits_for_any_number_of_rows(sizes: tuple[int, ...]) -> None:
    x, *matrices = (torch.randn(rows, 2048, device="cuda").bfloat16() for rows in (200, *sizes))
    biases = [torch.randn(size, device="cuda").bfloat16() for size in sizes]
    whole = product_or_none(x[:128], matrices, biases)
    exact = F.linear(x.float(), torch.cat(matrices).float(), torch.cat(biases).float())
    for product in (whole, product_or_none(x, matrices, biases)):  # the latter by cuBLAS
        torch.testing.assert_close(
            product.float(), exact[: len(product)], rtol=torch.finfo(torch.bfloat16).eps, atol=0.05
        )
    for rows in ROWS:
        assert torch.equal(product_or_none(x[:rows], matrices, biases), whole[:rows]), rows


@pytest.mark.parametrize("width", [64, 2048, 4096, 6000])
def test_a_row_of_a_norm_has_the_same_bits_for_any_number_of_rows(width: int) -> None:
    x, weight = torch.randn(600, width, device="cuda").bfloat16(), torch.randn(width, device="cuda").bfloat16()
    whole = rms_norm(x, weight, 1e-6, False, False)
    exact = F.rms_norm(x.float(), (width,), weight.float(), 1e-6)
    torch.testing.assert_close(whole.float(), exact, rtol=0.01, atol=1e-3)
    for rows in (*ROWS, 500):
        assert torch.equal(rms_norm(x[:rows], weight, 1e-6, False, False), whole[:rows]), rows
