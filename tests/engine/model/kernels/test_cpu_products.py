"""Products of few rows on a CPU: right, with the same bits for a row among any others, by every variant; and which one is chosen."""

from __future__ import annotations

import functools
import random
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from decoders.engine.model.kernels import cpu, products
from decoders.engine.model.kernels.cpu import build
from decoders.engine.model.weights.few_rows import KINDS, multiply_few_rows
from decoders.errors import SettingsError

from .variants import IN_TURN, VARIANTS

#: Types, and how far a result is rounded.
DTYPES = {torch.float32: 2**-23, torch.bfloat16: 2**-8, torch.float16: 2**-11}

needs_kernels = pytest.mark.skipif(cpu.chosen().kernels is None, reason="there are no kernels for this CPU")


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    with torch.no_grad():
        yield
    torch.set_num_threads(before)


def stored(matrix: Tensor, by_rows: bool, gap: int) -> Tensor:
    """The same matrix by rows or by columns, so many numbers apart from each other."""
    lines = matrix if by_rows else matrix.t()
    lines = F.pad(lines, (0, gap)).contiguous()[:, : lines.shape[1]]
    return lines if by_rows else lines.t()


def case(number: int, dtype: torch.dtype, by_rows: bool) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Rows, matrices and biases: odd sizes, tails, gaps."""
    draw, generator = random.Random(number), torch.Generator().manual_seed(number)
    rows, inputs, gap = draw.randint(1, 70), draw.randint(1, 130), draw.choice([0, 0, 1, 8, 13])
    sizes = [draw.randint(1, 70) for _ in range(draw.randint(1, 3))]
    if not by_rows:
        sizes = sizes[:1] * len(sizes)  # of the same strides
    x, *all_matrices = (torch.randn(count, inputs, generator=generator).to(dtype) for count in (rows, *sizes))
    matrices = [stored(matrix, by_rows, gap) for matrix in all_matrices]
    biases = [torch.randn(size, generator=generator).to(dtype) for size in sizes] if draw.random() < 0.5 else []
    return x, matrices, biases


@needs_kernels
@pytest.mark.parametrize("by_rows", [True, False], ids=["by rows", "by columns"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("variant", IN_TURN)
def test_products_are_those_of_float64_and_a_row_has_the_same_bits_among_any_others(
    variant: str, dtype: torch.dtype, by_rows: bool
) -> None:
    multiply = cpu.loaded(variant).few_rows_linear
    for number in range(40):
        x, matrices, biases = case(number, dtype, by_rows)
        torch.set_num_threads(1)
        whole, joint = multiply(x, matrices, biases), torch.cat(matrices).double()
        exact = F.linear(x.double(), joint, torch.cat(biases).double() if biases else None)
        most = F.linear(x.double().abs(), joint.abs()) + 1
        assert whole.dtype == dtype and whole.shape == exact.shape
        assert ((whole.double() - exact).abs() <= exact.abs() * DTYPES[dtype] + most * 2e-6).all(), number
        torch.set_num_threads((2, 3, 8)[number % 3])
        assert torch.equal(multiply(x, matrices, biases), whole), number
        begin, end = sorted(random.Random(number).sample(range(len(x) + 1), 2))
        assert torch.equal(multiply(x[begin:end], matrices, biases), whole[begin:end]), (number, begin, end)
        assert torch.equal(multiply(x[0], matrices, biases), whole[0])
        alone = [multiply(x, [m], biases[i : i + 1]) for i, m in enumerate(matrices)]
        assert torch.equal(torch.cat(alone, -1), whole), number


@needs_kernels
@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("variant", IN_TURN)
def test_matrices_in_16_bits_have_the_products_of_the_same_numbers_in_float32(
    variant: str, narrow: torch.dtype
) -> None:
    multiply = cpu.loaded(variant).few_rows_linear
    for number in range(40):
        x, matrices, biases = case(number, torch.float32, number % 2 == 0)
        x = torch.cat([x, x[:1].repeat(60 * (number % 3), 1)])  # torch multiplies many rows
        halves = [matrix.to(narrow) for matrix in matrices]
        assert torch.equal(multiply(x, halves, biases), multiply(x, [half.float() for half in halves], biases)), number
    with pytest.raises(RuntimeError, match="the type of x, or 16 bits"):
        multiply(torch.ones(2, 8, dtype=torch.bfloat16), [torch.ones(3, 8)], [])


@needs_kernels
@pytest.mark.parametrize("variant", IN_TURN)
def test_every_number_of_rows_has_the_same_bits(variant: str) -> None:
    multiply = cpu.loaded(variant).few_rows_linear
    for dtype in DTYPES:
        x, matrix = torch.randn(500, 131).to(dtype), torch.randn(45, 131).to(dtype)  # as many as blocks of a batch have
        whole = multiply(x, [matrix], [])
        for rows in (*range(71), 96, 250):
            assert torch.equal(multiply(x[:rows], [matrix], []), whole[:rows]), rows


@needs_kernels
def test_rows_may_have_any_shape_and_strides() -> None:
    matrix = torch.randn(40, 96)
    assert products.multiplies(matrix)
    x = torch.randn(3, 5, 2, 96)
    expected = products.product_or_none(x.reshape(-1, 96), [matrix], []).view(3, 5, 2, 40)
    assert torch.equal(products.product_or_none(x, [matrix], []), expected)
    assert torch.equal(products.product_or_none(x.transpose(0, 2), [matrix], []), expected.transpose(0, 2))
    assert products.product_or_none(x[:0], [matrix], []).shape == (0, 5, 2, 40)


@needs_kernels
def test_what_does_not_fit_is_an_error() -> None:
    multiply, x, matrix = cpu.chosen().kernels.few_rows_linear, torch.randn(2, 8), torch.randn(4, 8)
    gaps, across = torch.randn(4, 16)[:, ::2], torch.randn(8, 4).t()
    for wrong in ([], [matrix] * 4, [matrix[:, :7]], [matrix, matrix.half()], [gaps], [matrix, across]):
        with pytest.raises(RuntimeError, match="matri"):
            multiply(x, wrong, [])
    with pytest.raises(RuntimeError, match="bias"):
        multiply(x, [matrix], [torch.randn(5)])


# --- which kernels are chosen -----------------------------------------------------------------------------------------


@pytest.fixture
def choosing(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The next layer asks anew which kernels there are."""
    monkeypatch.setattr(cpu, "_chosen", functools.cache(cpu._chosen.__wrapped__))
    monkeypatch.setitem(products._operators, "cpu", products._operators["cpu"])
    return monkeypatch


