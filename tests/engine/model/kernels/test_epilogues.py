"""Products together with what follows them, by Triton's kernels, interpreted, and the CPU's: right, and with the same bits for any
number of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from decoders.engine.model.kernels import Norm, Operands, cpu, interpreted, products
from decoders.engine.model.weights.layers import Formula

from ....turns import slow_but

#: Devices whose kernels run here: Triton's are interpreted where there is no GPU and Triton is installed.
DEVICES = [*(["cuda"] if interpreted() else []), *(["cpu"] if cpu.chosen().kernels is not None else [])]
if not DEVICES:
    pytest.skip("no kernels run here", allow_module_level=True)

FORMULAS = {"llama": Formula(1e-6, False, True), "gemma": Formula(1e-5, True, False)}


@pytest.fixture(autouse=True, params=DEVICES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """For "cuda", the CPU is taken for a CUDA device."""
    products.take_cpu_kernels()
    if request.param == "cuda":
        monkeypatch.setitem(products._operators, "cpu", products.few_rows_on_cuda)
    return str(request.param)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("inputs", [96, 530])  # one stretch, and two
@pytest.mark.in_turns
def test_a_gated_activation_follows_both_products(inputs: int, with_bias: bool, kind: int) -> None:
    x, pair = random(2, 40, inputs), [random(128, inputs, seed=i) * 0.1 for i in (1, 2)]
    biases = [random(128, seed=i) for i in (3, 4)] if with_bias else []
    gate, up = (F.linear(x, m, biases[i] if biases else None) for i, m in enumerate(pair))
    expected = (F.gelu(gate, approximate="tanh") if kind else F.silu(gate)) * up
    ours = products.gated_linear(x, Operands(pair, [], biases), kind)
    assert ours is not None
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)
    alone = products.gated_linear(x[1:, 3:4], Operands(pair, [], biases), kind)
    assert alone is not None and torch.equal(alone, ours[1:, 3:4])


def test_a_gated_activation_of_a_long_text_follows_torchs_products() -> None:
    x, pair = random(130, 96), [random(64, 96, seed=i) for i in (1, 2)]
    ours = products.gated_linear(x, Operands(pair, [], []), 0)
    torch.testing.assert_close(ours, F.silu(x @ pair[0].T) * (x @ pair[1].T), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("before", [None, "llama", "gemma"])
@pytest.mark.parametrize("after", [None, "llama", "gemma"])
@pytest.mark.parametrize("rows", [20, 130])
@pytest.mark.in_turns
def test_a_residual_and_norms_follow_a_product(rows: int, after: str | None, before: str | None) -> None:
    x, matrix, residual, bias = random(rows, 530), random(72, 530, seed=1), random(rows, 72, seed=2), random(72, seed=3)
    weights = random(2, 72, seed=4)
    norms = [
        Norm(weight, *FORMULAS[name]) if name else Norm() for weight, name in zip(weights, (before, after), strict=True)
    ]
    total = F.linear(x, matrix, bias)
    total = residual + (FORMULAS[before](total, weights[0]) if before else total)
    by = Operands([matrix], [], [bias])
    out = products.linear_to_residual(x, by, residual, *norms)
    assert out is not None
    torch.testing.assert_close(out[0], total, rtol=1e-4, atol=1e-4)
    if after:
        torch.testing.assert_close(out[1], FORMULAS[after](total, weights[1]), rtol=1e-4, atol=1e-4)
    else:
        assert not out[1].numel()
    if rows < 128:
        alone = products.linear_to_residual(x[5:6], by, residual[5:6], *norms)
        assert alone is not None and all(
            torch.equal(one, many[5:6]) for one, many in zip(alone, out, strict=True) if one.numel()
        )


def half_turned(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


@pytest.mark.parametrize("formula", slow_but([None, "gemma"], [None, *FORMULAS]))
@pytest.mark.parametrize(
    ("rows", "nodes", "dtype"),
    slow_but(SHORT := [(2, 5, torch.float32), (1, 3, torch.bfloat16)], [*SHORT, (1, 130, torch.float32)]),
)
@pytest.mark.in_turns
def test_rotary_positions_and_writes_to_the_cache_follow_a_product(
    rows: int, nodes: int, dtype: torch.dtype, formula: str | None
) -> None:
    heads, key_heads, width, inputs = 4, 2, 32, 530
    x, sizes = random(rows, nodes, inputs, dtype=dtype), (heads * width, key_heads * width, key_heads * width)
    matrices = [random(size, inputs, seed=i, dtype=dtype) * 0.1 for i, size in enumerate(sizes)]
    biases = [random(size, seed=9 + i, dtype=dtype) for i, size in enumerate(sizes)] if formula != "llama" else []
    angles, weights = random(1, nodes, width // 2, seed=5).repeat(1, 1, 2), random(2, width, seed=6, dtype=dtype)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    slots = torch.arange(nodes)[None] + torch.tensor([7, -2])[:rows, None]
    keys, values = (torch.zeros(rows, key_heads, 160, width, dtype=dtype) for _ in range(2))
    plain = [F.linear(x, m, biases[i] if biases else None).view(rows, nodes, -1, width) for i, m in enumerate(matrices)]
    norms = (Norm(), Norm())
    if formula:
        norms = Norm(weights[0], *FORMULAS[formula]), Norm(weights[1], *FORMULAS[formula])
        plain[:2] = [FORMULAS[formula](part, weight) for part, weight in zip(plain, weights, strict=False)]
    turn: Callable[[Tensor], Tensor] = lambda part: part * cos[:, :, None] + half_turned(part) * sin[:, :, None]  # noqa: E731
    given = x, Operands(matrices, [], biases), norms, cos, sin, slots, keys, values
    rotated = products.linear_rotated(*given)
    assert rotated is not None
    query, row = rotated[0], torch.arange(rows)[:, None]
    assert query.dtype == dtype
    for cache, states in zip((keys, values), rotated[1:], strict=True):
        if states is not None:  # the CPU's operator does not write
            cache[row, :, slots] = states.transpose(1, 2)
    close: dict[str, Any] = dict(rtol=0.05, atol=0.1) if dtype == torch.bfloat16 else dict(rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(query, turn(plain[0]), **close)
    torch.testing.assert_close(keys[row, :, slots], turn(plain[1]), **close)
    torch.testing.assert_close(values[row, :, slots], plain[2], **close)
    assert keys.count_nonzero() <= rows * nodes * key_heads * width
    # Compiled code gets what it has to write itself, with the same bits.
    torch.compiler.reset()  # of one function Dynamo makes a few graphs only
    traced = torch.compile(products.linear_rotated, backend="eager", fullgraph=True)(*given)
    assert traced is not None and torch.equal(traced[0], query)
    assert torch.equal(traced[1], keys[row, :, slots].transpose(1, 2))
    assert torch.equal(traced[2], values[row, :, slots].transpose(1, 2))


def test_a_row_of_the_cache_may_have_more_than_two_to_the_31_numbers(tmp_path: Path, device: str) -> None:
    if device == "cpu":
        pytest.skip("the CPU's operator does not write to the cache")
    x, width, far = random(1, 1, 32, dtype=torch.float16), 64, 1 << 31
    matrices = [random(3 * width, 32, seed=i, dtype=torch.float16) for i in range(3)]
    turn, zeros = torch.ones(1, 1, width).half(), torch.zeros(1, 1, width).half()
    # A sparse file. Head 2 begins at number 2^31; in 32 bits that would be -2^31, which is in the file, too.
    numbers = torch.from_file(str(tmp_path / "numbers"), shared=True, size=2 * far + 1024, dtype=torch.float16)
    (tmp_path / "numbers").unlink()  # the mapping stays
    keys, values = (
        numbers.as_strided((1, 3, 4, width), (3 * far, far // 2, width, 1), far + place) for place in (0, 512)
    )
    products.linear_rotated(
        x, Operands(matrices, [], []), (Norm(), Norm()), turn, zeros, torch.tensor([[2]]), keys, values
    )
    for cache, matrix in zip((keys, values), matrices[1:], strict=True):
        torch.testing.assert_close(cache[0, :, 2].flatten(), F.linear(x, matrix).flatten(), rtol=1e-2, atol=1e-2)


def test_of_no_rows_nothing_is_computed() -> None:
    x, matrices = random(0, 3, 96), [random(size, 96, seed=size) for size in (128, 64, 64)]
    cos, keys = random(1, 3, 32), random(0, 2, 160, 32)
    given = (
        x,
        Operands(matrices, [], []),
        (Norm(), Norm()),
        cos,
        cos,
        torch.zeros(0, 3, dtype=torch.int64),
        keys,
        keys.clone(),
    )
    rotated = products.linear_rotated(*given)
    assert rotated is not None and rotated[0].shape == (0, 3, 4, 32)
    traced = torch.compile(products.linear_rotated, backend="eager", fullgraph=True)(*given)
    assert traced is not None and traced[1].shape == (0, 2, 3, 32)  # type: ignore[union-attr]
    gated = products.gated_linear(x, Operands(matrices[1:], [], []), 0)
    assert gated is not None and gated.shape == (0, 3, 64)
    sums = products.linear_to_residual(
        x, Operands(matrices[1:2], [], []), random(0, 3, 64), Norm(), Norm(random(64), *FORMULAS["llama"])
    )
    assert sums is not None and [len(each) for each in sums] == [0, 0]
