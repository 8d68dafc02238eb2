"""Kernels for CPUs in C++: products of few rows that read matrices where they are.

A variant per kind of processor is a shared object of its own. It is taken from the package where a wheel brought it, else from the
folder of kept results, where the first process on a machine puts it (some seconds). Without a compiler there are none, and torch
multiplies.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
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
from . import build

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
        slot_attention: see :mod:`~decoders.engine.model.kernels.attention`.
    """

    variant: str
    path: Path
    few_rows_linear: Callable[..., Tensor]
    slot_attention: Callable[..., Tensor]

    @classmethod
    def load(cls, variant: str, path: Path) -> Kernels:
        """Raises OSError if the file cannot be loaded."""
        namespace = f"decoders_{variant}"
        torch.ops.load_library(str(path))
        operators: Any = getattr(torch.ops, namespace)
        torch.library.register_fake(f"{namespace}::few_rows_linear", _product_fake)
        torch.library.register_fake(f"{namespace}::slot_attention", _attention_fake)
        return cls(variant, path, operators.few_rows_linear.default, operators.slot_attention.default)


def _product_fake(x: Tensor, matrices: list[Tensor], biases: list[Tensor]) -> Tensor:
    return x.new_empty((*x.shape[:-1], sum(matrix.shape[0] for matrix in matrices)))


def _attention_fake(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
    rows, heads, queries, _width = query.shape
    return query.new_empty(rows, queries, heads, value.shape[3])


@dataclass(frozen=True)
class Choice:
    """What was chosen for this process, and why.

    Attributes:
        kernels: None where torch multiplies.
        refused: per variant that was tried and not taken, the reason; or why none was tried.
    """

    kernels: Kernels | None
    refused: dict[str, str]

    def __str__(self) -> str:
        said = "none: torch multiplies" if self.kernels is None else f"{self.kernels.variant} ({self.kernels.path})"
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
    if asked == "off" or not known:
        return Choice(None, {"off": VARIABLE} if known else {sys.platform: "there are kernels for Linux and macOS"})
    for variant in [asked] if asked else known:
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
    seconds = time.perf_counter() - started
    _log.info("compiled the CPU kernels for %s in %.1f s, once on this machine: %s", variant, seconds, path)
    return Kernels.load(variant, path)


def check(kernels: Kernels) -> str | None:
    """Compares products and attention with those in float64 for several sizes; what is wrong, None if nothing is."""
    return _check_products(kernels) or _check_attention(kernels)


def _check_products(kernels: Kernels) -> str | None:
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
    return None


def _check_attention(kernels: Kernels) -> str | None:
    """Two branches behind 70 tokens, ``70 71 72`` and ``70 73 74 75``, for two heads of the keys and six of the queries."""
    generator = torch.Generator().manual_seed(0)
    committed, parents, window, softcap = 70, (-1, 0, 1, 0, 3, 4), 40, 3.0
    paths: list[list[int]] = []
    for node, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else []), node])
    rows = [[sum(1 << node for node in path), len(path) - 1, committed] for path in paths]
    mask = torch.tensor(rows, device="cpu")[None, None]
    chain = torch.tensor([[(2 << node) - 1, node, committed] for node in range(4)], device="cpu")[None, None]
    slots = [*range(committed), *(committed + node for node in paths[-1])]
    for dtype in TYPES:
        query, key, value = (
            torch.randn(1, *size, generator=generator, device="cpu").to(dtype)
            for size in ((6, len(parents), 36), (2, 90, 36), (2, 90, 20))
        )
        wide = [tensor.double().repeat_interleave(3, 1) for tensor in (key, value)]
        for reach, cap in ((0, 0.0), (window, softcap)):
            options = None, None, None, reach, 0, 0.3, cap
            ours, name = kernels.slot_attention(query, key, value, mask, *options), str(dtype).removeprefix("torch.")
            for node, path in enumerate(paths):
                seen = [*range(committed), *(committed + other for other in path)][-reach:]
                scores = (query[:, :, node, None].double() * wide[0][:, :, seen]).sum(-1) * 0.3
                weights = (cap * torch.tanh(scores / cap) if cap else scores).softmax(-1)
                exact = (weights[..., None] * wide[1][:, :, seen]).sum(2)
                if (
                    not (ours[:, node].double() - exact).abs().max()
                    <= max(torch.finfo(dtype).eps, 1e-5) * exact.abs().max()
                ):
                    return f"a wrong attention in {name}"
            one = query[:, :, paths[-1]], key[:, :, slots], value[:, :, slots]
            if not torch.equal(kernels.slot_attention(*one, chain, *options), ours[:, paths[-1]]):
                return f"a wrong attention in {name}: a branch has other bits than a chain"
    return None


def takes(matrix: Tensor) -> bool:
    """Whether the kernels multiply by a matrix ``[out, in]``, stored by rows or by columns."""
    return matrix.dtype in TYPES and matrix.dim() == 2 and 1 in matrix.stride()
