"""Registers the CUDA operators of :mod:`.products`; :mod:`.products_triton` launches their kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import Norm, operator


def _gated_on_cuda(x: Tensor, pair: Sequence[Tensor], biases: Sequence[Tensor], kind: int) -> Tensor:
    from .products_triton import gated_linear

    return gated_linear(x, pair, biases, kind)


def _to_residual_on_cuda(
    x: Tensor, matrix: Tensor, bias: Tensor | None, residual: Tensor, *norms: Any
) -> tuple[Tensor, Tensor]:
    from .products_triton import linear_to_residual

    return linear_to_residual(x, matrix, bias, residual, Norm(*norms[:4]), Norm(*norms[4:]))


def _to_residual_fake(
    x: Tensor, matrix: Tensor, bias: Tensor | None, residual: Tensor, *norms: Any
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(residual), residual.new_empty(residual.shape if norms[4] is not None else (0,))


def _to_cache_on_cuda(
    x: Tensor, matrices: Sequence[Tensor], biases: Sequence[Tensor], query_norm: Tensor | None, key_norm: Tensor | None, epsilon: float,
    one_added: bool, rounded_first: bool, cos: Tensor, sin: Tensor, slots: Tensor | None, keys: Tensor, values: Tensor,
) -> Tensor:  # fmt: skip
    from .products_triton import linear_to_cache

    norms = Norm(query_norm, epsilon, one_added, rounded_first), Norm(key_norm, epsilon, one_added, rounded_first)
    return linear_to_cache(x, matrices, biases, norms, cos, sin, slots, keys, values)


def _rotated_on_cuda(
    x: Tensor, matrices: Sequence[Tensor], biases: Sequence[Tensor], *around: Any
) -> tuple[Tensor, Tensor, Tensor]:
    keys, values = (_new_keys(x, matrices, around[-2]) for _ in range(2))
    return _to_cache_on_cuda(x, matrices, biases, *(*around, None, keys, values)), keys, values


def _new_keys(x: Tensor, matrices: Sequence[Tensor], cos: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], len(matrices[1]) // cos.shape[2], x.shape[1], cos.shape[2])


def _rotated_fake(x: Tensor, matrices: Sequence[Tensor], *more: Any) -> tuple[Tensor, Tensor, Tensor]:
    cos: Tensor = more[-2]
    query = x.new_empty(*x.shape[:2], len(matrices[0]) // cos.shape[2], cos.shape[2])
    return query, _new_keys(x, matrices, cos), _new_keys(x, matrices, cos)


def _to_cache_fake(x: Tensor, matrices: Sequence[Tensor], *more: Any) -> Tensor:
    width = more[-1].shape[3]
    return x.new_empty(*x.shape[:2], len(matrices[0]) // width, width)


gated = operator(
    "gated_linear(Tensor x, Tensor[] pair, Tensor[] biases, int kind) -> Tensor",
    _gated_on_cuda,
    lambda x, pair, *_: x.new_empty((*x.shape[:-1], len(pair[0]))),
)
_NORMS = ", ".join(
    f"Tensor? {name}, float {name}_epsilon, bool {name}_one_added, bool {name}_rounded_first"
    for name in ("before", "after")
)
to_residual = operator(
    f"linear_to_residual(Tensor x, Tensor matrix, Tensor? bias, Tensor residual, {_NORMS}) -> (Tensor, Tensor)",
    _to_residual_on_cuda,
    _to_residual_fake,
)
_ROTATED = (
    "Tensor x, Tensor[] matrices, Tensor[] biases, Tensor? query_norm, Tensor? key_norm, float epsilon, bool one_added, "
    "bool rounded_first, Tensor cos, Tensor sin"
)
rotated = operator(f"linear_rotated({_ROTATED}) -> (Tensor, Tensor, Tensor)", _rotated_on_cuda, _rotated_fake)
to_cache = operator(
    f"linear_to_cache({_ROTATED}, Tensor slots, Tensor(a!) keys, Tensor(b!) values) -> Tensor",
    _to_cache_on_cuda,
    _to_cache_fake,
)


def _on_cuda(x: Tensor, matrices: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
    from .products_triton import few_rows_linear

    return few_rows_linear(x, matrices, biases)


def _product_fake(x: Tensor, matrices: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
    return x.new_empty((*x.shape[:-1], sum(matrix.shape[0] for matrix in matrices)))


few_rows_on_cuda = operator(
    "few_rows_linear(Tensor x, Tensor[] matrices, Tensor[] biases) -> Tensor", _on_cuda, _product_fake
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
