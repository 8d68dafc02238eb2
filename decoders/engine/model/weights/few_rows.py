"""Chooses the linear layers that multiply with our kernels (:mod:`~decoders.engine.model.kernels.products`), alone or jointly."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ..kernels.products import are_one_product, multiplies
from .fused import Group, join, plain_weight
from .layers import FewRowsConv1D, FewRowsLinear

#: Maps the class of a layer to the class that replaces it.
KINDS: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: FewRowsLinear, Conv1D: FewRowsConv1D}


def multiply_few_rows(model: nn.Module, groups: Sequence[Group] = (), exact_products: bool = True) -> int:
    """Makes the plain linear layers of `model`, our copy of a model, multiply with our kernels if the kernels support the weights.
    Returns the number of layers that use the kernels.

    Args:
        groups: paths of layers with the same input. Layers of a group multiply in one product if their weights are stored alike.
        exact_products: whether a row must have the same bits for any number of rows. If False, our kernels are not used on CUDA.
    """
    modules = dict(model.named_modules())
    weights = {path: plain_weight(module) for path, module in modules.items()}
    chosen = {path: modules[path] for path, w in weights.items() if w is not None and multiplies(w, exact_products)}
    join(modules, groups, lambda path: _product_kind(chosen[path]) if path in chosen else None)
    # In 16 bits a result's last bits can change a token. That includes float32 layers of such a model, for instance PEFT's adapters.
    exact = any(w is not None and w.dtype.itemsize == 2 for w in weights.values())
    for module in chosen.values():
        module.__class__ = KINDS[type(module)]
        if exact:
            module.decoders_exact = True
    return len(chosen)


def _product_kind(layer: Any) -> Hashable:
    """A key for a layer. Layers with equal keys can be multiplied as one product. None for a layer that is multiplied alone."""
    matrix: Tensor = KINDS[type(layer)].matrix(layer)  # type: ignore[attr-defined]
    alike = matrix.shape[1], matrix.stride(), matrix.dtype, matrix.device, layer.bias is None
    return alike if are_one_product([matrix]) else None
