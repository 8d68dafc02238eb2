"""Products with epilogues: activations, residuals and norms, rotary positions and writes to the cache.

On CUDA, the kernel that adds a product's stretches computes the epilogue (:mod:`.epilogues_triton`), which saves most of a step's
launches; on the CPU (:mod:`.cpu`), it is a separate operator. On both, a row has the same bits for any number of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from . import Norm, operator
from .products import few_rows_on_cuda, fit, operator_for, product_or_none


def _gated_on_cuda(x: Tensor, pair: Sequence[Tensor], biases: Sequence[Tensor], kind: int) -> Tensor:
    from .products_triton import gated_linear

    return gated_linear(x, pair, biases, kind)


def _to_residual_on_cuda(
    x: Tensor, matrix: Tensor, bias: Tensor | None, residual: Tensor, *norms: object
) -> tuple[Tensor, Tensor]:
    from .products_triton import linear_to_residual

    return linear_to_residual(x, matrix, bias, residual, Norm(*norms[:4]), Norm(*norms[4:]))  # type: ignore[arg-type]


def _to_residual_fake(
    x: Tensor, matrix: Tensor, bias: Tensor | None, residual: Tensor, *norms: object
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(residual), residual.new_empty(residual.shape if norms[4] is not None else (0,))


def _to_cache_on_cuda(
    x: Tensor, matrices: Sequence[Tensor], biases: Sequence[Tensor], query_norm: Tensor | None, key_norm: Tensor | None, epsilon: float,
    one_added: bool, rounded_first: bool, cos: Tensor, sin: Tensor, slots: Tensor, keys: Tensor, values: Tensor,
) -> Tensor:  # fmt: skip
    from .products_triton import linear_to_cache

    norms = Norm(query_norm, epsilon, one_added, rounded_first), Norm(key_norm, epsilon, one_added, rounded_first)
    return linear_to_cache(x, matrices, biases, norms, cos, sin, slots, keys, values)


def _rotated_on_cuda(
    x: Tensor, matrices: Sequence[Tensor], biases: Sequence[Tensor], query_norm: Tensor | None, key_norm: Tensor | None, epsilon: float,
    one_added: bool, rounded_first: bool, cos: Tensor, sin: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    from .products_triton import linear_to_cache

    norms = Norm(query_norm, epsilon, one_added, rounded_first), Norm(key_norm, epsilon, one_added, rounded_first)
    keys, values = _new_keys(x, matrices, cos), _new_keys(x, matrices, cos)
    return linear_to_cache(x, matrices, biases, norms, cos, sin, None, keys, values), keys, values


def _new_keys(x: Tensor, matrices: Sequence[Tensor], cos: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], len(matrices[1]) // cos.shape[2], x.shape[1], cos.shape[2])


def _rotated_fake(x: Tensor, matrices: Sequence[Tensor], *more: object) -> tuple[Tensor, Tensor, Tensor]:
    cos: Tensor = more[-2]  # type: ignore[assignment]
    query = x.new_empty(*x.shape[:2], len(matrices[0]) // cos.shape[2], cos.shape[2])
    return query, _new_keys(x, matrices, cos), _new_keys(x, matrices, cos)


def _to_cache_fake(x: Tensor, matrices: Sequence[Tensor], *more: object) -> Tensor:
    width = more[-1].shape[3]  # type: ignore[attr-defined]
    return x.new_empty(*x.shape[:2], len(matrices[0]) // width, width)


_gated = operator(
    "gated_linear(Tensor x, Tensor[] pair, Tensor[] biases, int kind) -> Tensor",
    _gated_on_cuda,
    lambda x, pair, *_: x.new_empty((*x.shape[:-1], len(pair[0]))),
)
_NORMS = ", ".join(
    f"Tensor? {name}, float {name}_epsilon, bool {name}_one_added, bool {name}_rounded_first"
    for name in ("before", "after")
)
_to_residual = operator(
    f"linear_to_residual(Tensor x, Tensor matrix, Tensor? bias, Tensor residual, {_NORMS}) -> (Tensor, Tensor)",
    _to_residual_on_cuda,
    _to_residual_fake,
)
_ROTATED = (
    "Tensor x, Tensor[] matrices, Tensor[] biases, Tensor? query_norm, Tensor? key_norm, float epsilon, bool one_added, "
    "bool rounded_first, Tensor cos, Tensor sin"
)
_rotated = operator(f"linear_rotated({_ROTATED}) -> (Tensor, Tensor, Tensor)", _rotated_on_cuda, _rotated_fake)
_to_cache = operator(
    f"linear_to_cache({_ROTATED}, Tensor slots, Tensor(a!) keys, Tensor(b!) values) -> Tensor",
    _to_cache_on_cuda,
    _to_cache_fake,
)


def gated_linear(
    x: Tensor, pair: Sequence[Tensor], biases: Sequence[Tensor], kind: int, gate_first: bool,
    activation: Callable[[Tensor, int, bool], Tensor] | None = None,
) -> Tensor | None:  # fmt: skip
    """``activation(x @ gate.T) * (x @ up.T)``, ``[…, I]``; None if no kernel computes it.

    Args:
        pair: both matrices ``[I, K]``, the gate's first if `gate_first`.
        kind: the activation, 0: silu, 1: gelu by tanh.
        activation: the CPU's operator of the epilogue; None on CUDA.
    """
    if operator_for(x) is few_rows_on_cuda:
        if not fit(x, pair, biases):
            return None
        order = slice(None, None, 1 if gate_first else -1)
        return _gated(x, pair[order], biases[order], kind)
    both = None if activation is None else product_or_none(x, pair, biases)
    return None if both is None or activation is None else activation(both, kind, gate_first)


def linear_to_residual(
    x: Tensor, matrix: Tensor, bias: Tensor | None, residual: Tensor, before: Norm = Norm(), after: Norm = Norm()
) -> tuple[Tensor, Tensor] | None:
    """``residual + before(x @ matrix.T + bias)``, and ``after`` of it (an empty tensor without this norm); on CUDA, else None.

    Args:
        x: ``[…, K]``.
        matrix: ``[H, K]``.
        bias: ``[H]`` or None.
        residual: ``[…, H]``.
        before, after: norms of the product, and of the new residual.
    """
    alike = residual.dtype == x.dtype and residual.is_contiguous()
    if operator_for(x) is not few_rows_on_cuda or not alike or not fit(x, [matrix], [] if bias is None else [bias]):
        return None
    return _to_residual(x, matrix, bias, residual, *before, *after)


def linear_rotated(
    x: Tensor, matrices: Sequence[Tensor], biases: Sequence[Tensor], norms: tuple[Norm, Norm], cos: Tensor, sin: Tensor,
    slots: Tensor, keys: Tensor, values: Tensor,
) -> tuple[Tensor, Tensor | None, Tensor | None] | None:  # fmt: skip
    """Queries, keys and values: products with their matrices, then norms per head and rotary positions of queries and keys.

    Args:
        x: ``[B, N, K]``.
        norms: of queries and keys, with the same formula.
        cos, sin: ``[B or 1, N, D]``.
        slots: ``[B, N]`` int64; negative slots count from the end.
        keys, values: the cache, ``[B, h, L, D]``; uncompiled, the operator writes new keys and values to their slots.

    Returns:
        queries ``[B, N, H, D]``; and in compiled code, whose regions accept no operators that write, keys and values ``[B, h, N, D]``,
        else None twice. None if no kernel computes it.
    """
    if (
        operator_for(x) is not few_rows_on_cuda
        or not fit(x, matrices, biases)
        or not x.dtype == keys.dtype == cos.dtype
    ):
        return None
    (query_norm, *formula), key_norm = norms[0], norms[1].weight
    given = x, matrices, biases, query_norm, key_norm, *formula, cos, sin
    if torch.compiler.is_dynamo_compiling():
        return _rotated(*given)
    return _to_cache(*given, slots, keys, values), None, None
