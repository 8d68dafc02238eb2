"""Products of few rows, ``x @ matrix.T + bias``, and root-mean-square norms, in which a row has the same bits for any number of rows.

Up to three matrices with the same input (queries, keys and values; gate and up) are one product, without copies. The interface is the
same on both devices: C++ kernels on the CPU (:mod:`.cpu`), Triton kernels on CUDA (:mod:`.products_triton`).

A product may have an epilogue: activations, residuals and norms, rotary positions. On CUDA, the kernel that adds up a product's partial
sums also computes the epilogue and writes to the cache (:mod:`.epilogues_triton`). This saves most of a step's launches. On the CPU,
one call computes the product and the epilogue. This saves most of a step's time outside the products.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import LARGEST_BLOCK, Norm, Operands, cpu, runs_kernels
from .products_cuda import few_rows_on_cuda, gated, rms_norm_on_cuda, rotated, to_cache, to_residual

#: Maps a type of device to its operator of products. :func:`take_cpu_kernels` sets the CPU's operator.
_operators: dict[str, Callable[..., Tensor]] = dict.fromkeys(("cuda", "cpu"), few_rows_on_cuda)
#: The CPU's operators by name. They are kept here, because compiled code must not call ``cpu.chosen``.
on_cpu: dict[str, Callable[..., Any]] = {}


def take_cpu_kernels() -> cpu.Kernels | None:
    """Makes our kernels compute the products on the CPU. Returns these kernels; None if this process has no CPU kernels."""
    kernels = cpu.chosen().kernels
    if kernels is not None:
        _operators["cpu"] = kernels.few_rows_linear
        on_cpu.update({name: value for name, value in vars(kernels).items() if callable(value)})
    return kernels


def operator_for(x: Tensor) -> Callable[..., Tensor]:
    """The operator of products on the device of `x`."""
    return _operators[x.device.type]


def product_or_none(
    x: Tensor, matrices: Sequence[Tensor], biases: Sequence[Tensor], exact: bool = False
) -> Tensor | None:
    """``x @ torch.cat(matrices).T + torch.cat(biases)``, ``[…, O]``; None if the device's kernel does not support these arguments.

    Args:
        x: ``[…, K]``.
        matrices: up to :data:`MOST_MATRICES` matrices ``[O, K]`` of equal strides.
        biases: a bias ``[O]`` for each matrix; or none.
        exact: whether a row must have the same bits among hundreds of rows, also in float32 on the CPU, where torch may be faster.

    All tensors have the same dtype. On the CPU, matrices may also be in 16 bits and the other tensors in float32; the result then has
    the same bits as with matrices in float32.
    """
    operator = _operators[x.device.type]
    by_cpu = operator is not few_rows_on_cuda
    given = (x, matrices, biases, exact) if by_cpu else (x, matrices, biases)
    if by_cpu and not torch.compiler.is_dynamo_compiling():
        try:  # the CPU's operator checks its arguments twenty times as fast as `fit`
            return operator(*given)
        except RuntimeError:
            if fit(x, matrices, biases):
                raise
            return None
    return operator(*given) if fit(x, matrices, biases) else None


def fit(x: Tensor, matrices: Sequence[Tensor], biases: Sequence[Tensor]) -> bool:
    """Whether the device's operator supports these arguments."""
    narrow = x.dtype == torch.float32 and operator_for(x) is not few_rows_on_cuda and matrices[0].dtype in cpu.TYPES
    if not (narrow or x.dtype == matrices[0].dtype) or x.dtype not in cpu.TYPES or 1 not in matrices[0].stride():
        return False
    if any(bias.dtype != x.dtype or not bias.is_contiguous() for bias in biases):
        return False
    return len(matrices) == 1 or are_one_product(matrices)


def multiplies(weight: Tensor, exact: bool = True) -> bool:
    """Whether a kernel of this package multiplies by `weight` ``[out, in]``.

    On the CPU, our kernels multiply by all weights that they support, because they are faster than torch's. On CUDA, they multiply only
    by 16-bit weights, because in float32 they would be slow and the order of a sum hardly matters.

    exact: whether a row's bits must not depend on the number of rows. If False, our kernels are not used on CUDA.
    """
    if weight.device.type == "cpu":
        return cpu.takes(weight) and take_cpu_kernels() is not None
    return exact and weight.dtype in (torch.bfloat16, torch.float16) and has_kernel(weight.device)


def has_kernel(device: torch.device) -> bool:
    """Whether the Triton kernels run on `device`: on AMD GPUs, and NVIDIA GPUs since Ampere."""
    if device.type != "cuda" or not runs_kernels(device):
        return False
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)


def are_one_product(matrices: Sequence[Tensor]) -> bool:
    """Whether :func:`product_or_none` can multiply by these matrices (at most :data:`MOST_MATRICES`) in one product."""
    first = matrices[0]
    block = LARGEST_BLOCK if _operators[first.device.type] is few_rows_on_cuda else 1
    return not any(
        len(matrix) % block
        or matrix.stride() != first.stride()
        or matrix.shape[1] != first.shape[1]
        or matrix.dtype != first.dtype
        or matrix.device != first.device
        for matrix in matrices
    )


