"""CPU kernels in C++: products without copies of matrices, attention over the slot cache, norms, activations, rotary positions.

Each kind of processor has a variant of the kernels, which is a shared object. A wheel may contain it. Otherwise, the first process on a
machine compiles it into the cache folder in 10 to 20 seconds. If there is no compiler either, torch's operators are used.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .....common.announce import announced
from .....common.files import cache_folder
from .....errors import SettingsError
from ...torch_compat import has_instructions
from . import build, four_bits

#: Environment variable that names a variant, or "off". By default the best variant for the processor is used.
VARIABLE = "DECODERS_CPU_KERNELS"
#: Dtypes of the matrices that the kernels support.
TYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Kernels:
    """The operators of a variant.

    Attributes:
        variant: name of the variant.
        path: the shared object.
        few_rows_linear, rms_norm, gated_linear, linear_to_residual, linear_rotated: see
            :mod:`~decoders.engine.model.kernels.products`.
        decoder_layers: computes whole decoder layers and writes to the cache; only uncompiled code calls it.
        write_to_cache: writes keys and values to their slots.
        slot_attention: see :mod:`~decoders.engine.model.kernels.attention`.
        quantized_linear: products by matrices of 8 or 4 bits, see :mod:`~decoders.engine.model.weights.quantized`.
        round_to_four_bits: returns the levels and scales of a matrix, rounded to 4 bits.
    """

    variant: str
    path: Path
    few_rows_linear: Callable[..., Tensor]
    rms_norm: Callable[..., Tensor]
    gated_linear: Callable[..., Tensor]
    linear_to_residual: Callable[..., tuple[Tensor, Tensor]]
    linear_rotated: Callable[..., tuple[Tensor, Tensor, Tensor]]
    decoder_layers: Callable[..., tuple[list[Tensor], Tensor]]
    write_to_cache: Callable[..., None]
    slot_attention: Callable[..., Tensor]
    quantized_linear: Callable[..., Tensor]
    round_to_four_bits: Callable[..., tuple[Tensor, Tensor]]

    @classmethod
    def load(cls, variant: str, path: Path) -> Kernels:
        """Loads the shared object. Raises OSError if that fails."""
        namespace = f"decoders_{variant}"
        torch.ops.load_library(str(path))
        operators: Any = getattr(torch.ops, namespace)
        for name, fake in _FAKES.items():
            torch.library.register_fake(f"{namespace}::{name}", fake)
        # Rounding to 4 bits is never in a graph, so it needs no fake.
        return cls(variant, path, *(getattr(operators, name).default for name in (*_FAKES, "round_to_four_bits")))


def _product(x: Tensor, matrices: Sequence[Tensor]) -> Tensor:
    return x.new_empty((*x.shape[:-1], sum(len(matrix) for matrix in matrices)))


#: Maps each operator, in the order of :class:`Kernels`, to its fake for tracing, which returns empty tensors of the result's sizes.
_FAKES: dict[str, Callable[..., Any]] = {
    "few_rows_linear": lambda x, matrices, *_: _product(x, matrices),
    "rms_norm": lambda x, *_: x.new_empty(x.shape),
    "gated_linear": lambda x, matrices, *_: _product(x, matrices[:1]),
    "linear_to_residual": lambda _x, _m, _s, _b, _d, residual, *norms: (
        residual.new_empty(residual.shape),
        residual.new_empty((0,) if norms[4] is None else residual.shape),
    ),
    "linear_rotated": lambda x, matrices, *more: (
        x.new_empty((*x.shape[:2], len(matrices[0]) // more[-1], more[-1])),
        x.new_empty((x.shape[0], more[-2], x.shape[1], more[-1])),
        _product(x, matrices),
    ),
    "decoder_layers": lambda x, reads, *more: (
        [x.new_empty(x.shape) for _ in more[13]],  # the keys, one tensor per layer
        reads.new_empty(reads.shape),
    ),
    "write_to_cache": lambda *_: None,
    "slot_attention": lambda query, _, value, *more: query.new_empty(
        *[query.shape[i] for i in (0, 2, 1)], value.shape[3]
    ),
    "quantized_linear": lambda x, levels, *_: _product(x, levels),
}


@dataclass(frozen=True)
class Choice:
    """The kernels of this process.

    Attributes:
        kernels: the kernels in use; None if torch's operators are used.
        refused: why variants were rejected, by variant; or why no variant was tried.
    """

    kernels: Kernels | None
    refused: dict[str, str]

    def __str__(self) -> str:
        said = "none: torch multiplies" if self.kernels is None else f"{self.kernels.variant} ({self.kernels.path})"
        return "; ".join([said, *(f"{variant}: {reason}" for variant, reason in self.refused.items())])


_lock = threading.RLock()


def chosen() -> Choice:
    """Returns the kernels of this process; the first call may compile them.

    Raises:
        SettingsError: the environment variable does not name a variant of this machine.
    """
    with _lock:  # without the lock, two threads could compile the same variant
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
            return Choice(None, {variant: str(error)})  # other variants would fail with the same error
        if (wrong := check(kernels)) is None:
            return Choice(kernels, refused)
        refused[variant] = wrong
        warnings.warn(f"the CPU kernels for {variant} do not work here and are not used: {wrong}", stacklevel=4)
    return Choice(None, refused)


@functools.cache
def loaded(variant: str) -> Kernels:
    """Loads and returns a variant without checking it; compiles it first if necessary. Raises OSError if that fails."""
    name, kept = build.file_name(variant), cache_folder() / "kernels"
    path = kept / name
    if (build.FOLDER / name).exists():
        path = build.FOLDER / name
    elif not path.exists():
        # Another process may be compiling it.
        with announced(f"compiling the CPU kernels for {variant}, once on this machine"), build.alone(path):
            if not path.exists():
                build.compile_into(kept, variant)
    return Kernels.load(variant, path)


def check(kernels: Kernels) -> str | None:
    """Compares the operators with torch in float64, at one size each. Describes the first wrong result; None if all are right.

    This finds mistakes of a compiler or a processor. The tests compare the operators at many sizes.
    """
    for dtype in TYPES:
        for part in (_products, _attention, _quantized):
            for what, result, expected in part(kernels, dtype):
                if not _agree(result, expected):
                    return f"a wrong {what} of {str(dtype).removeprefix('torch.')}"
    return None


def _agree(result: Tensor, expected: Tensor) -> bool:
    """Whether `result` equals `expected`: bit for bit if they have the same dtype, else up to rounding."""
    if result.dtype == expected.dtype:
        return torch.equal(result, expected)
    tolerance = max(torch.finfo(result.dtype).eps, 1e-5) * expected.abs().max()
    return bool((result.double() - expected).abs().max() <= tolerance)  # False for a NaN


def _drawn(dtype: torch.dtype, *sizes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*size, generator=generator, device="cpu").to(dtype) for size in sizes]


def _products(kernels: Kernels, dtype: torch.dtype) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yields what was computed, the result of `kernels`, and the expected result."""
    x, gate, up, bias, weight = _drawn(dtype, (11, 54), (27, 54), (27, 54), (27,), (54,))
    wide = x.double()
    gated, factor = wide @ gate.double().T, wide @ up.double().T
    for stored in (gate, gate.t().contiguous().t()):
        product = kernels.few_rows_linear(x, [stored], [bias])
        yield "product", product, gated + bias.double()
        yield "product of three rows", kernels.few_rows_linear(x[5:8], [stored], [bias]), product[5:8]
    yield "activation", kernels.gated_linear(x, [gate, up], [], [], 1, 0), F.silu(gated) * factor
    formula = weight, 1e-5, False, False
    norm = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5) * weight.double()
    yield "norm", kernels.rms_norm(x, *formula), norm
    one = torch.eye(54, dtype=dtype, device="cpu")  # products by it are exact
    total, normed = kernels.linear_to_residual(x, [one], [], [], 1, x, *formula, *formula)
    yield "sum", total, x + kernels.rms_norm(x, *formula)
    yield "norm of a sum", normed, kernels.rms_norm(total, *formula)


