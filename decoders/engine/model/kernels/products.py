"""Products of few rows, ``x @ matrix.T + bias``, and root-mean-square norms, in which a row has the same bits for any number of rows.

Up to three matrices with the same input (queries, keys and values; gate and up) are one product, without copies. The interface is the
same on both devices: C++ kernels on the CPU (:mod:`.cpu`), Triton's on CUDA (:mod:`.products_triton`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from . import LARGEST_BLOCK, cpu, operator, runs_kernels


def _on_cuda(x: Tensor, matrices: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
    from .products_triton import few_rows_linear

    return few_rows_linear(x, matrices, biases)


def _product_fake(x: Tensor, matrices: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
    return x.new_empty((*x.shape[:-1], sum(matrix.shape[0] for matrix in matrices)))


few_rows_on_cuda = operator(
    "few_rows_linear(Tensor x, Tensor[] matrices, Tensor[] biases) -> Tensor", _on_cuda, _product_fake
)


#: Operator per type of device; :func:`multiplies` sets the CPU's.
_operators: dict[str, Callable[..., Tensor]] = dict.fromkeys(("cuda", "cpu"), few_rows_on_cuda)


def operator_for(x: Tensor) -> Callable[..., Tensor]:
    """The operator of products on the device of `x`."""
    return _operators[x.device.type]


def few_rows_linears(x: Tensor, matrices: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
    """``x @ torch.cat(matrices).T + torch.cat(biases)``, ``[…, O]``.

    Args:
        x: ``[…, K]``.
        matrices: up to :data:`MOST_MATRICES` matrices ``[O, K]`` of equal strides.
        biases: as many biases ``[O]``, or none.

    All tensors have the same dtype; or on the CPU, the matrices are in 16 bits and the others in float32. Then a row has the same bits
    as by the same numbers in float32.
    """
    return operator_for(x)(x, matrices, biases)


def few_rows_linear(x: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    """``x @ matrix.T + bias``. x: ``[…, K]``, matrix: ``[O, K]`` of any strides, bias: ``[O]`` or None, of the same dtype."""
    return few_rows_linears(x, [matrix], [] if bias is None else [bias])


def product_or_none(x: Tensor, matrices: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor | None:
    """:func:`few_rows_linears`; None if the device's kernel does not support these matrices or biases."""
    operator = operator_for(x)
    if operator is not few_rows_on_cuda and not torch.compiler.is_dynamo_compiling():
        try:  # the CPU's operator checks its arguments twenty times as fast as `fit`
            return operator(x, matrices, biases)
        except RuntimeError:
            if fit(x, matrices, biases):
                raise
            return None
    return operator(x, matrices, biases) if fit(x, matrices, biases) else None


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

    On CUDA only if products must be `exact`, and in 16 bits: in float32 the order of a sum hardly matters, and kernels would be slow.
    On the CPU, the kernels are faster than torch's.
    """
    if weight.device.type == "cpu":
        kernels = cpu.chosen().kernels
        if kernels is None or not cpu.takes(weight):
            return False
        _operators["cpu"] = kernels.few_rows_linear
        return True
    return exact and weight.dtype in (torch.bfloat16, torch.float16) and has_kernel(weight.device)


def has_kernel(device: torch.device) -> bool:
    """Whether the Triton kernels run on `device`: on AMD GPUs, and NVIDIA GPUs since Ampere."""
    if device.type != "cuda" or not runs_kernels(device):
        return False
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)


def are_one_product(matrices: Sequence[Tensor]) -> bool:
    """Whether :func:`few_rows_linears` can multiply by these matrices (at most :data:`MOST_MATRICES`) in one product."""
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


def _norm_on_cuda(x: Tensor, weight: Tensor, epsilon: float, one_added: bool, rounded_first: bool) -> Tensor:
    from .epilogues_triton import normalized

    return normalized(x, weight, epsilon, one_added, rounded_first)


def _norm_fake(x: Tensor, weight: Tensor, epsilon: float, one_added: bool, rounded_first: bool) -> Tensor:
    return x.new_empty(x.shape)


rms_norm_on_cuda = operator(
    "rms_norm(Tensor x, Tensor weight, float epsilon, bool one_added, bool rounded_first) -> Tensor",
    _norm_on_cuda,
    _norm_fake,
)


def rms_norm_for(weight: Tensor) -> Callable[..., Tensor] | None:
    """The operator of norms with `weight` ``[H]`` on its device; None if the model's modules compute norms.

    It takes x ``[…, H]`` of the weight's dtype, the weight, epsilon, one_added and rounded_first, and returns
    ``x / sqrt(mean(x²) + epsilon) * weight`` along the last dimension, computed in float32. one_added: the factor is ``1 + weight``;
    rounded_first: the quotient is rounded to the dtype of `x` before the multiplication.
    """
    if weight.device.type == "cpu":
        kernels = cpu.chosen().kernels
        return kernels.rms_norm if kernels is not None and weight.dtype in cpu.TYPES else None
    return rms_norm_on_cuda if weight.dtype in (torch.bfloat16, torch.float16) and has_kernel(weight.device) else None
