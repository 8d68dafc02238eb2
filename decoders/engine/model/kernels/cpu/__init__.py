"""CPU kernels in C++: products without copies of matrices, attention over the slot cache, norms, activations, rotary positions.

Each kind of processor has a variant of the kernels: a shared object. A wheel may contain the variants. Otherwise the first process on
a machine compiles a variant into the cache folder in 10 to 20 seconds. If there is no compiler either, torch's operators are used.
"""

from __future__ import annotations

import functools
import itertools
import os
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
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
        # Compiled code never rounds to 4 bits, so this operator needs no fake implementation.
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
class ChosenKernels:
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


def chosen() -> ChosenKernels:
    """Returns the kernels of this process; the first call may compile them.

    Raises:
        SettingsError: the environment variable does not name a variant of this machine.
    """
    with _lock:  # without the lock, two threads could compile the same variant
        return _chosen()


@functools.cache
def _chosen() -> ChosenKernels:
    known = list(build.variants())
    asked = os.environ.get(VARIABLE, "")
    if asked and asked not in (*known, "off"):
        near = get_close_matches(asked, [*known, "off"], 1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise SettingsError(f"{VARIABLE}={asked!r}: on this machine it can be {', '.join([*known, 'off'])}.{hint}")
    refused: dict[str, str] = {}
    if asked == "off" or not known:
        return ChosenKernels(None, {"off": VARIABLE} if known else {sys.platform: "kernels are for Linux and macOS"})
    for variant in [asked] if asked else known:
        if not has_instructions(variant):
            if asked:
                refused[variant] = "the processor does not have its instructions"
            continue
        try:
            kernels = loaded(variant)
        except OSError as error:
            return ChosenKernels(None, {variant: str(error)})  # other variants would fail with the same error
        if (wrong := check(kernels)) is None:
            return ChosenKernels(kernels, refused)
        refused[variant] = wrong
        warnings.warn(f"the CPU kernels for {variant} do not work here and are not used: {wrong}", stacklevel=4)
    return ChosenKernels(None, refused)


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
    """Compares the kernels' results with float64 for several sizes. Describes the first wrong result; None if all are right."""
    found = (part(kernels, dtype) for dtype in TYPES for part in (_check_products, _check_elementwise))
    return next(filter(None, found), None) or _check_attention(kernels) or _check_quantized(kernels)


def _drawn(*sizes: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*size, generator=generator, device="cpu").to(dtype) for size in sizes]


def _is_close(result: Tensor, exact: Tensor) -> bool:
    tolerance = max(torch.finfo(result.dtype).eps, 1e-5) * exact.abs().max()
    return bool((result.double() - exact).abs().max() <= tolerance)  # False for a NaN


def _check_products(kernels: Kernels, dtype: torch.dtype) -> str | None:
    name = str(dtype).removeprefix("torch.")
    for inputs, outputs in ((80, 27), (37, 9)):
        x, matrix, bias = _drawn((11, inputs), (outputs, inputs), (outputs,), dtype=dtype)
        exact = x.double() @ matrix.double().T + bias.double()
        for stored in (matrix, matrix.t().contiguous().t()):
            whole = kernels.few_rows_linear(x, [stored], [bias])
            if not _is_close(whole, exact):
                return f"a wrong product of {name}"
            for rows in range(1, len(x)):
                if not torch.equal(kernels.few_rows_linear(x[:rows], [stored], [bias]), whole[:rows]):
                    return f"a wrong product of {name}: {rows} rows have other bits than among {len(x)}"
            # Numbers stored in 16 bits must give the same sums as the same numbers stored in float32.
            wide, others = x.float(), [bias.float()]
            narrow = (kernels.few_rows_linear(wide, [each], others) for each in (stored, stored.float()))
            if not torch.equal(*narrow):
                return f"a wrong product of float32 and {name}"
    return None


def _check_elementwise(kernels: Kernels, dtype: torch.dtype) -> str | None:
    name = str(dtype).removeprefix("torch.")
    x, weight, heads, angles = _drawn((5, 54), (54,), (2, 3, 4, 10), (2, 4, 10), dtype=dtype)
    wide = x.double()
    norm = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5) * weight.double()
    if not _is_close(kernels.rms_norm(x, weight, 1e-5, False, False), norm):
        return f"a wrong norm of {name}"
    # Products by 1 are exact, so this checks only the epilogues.
    ones = torch.eye(54, dtype=dtype, device="cpu")
    gate, up = wide.chunk(2, -1)
    for kind, activated in enumerate((F.silu(gate), F.gelu(gate, approximate="tanh"))):
        if not _is_close(kernels.gated_linear(x, [ones[:27], ones[27:]], [], [], 1, kind), activated * up):
            return f"a wrong activation of {name}"
    formula = weight, 1e-5, False, False
    total, normed = kernels.linear_to_residual(x, [ones], [], [], 1, x, *formula, *formula)
    if not torch.equal(total, x + kernels.rms_norm(x, *formula)):
        return f"a wrong sum of {name}"
    if not torch.equal(normed, kernels.rms_norm(total, *formula)):
        return f"a wrong norm of a sum of {name}"
    cos, sin = angles.cos(), angles.sin()
    first, second = heads.double().chunk(2, -1)
    turned = heads.double() * cos.double()[:, None] + torch.cat([-second, first], -1) * sin.double()[:, None]
    # There is one head each of queries, keys and values.
    row, each = heads.transpose(1, 2).flatten(2), torch.eye(30, dtype=dtype, device="cpu").split(10)
    given: tuple[Any, ...] = row, list(each), [], [], 1, None, None, 0.0, False, False, cos, sin
    keys, values = torch.zeros(2, 2, 1, 4, 10, dtype=dtype, device="cpu")
    slots = torch.tensor([[2, 0, 3, 1], [0, 1, -1, 2]], device="cpu")
    place = (slots % 4)[:, None, :, None].expand(2, 1, 4, 10)
    query, key, _ = kernels.linear_rotated(*given, 1, 10)
    if not _is_close(torch.cat([query.transpose(1, 2), key], 1), turned[:, :2]):
        return f"wrong rotary positions of {name}"
    kernels.write_to_cache(keys, values, slots, key, heads[:, 2:], None, None)
    if not (torch.equal(keys.gather(2, place), key) and torch.equal(values.gather(2, place), heads[:, 2:])):
        return f"a wrong write of {name} to the cache"
    states = heads[:, 1:2], heads[:, 2:]
    levels, scales = (
        torch.zeros(2, 2, 1, 4, size, dtype=of, device="cpu") for size, of in ((10, torch.int8), (1, dtype))
    )
    kernels.write_to_cache(*levels, slots, *states, *scales)
    for own, scale, state in zip(levels, scales, states, strict=True):
        error = (own * scale.double()).gather(2, place) - state
        if not (error.abs() <= 0.9 / 127 * state.abs().amax(-1, keepdim=True)).all():
            return f"a wrong write of {name} to an int8 cache"
    return None