def _attention(kernels: Kernels, dtype: torch.dtype) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Like :func:`_products`, for rotary positions, writes to a cache, and attention of two heads of queries to one of keys."""
    x, angles = _drawn(dtype, (1, 11, 64), (1, 11, 16))
    cos, sin, one = angles.cos(), angles.sin(), torch.eye(64, dtype=dtype, device="cpu")
    heads = x.unflatten(-1, (4, 16)).transpose(1, 2)
    given: tuple[Any, ...] = x, list(one.split((32, 16, 16))), [], [], 1, None, None, 0.0, False, False, cos, sin
    turned, key, _ = kernels.linear_rotated(*given, 1, 16)
    query, value = turned.transpose(1, 2), heads[:, 3:]
    wide = heads[:, :3].double()
    across = torch.cat([-wide[..., 8:], wide[..., :8]], -1)
    yield "rotary position", torch.cat([query, key], 1), wide * cos.double() + across * sin.double()
    slots = torch.arange(11, device="cpu")
    mask = torch.stack([slots, torch.zeros_like(slots)], -1)[None, None]  # of a text
    for stored in (dtype, torch.int8):
        caches, expected = torch.zeros(2, 1, 1, 11, 16, dtype=stored, device="cpu"), torch.stack([key, value])
        scales: Any = torch.zeros(2, 1, 1, 11, 1, dtype=dtype, device="cpu") if stored == torch.int8 else (None, None)
        kernels.write_to_cache(*caches, slots[None], key, value, *scales)
        kept = caches.double()
        if stored == torch.int8:
            expected, kept = (expected.float() / scales.float()).round().to(stored), kept * scales.double()
        yield "write to a cache", caches, expected
        attended = kernels.slot_attention(query, *caches, mask, None, *scales, 0, 0, 0.25, 0.0)
        exact = F.scaled_dot_product_attention(
            query.double(), kept[0], kept[1], is_causal=True, scale=0.25, enable_gqa=True
        )
        yield "attention", attended, exact.transpose(1, 2)


def _quantized(kernels: Kernels, dtype: torch.dtype) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Like :func:`_products`, for matrices of 8 and of 4 bits."""
    generator = torch.Generator().manual_seed(0)
    for bits, groups in ((8, 1), (8, 2), (4, 6)):
        values = torch.randint(-8, 8, (48, 192), generator=generator, device="cpu")
        steps, middles = torch.rand(2, 48, groups, generator=generator, device="cpu").double()
        whole = values.double().unflatten(1, (groups, -1)) * steps[..., None]
        levels, scales = values.to(torch.int8), steps.float()
        if bits == 4:
            whole += middles[..., None]
            levels, scales = four_bits.packed((values + 8).to(torch.uint8)), four_bits.with_offsets(steps, middles)
        (x,) = _drawn(dtype, (11, 192))
        product = kernels.quantized_linear(x, [levels], [scales], [], 2)
        yield f"product of {bits} bits", product, x.double() @ whole.flatten(1).T
        one = kernels.quantized_linear(x[5:6], [levels], [scales], [], 2)
        yield f"product of {bits} bits and one row", one, product[5:6]


def takes(matrix: Tensor) -> bool:
    """Whether the kernels can multiply by a matrix ``[out, in]``: it must be stored by rows or by columns in one of the `TYPES`."""
    return matrix.dtype in TYPES and matrix.dim() == 2 and 1 in matrix.stride()
