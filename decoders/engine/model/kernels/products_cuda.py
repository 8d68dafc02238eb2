"""Registers the CUDA operators of :mod:`.products`; :mod:`.products_triton` launches their kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import operator


def new_keys(x: Tensor, matrices: Sequence[Tensor], cos: Tensor) -> Tensor:
    """An empty tensor ``[B, h, N, D]`` for the keys (or the values) of `x`. matrices: of queries, keys and values."""
    return x.new_empty(x.shape[0], len(matrices[1]) // cos.shape[2], x.shape[1], cos.shape[2])


def _to_residual_fake(
    x: Tensor, matrix: Tensor, bias: Tensor | None, residual: Tensor, *norms: Any
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(residual), residual.new_empty(residual.shape if norms[4] is not None else (0,))


def _rotated_fake(x: Tensor, matrices: Sequence[Tensor], *more: Any) -> tuple[Tensor, Tensor, Tensor]:
    cos: Tensor = more[-2]
    query = x.new_empty(*x.shape[:2], len(matrices[0]) // cos.shape[2], cos.shape[2])
    return query, new_keys(x, matrices, cos), new_keys(x, matrices, cos)


def _to_cache_fake(x: Tensor, matrices: Sequence[Tensor], *more: Any) -> Tensor:
    width = more[-1].shape[3]
    return x.new_empty(*x.shape[:2], len(matrices[0]) // width, width)


few_rows_on_cuda = operator(
    "few_rows_linear(Tensor x, Tensor[] matrices, Tensor[] biases) -> Tensor",
    "products_triton.few_rows_linear",
    lambda x, matrices, _: x.new_empty((*x.shape[:-1], sum(matrix.shape[0] for matrix in matrices))),
)
gated = operator(
    "gated_linear(Tensor x, Tensor[] pair, Tensor[] biases, int kind) -> Tensor",
    "products_triton.gated_linear",
    lambda x, pair, *_: x.new_empty((*x.shape[:-1], len(pair[0]))),
)
_NORMS = ", ".join(
    f"Tensor? {name}, float {name}_epsilon, bool {name}_one_added, bool {name}_rounded_first"
    for name in ("before", "after")
)
to_residual = operator(
    f"linear_to_residual(Tensor x, Tensor matrix, Tensor? bias, Tensor residual, {_NORMS}) -> (Tensor, Tensor)",
    "products_triton.linear_to_residual",
    _to_residual_fake,
)
_ROTATED = (
    "Tensor x, Tensor[] matrices, Tensor[] biases, Tensor? query_norm, Tensor? key_norm, float epsilon, bool one_added, "
    "bool rounded_first, Tensor cos, Tensor sin"
)
rotated = operator(
    f"linear_rotated({_ROTATED}) -> (Tensor, Tensor, Tensor)", "products_triton.linear_rotated", _rotated_fake
)
to_cache = operator(
    f"linear_to_cache({_ROTATED}, Tensor slots, Tensor(a!) keys, Tensor(b!) values) -> Tensor",
    "products_triton.linear_to_cache",
    _to_cache_fake,
)
rms_norm_on_cuda = operator(
    "rms_norm(Tensor x, Tensor weight, float epsilon, bool one_added, bool rounded_first) -> Tensor",
    "epilogues_triton.normalized",
    lambda x, *_: x.new_empty(x.shape),
)