def is_replaced() -> bool:
    layer = nn.Linear(8, 8)
    multiply_few_rows(layer)
    return type(layer) is KINDS[nn.Linear]


@needs_kernels
@pytest.mark.skipif(len(VARIANTS) < 2, reason="there is no other variant")
def test_a_wrong_kernel_falls_back_to_the_next_variant_and_one_warning_says_so(choosing: pytest.MonkeyPatch) -> None:
    best, second, *_ = VARIANTS
    right = cpu.loaded(best)
    other = replace(right, variant=second)  # itself compiled and right, which takes half a minute to see

    def wrong(x: Tensor, matrices: list[Tensor], biases: list[Tensor]) -> Tensor:
        out = right.few_rows_linear(x, matrices, biases)
        return out if len(x) != 3 else out * 1.00001

    planted = replace(right, few_rows_linear=wrong)
    choosing.delenv(cpu.VARIABLE, raising=False)
    choosing.setattr(cpu, "loaded", {best: planted, second: other}.__getitem__)
    with pytest.warns(UserWarning, match=f"kernels for {best} do not work here") as warned:
        assert is_replaced() and is_replaced()
    assert len(warned) == 1
    choice = cpu.chosen()
    assert choice.kernels is not None and choice.kernels.variant == second
    assert f"{best}: a wrong product of float32: 3 rows" in str(choice)


def test_an_unknown_variant_is_an_error_that_names_the_nearest(choosing: pytest.MonkeyPatch) -> None:
    choosing.setenv(cpu.VARIABLE, "portabel")
    with pytest.raises(SettingsError, match="portable, off. Did you mean 'portable'"):
        is_replaced()


@needs_kernels
def test_a_variant_is_forced_by_its_name(choosing: pytest.MonkeyPatch) -> None:
    best = cpu.loaded(VARIANTS[0])
    forced = replace(best, variant=VARIANTS[-1], few_rows_linear=lambda *given: best.few_rows_linear(*given))
    choosing.setattr(cpu, "loaded", {VARIANTS[-1]: forced}.__getitem__)
    choosing.setenv(cpu.VARIABLE, VARIANTS[-1])
    assert is_replaced() and products._operators["cpu"] is forced.few_rows_linear


def test_off_leaves_torchs_layers(choosing: pytest.MonkeyPatch) -> None:
    choosing.setenv(cpu.VARIABLE, "off")
    assert not is_replaced()
    assert "DECODERS_CPU_KERNELS" in str(cpu.chosen())


def test_without_a_compiler_torchs_layers_stay_and_the_reason_is_told(
    choosing: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    choosing.delenv(cpu.VARIABLE, raising=False)
    choosing.setenv("CXX", "/nonexistent")
    choosing.setenv("XDG_CACHE_HOME", str(tmp_path))
    choosing.setattr(cpu, "loaded", cpu.loaded.__wrapped__)
    choosing.setattr(build, "file_name", lambda variant: f"none-{variant}.so")  # a wheel brings its own
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not is_replaced()
    assert "no C++ compiler" in str(cpu.chosen()) and "torch multiplies" in str(cpu.chosen())


@pytest.fixture
def compiled(choosing: pytest.MonkeyPatch, tmp_path: Path) -> list[Path]:
    """What was compiled, each in a moment and to nothing; the kernels that are loaded are the name of their file."""
    done: list[Path] = []

    def compile_into(folder: Path, variant: str) -> Path:
        time.sleep(0.2)
        done.append(folder / build.file_name(variant))
        done[-1].touch()
        return done[-1]

    choosing.setenv("XDG_CACHE_HOME", str(tmp_path))
    choosing.setattr(build, "file_name", lambda variant: f"none-{variant}.so")  # a wheel brings its own
    choosing.setattr(build, "compile_into", compile_into)
    choosing.setattr(cpu.Kernels, "load", classmethod(lambda cls, variant, path: path.name))
    return done


def test_of_two_that_need_a_variant_one_compiles_and_the_other_waits(compiled: list[Path]) -> None:
    with ThreadPoolExecutor(2) as pool:  # a lock of the file keeps threads apart as it does processes
        loaded = list(pool.map(cpu.loaded.__wrapped__, ["portable"] * 2))
    assert loaded == ["none-portable.so"] * 2 and len(compiled) == 1


def test_who_waits_goes_on_when_the_process_that_compiles_dies(compiled: list[Path], tmp_path: Path) -> None:
    lock = tmp_path / "hf-decoders" / "kernels" / "none-portable.lock"
    lock.parent.mkdir(parents=True)
    hold = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); print(flush=True); input()"
    other = subprocess.Popen([sys.executable, "-c", hold, lock], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert other.stdout.readline()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(cpu.loaded.__wrapped__, "portable")
        with pytest.raises(TimeoutError):
            waiting.result(timeout=0.5)
        other.kill()
        assert waiting.result(timeout=30) == "none-portable.so" and len(compiled) == 1
    other.communicate()