def rms_norm_for(weight: Tensor) -> Callable[..., Tensor] | None:
    """The operator of norms with `weight` ``[H]`` on the weight's device; None if there is no operator for it.

    The operator takes x ``[…, H]`` of the weight's dtype, the weight, and the fields of a
    :class:`~decoders.engine.model.weights.layers.Formula`. It computes in float32.
    """
    if weight.device.type == "cpu":
        kernels = cpu.chosen().kernels
        return kernels.rms_norm if kernels is not None and weight.dtype in cpu.TYPES else None
    return rms_norm_on_cuda if weight.dtype in (torch.bfloat16, torch.float16) and has_kernel(weight.device) else None


def gated_linear(x: Tensor, by: Operands, kind: int) -> Tensor | None:
    """``activation(x @ gate.T) * (x @ up.T)``, ``[…, I]``; None if no kernel computes it.

    Args:
        by: the matrices of gate and up, ``[I, K]`` each.
        kind: the activation; 0 is silu, 1 is gelu approximated by tanh.
    """
    if operator_for(x) is not few_rows_on_cuda:
        return _on_cpu("gated_linear", x, *by, kind)
    return gated(x, by.matrices, by.biases, kind) if fit(x, by.matrices, by.biases) else None


def linear_to_residual(
    x: Tensor, by: Operands, residual: Tensor, before: Norm = Norm(), after: Norm = Norm()
) -> tuple[Tensor, Tensor] | None:
    """``residual + before(x @ matrix.T + bias)``, and this sum after the norm `after`, both ``[…, H]``.

    Without a norm `after`, the second tensor is empty. Returns None if no kernel computes them.

    Args:
        x: ``[…, K]``.
        by: a matrix ``[H, K]``.
        residual: ``[…, H]``.
        before, after: the norm that is applied to the product, and the norm that is applied to the sum.
    """
    if operator_for(x) is not few_rows_on_cuda:
        return _on_cpu("linear_to_residual", x, *by, residual, *before, *after)
    alike = residual.dtype == x.dtype and residual.is_contiguous()
    if not alike or not fit(x, by.matrices, by.biases):
        return None
    return to_residual(x, by.matrices[0], by.biases[0] if by.biases else None, residual, *before, *after)


def linear_rotated(
    x: Tensor, by: Operands, norms: tuple[Norm, Norm], cos: Tensor, sin: Tensor, slots: Tensor, keys: Tensor, values: Tensor
) -> tuple[Tensor, Tensor | None, Tensor | None] | None:  # fmt: skip
    """Computes queries, keys and values, and applies norms (per head) and rotary positions to queries and keys.

    Args:
        x: ``[B, N, K]``.
        by: the matrices of queries, keys and values.
        norms: the norm of query heads and the norm of key heads, with the same formula.
        cos, sin: ``[B or 1, N, D]``.
        slots: ``[B, N]`` int64; negative slots count from the end.
        keys, values: the cache, ``[B, h, L, D]``. On CUDA, in uncompiled code, the operator writes new keys and values to their slots.

    Returns:
        Queries ``[B, N, H, D]``, and new keys and values ``[B, h, N, D]``. Keys and values are None if the operator has written them to
        the cache (on CUDA, in uncompiled code). A single None if no kernel computes these products.
    """
    (query_norm, *formula), key_norm = norms[0], norms[1].weight
    around = query_norm, key_norm, *formula, cos, sin
    if operator_for(x) is not few_rows_on_cuda:
        heads, width = keys.shape[1], keys.shape[3]
        if (computed := _on_cpu("linear_rotated", x, *by, *around, heads, width)) is None:
            return None
        query, key, product = computed
        return query, key, product[..., -heads * width :].unflatten(-1, (heads, width)).transpose(1, 2)
    if not fit(x, by.matrices, by.biases) or not x.dtype == keys.dtype == cos.dtype:
        return None
    given = x, by.matrices, by.biases, *around
    compiled = torch.compiler.is_dynamo_compiling()
    return rotated(*given) if compiled else (to_cache(*given, slots, keys, values), None, None)


def decoder_layers(x: Tensor, *given: Any) -> tuple[list[Tensor], Tensor] | None:
    """Computes whole layers with the CPU's operator (``elementwise.cpp``), which also writes to the cache. Returns the layers' results,
    and the last result normalized by the next layer's first norm; None if the operator does not support these layers.
    """
    return None if operator_for(x) is few_rows_on_cuda else _on_cpu("decoder_layers", x, *given)


def _on_cpu(name: str, *given: Any) -> Any:
    """Calls the CPU's operator `name`; None if the operator rejects the arguments, which it checks faster than Python could."""
    if torch.compiler.is_dynamo_compiling():
        return on_cpu[name](*given)
    try:
        return on_cpu[name](*given)
    except RuntimeError:  # the caller's unfused layer then computes the result, or raises
        return None
