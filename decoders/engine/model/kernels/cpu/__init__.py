"""Kernels for CPUs in C++: products of few rows that read matrices where they are.

A variant per kind of processor is a shared object of its own. It is taken from the package where a wheel brought it, else from the
folder of kept results, where the first process on a machine puts it (some seconds). Without a compiler there are none, and torch
multiplies.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .....common.files import cache_folder
from .....errors import SettingsError
from ...torch_compat import has_instructions
from . import build, four_bits

#: Names a variant, or "off", instead of the best one that the processor has.
VARIABLE = "DECODERS_CPU_KERNELS"
#: Types of matrices.
TYPES = (torch.float32, torch.bfloat16, torch.float16)

_log = logging.getLogger("decoders")


@dataclass(frozen=True)
class Kernels:
    """The operators of one variant.

    Attributes:
        variant: its name.
        path: of the shared object.
        few_rows_linear: see :mod:`~decoders.engine.model.kernels.products`.
        quantized_linear: products by matrices of 8 or 4 bits, see :mod:`~decoders.engine.model.weights.quantized`.
        round_to_four_bits: the levels of a matrix, and its scales.
    """

    variant: str
    path: Path
    few_rows_linear: Callable[..., Tensor]
    quantized_linear: Callable[..., Tensor]
    round_to_four_bits: Callable[..., tuple[Tensor, Tensor]]

    @classmethod
    def load(cls, variant: str, path: Path) -> Kernels:
        """Raises OSError if the file cannot be loaded."""
        namespace = f"decoders_{variant}"
        torch.ops.load_library(str(path))
        operators: Any = getattr(torch.ops, namespace)
        torch.library.register_fake(f"{namespace}::few_rows_linear", _product_fake)
        torch.library.register_fake(f"{namespace}::quantized_linear", _quantized_fake)
        names = "few_rows_linear", "quantized_linear", "round_to_four_bits"
        return cls(variant, path, *(getattr(operators, name).default for name in names))


def _product_fake(x: Tensor, matrices: list[Tensor], biases: list[Tensor]) -> Tensor:
    return x.new_empty((*x.shape[:-1], sum(matrix.shape[0] for matrix in matrices)))


def _quantized_fake(x: Tensor, levels: list[Tensor], scales: list[Tensor], biases: list[Tensor], digits: int) -> Tensor:
    return _product_fake(x, levels, biases)


@dataclass(frozen=True)
class Choice:
    """What was chosen for this process, and why.

    Attributes:
        kernels: None where torch multiplies.
        refused: per variant that was tried and not taken, the reason.
    """

    kernels: Kernels | None
    refused: dict[str, str]

    def __str__(self) -> str:
        said = "torch's products" if self.kernels is None else f"{self.kernels.variant} ({self.kernels.path})"
        return "; ".join([said, *(f"{variant}: {reason}" for variant, reason in self.refused.items())])


_lock = threading.RLock()


def chosen() -> Choice:
    """The kernels of this process; the first call may compile them.

    Raises:
        SettingsError: the environment variable names none of this machine's variants.
    """
    with _lock:  # two threads would compile
        return _chosen()


@functools.cache
def _chosen() -> Choice:
    known = list(build.variants())
    asked = os.environ.get(VARIABLE, "")
    if asked and asked not in (*known, "off"):
        near = get_close_matches(asked, [*known, "off"], 1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise SettingsError(f"{VARIABLE}={asked!r}: this machine knows {', '.join([*known, 'off'])}.{hint}")
    refused: dict[str, str] = {}
    for variant in [] if asked == "off" else [asked] if asked else known:
        if not has_instructions(variant):
            if asked:
                refused[variant] = "the processor does not have its instructions"
            continue
        try:
            kernels = loaded(variant)
        except OSError as error:
            return Choice(None, {variant: str(error)})  # what hinders one hinders all
        if (wrong := check(kernels)) is None:
            return Choice(kernels, refused)
        refused[variant] = wrong
        warnings.warn(f"the CPU kernels for {variant} do not work here and are not used: {wrong}", stacklevel=4)
    return Choice(None, refused)


@functools.cache
def loaded(variant: str) -> Kernels:
    """A variant, which is not checked. It may have to be compiled first.

    Raises:
        OSError: it is not there, and cannot be compiled.
    """
    name = build.file_name(variant)
    kept = cache_folder() / "kernels"
    for folder in (build.FOLDER, kept):
        if (folder / name).exists():
            return Kernels.load(variant, folder / name)
    started = time.perf_counter()
    path = build.compile_into(kept, variant)
    _log.info(
        "compiled the CPU kernels for %s in %.1f s, once on this machine: %s",
        variant,
        time.perf_counter() - started,
        path,
    )
    return Kernels.load(variant, path)


def check(kernels: Kernels) -> str | None:
    """Compares products with those in float64 for several sizes; what is wrong, None if nothing is."""
    generator = torch.Generator().manual_seed(0)
    for dtype in TYPES:
        for inputs, outputs in ((80, 27), (37, 9)):
            sizes = (11, inputs), (outputs, inputs), (outputs,)
            x, matrix, bias = (torch.randn(*size, generator=generator, device="cpu").to(dtype) for size in sizes)
            exact = x.double() @ matrix.double().T + bias.double()
            tolerance = max(torch.finfo(dtype).eps, 1e-5) * exact.abs().max()
            for stored in (matrix, matrix.t().contiguous().t()):
                whole, name = kernels.few_rows_linear(x, [stored], [bias]), str(dtype).removeprefix("torch.")
                if not (whole.double() - exact).abs().max() <= tolerance:  # a NaN is wrong, too
                    return f"a wrong product of {name}"
                for rows in range(1, len(x)):
                    if not torch.equal(kernels.few_rows_linear(x[:rows], [stored], [bias]), whole[:rows]):
                        return f"a wrong product of {name}: {rows} rows have other bits than among {len(x)}"
    return _check_quantized(kernels)


def _check_quantized(kernels: Kernels) -> str | None:
    """Likewise of products by 8 and 4 bits."""
    generator = torch.Generator().manual_seed(0)
    for bits, inputs, groups in ((8, 77, 1), (8, 192, 2), (4, 416, 13), (4, 512, 4)):
        x, outputs = torch.randn(11, inputs, generator=generator, device="cpu"), 27
        values = torch.randint(-8, 8, (outputs, inputs), generator=generator, device="cpu")
        steps, middles = torch.rand(2, outputs, groups, generator=generator, device="cpu").double()
        whole = values.double().view(outputs, groups, -1) * steps[..., None]
        if bits == 8:
            levels, scales = values.to(torch.int8), steps.float()
        else:
            whole += middles[..., None]
            levels, scales = four_bits.packed((values + 8).to(torch.uint8)), four_bits.with_room(steps, middles)
        exact = x.double() @ whole.view(outputs, inputs).T
        for digits, tolerance in ((1, 1e-3), (2, 1e-5)):
            product = kernels.quantized_linear(x, [levels], [scales], [], digits)
            if not (product.double() - exact).abs().max() <= tolerance * exact.abs().max():
                return f"a wrong product of {bits} bits"
            if not torch.equal(kernels.quantized_linear(x[5:6], [levels], [scales], [], digits), product[5:6]):
                return f"a wrong product of {bits} bits: one row has other bits than among {len(x)}"
    return None


def takes(matrix: Tensor) -> bool:
    """Whether the kernels multiply by a matrix ``[out, in]``, stored by rows or by columns."""
    return matrix.dtype in TYPES and matrix.dim() == 2 and 1 in matrix.stride()