def _check_attention(kernels: Kernels) -> str | None:
    """Checks a tree after 70 committed tokens, with branches in slots ``70 71 72`` and ``70 73 74 75``; six query and two key heads."""
    generator = torch.Generator().manual_seed(0)
    committed, parents, window, softcap = 70, (-1, 0, 1, 0, 3, 4), 40, 3.0
    paths: list[list[int]] = []
    for node, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else []), node])
    rows = [[sum(1 << node for node in path), len(path) - 1, committed] for path in paths]
    mask = torch.tensor(rows, device="cpu")[None, None]
    chain = torch.tensor([[(2 << node) - 1, node, committed] for node in range(4)], device="cpu")[None, None]
    slots = [*range(committed), *(committed + node for node in paths[-1])]
    for dtype, int8 in itertools.product(TYPES, (False, True)):
        width, name = 48 if int8 else 36, f"{str(dtype).removeprefix('torch.')}{' over an int8 cache' if int8 else ''}"
        query, key, value = (
            torch.randn(1, *size, generator=generator, device="cpu").to(dtype)
            for size in ((6, len(parents), width), (2, 90, width), (2, 90, 20))
        )
        scales, wide = [], [key.double(), value.double()]
        if int8:
            scales = [tensor.abs().amax(-1, keepdim=True) / 127 for tensor in (key, value)]
            key, value = (
                (t / s).round().clamp(-127, 127).to(torch.int8) for t, s in zip((key, value), scales, strict=True)
            )
            wide = [key.double() * scales[0], value.double() * scales[1]]
        wide = [tensor.repeat_interleave(3, 1) for tensor in wide]
        for reach, cap in ((0, 0.0), (window, softcap)):
            options = reach, 0, 0.3, cap
            ours = kernels.slot_attention(query, key, value, mask, None, *(scales or (None, None)), *options)
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
            one = query[:, :, paths[-1]], key[:, :, slots], value[:, :, slots], chain, None
            own = [scale[:, :, slots] for scale in scales] or (None, None)
            if not torch.equal(kernels.slot_attention(*one, *own, *options), ours[:, paths[-1]]):
                return f"a wrong attention in {name}: a branch has other bits than a chain"
    return None


def _check_quantized(kernels: Kernels) -> str | None:
    """Checks products with matrices of 8 and of 4 bits."""
    generator = torch.Generator().manual_seed(0)
    for bits, outputs, inputs, groups in ((8, 27, 77, 1), (8, 27, 192, 2), (4, 48, 416, 13), (4, 48, 512, 4)):
        x = torch.randn(11, inputs, generator=generator, device="cpu")
        values = torch.randint(-8, 8, (outputs, inputs), generator=generator, device="cpu")
        steps, middles = torch.rand(2, outputs, groups, generator=generator, device="cpu").double()
        whole = values.double().view(outputs, groups, -1) * steps[..., None]
        if bits == 8:
            levels, scales = values.to(torch.int8), steps.float()
        else:
            whole += middles[..., None]
            levels, scales = four_bits.packed((values + 8).to(torch.uint8)), four_bits.with_offsets(steps, middles)
        exact = x.double() @ whole.view(outputs, inputs).T
        for digits, tolerance in ((1, 1e-3), (2, 1e-5)):
            product = kernels.quantized_linear(x, [levels], [scales], [], digits)
            if not (product.double() - exact).abs().max() <= tolerance * exact.abs().max():
                return f"a wrong product of {bits} bits"
            if not torch.equal(kernels.quantized_linear(x[5:6], [levels], [scales], [], digits), product[5:6]):
                return f"a wrong product of {bits} bits: one row has other bits than among {len(x)}"
    return None


def takes(matrix: Tensor) -> bool:
    """Whether the kernels can multiply by a matrix ``[out, in]``: it must be stored by rows or by columns in one of the `TYPES`."""
    return matrix.dtype in TYPES and matrix.dim() == 2 and 1 in matrix.stride()
