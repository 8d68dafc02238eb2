"""Linear layers that multiply by the kernels of :mod:`~decoders.engine.model.kernels.products`.

The kernels read the model's own weights, so changes take effect at once. Layers with the same input are one product (:mod:`.fused`).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, cast

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ..kernels.products import are_one_product, multiplies, product_or_none
from ..torch_compat import own_parameters
from .fused import Group, Joint, join, plain_weight


class FewRows(Joint):
    """Base of the layers below.

    Attributes:
        decoders_narrow: a copy of a weight of float32 in 16 bits, of the same numbers and strides, that is read instead; or None.
    """

    decoders_narrow: Tensor | None = None

    def matrix(self) -> Tensor:
        """``[out, in]``, of any strides."""
        narrow = getattr(self, "decoders_narrow", None)
        if narrow is not None:
            return narrow
        return cast(Tensor, own_parameters(cast(nn.Module, self))["weight"])  # self.weight takes ten times as long

    def forward(self, x: Tensor) -> Tensor:
        out = self.product(x, product_of)
        if out is None and self.group is not None:
            out = product_of(x, (self,))
        return super().forward(x) if out is None else out  # type: ignore[misc]  # of the layer that it replaces


def product_of(x: Tensor, layers: tuple[Any, ...]) -> Tensor | None:
    """``[…, out]`` of all `layers`; None if no kernel computes it as one product.

    Checked in every call, because a weight may get data of another dtype or other strides.
    """
    matrices = [layer.matrix() for layer in layers]
    biases = [] if layers[0].bias is None else [layer.bias for layer in layers]
    return product_or_none(x, matrices, biases)


class FewRowsLinear(FewRows, nn.Linear):
    """An ``nn.Linear`` that multiplies few rows by a kernel."""


class FewRowsConv1D(FewRows, Conv1D):
    """GPT-2's linear layer, whose weight is stored as ``[in, out]``."""

    def matrix(self) -> Tensor:
        return super().matrix().t()


#: Class of a layer → class that replaces it.
KINDS: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: FewRowsLinear, Conv1D: FewRowsConv1D}


def multiply_few_rows(model: nn.Module, groups: Sequence[Group] = (), exact_products: bool = True) -> int:
    """Makes the plain linear layers of `model`, a private copy, multiply by kernels if there are kernels for their weights; returns the
    number of these layers.

    Args:
        groups: layers with the same input. Layers of a group with the same storage are one product.
        exact_products: whether to do so on CUDA, where a row then has the same bits for any number of rows.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    weights = {path: plain_weight(module) for path, module in modules.items()}
    chosen = {path: modules[path] for path, w in weights.items() if w is not None and multiplies(w, exact_products)}
    join(modules, groups, lambda path: _product_kind(chosen[path]) if path in chosen else None)
    for module in chosen.values():
        module.__class__ = KINDS.get(type(module), type(module))  # a module may have two names
    return len(chosen)


def _product_kind(layer: Any) -> Hashable:
    """A value that is equal for layers that a kernel can multiply as one; None for layers that it multiplies alone."""
    matrix: Tensor = KINDS[type(layer)].matrix(layer)  # type: ignore[attr-defined]
    alike = matrix.shape[1], matrix.stride(), matrix.dtype, matrix.device, layer.bias is None
    return alike if are_one_product([matrix]) else None
