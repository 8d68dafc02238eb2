"""Linear layers that multiply by the kernels of :mod:`~decoders.engine.model.kernels.products`, which read weights where they are.

Nothing is copied: a changed weight counts because it is read. Layers that read the same input are one product (:mod:`.fused`).
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
    """Base of the layers below."""

    def matrix(self) -> Tensor:
        """``[out, in]``, of any strides."""
        return cast(Tensor, own_parameters(cast(nn.Module, self))["weight"])  # self.weight takes ten times as long

    def forward(self, x: Tensor) -> Tensor:
        out = self.product(x, product_of)
        if out is None and self.group is not None:
            out = product_of(x, (self,))
        return super().forward(x) if out is None else out  # type: ignore[misc]  # of the layer that it replaces


def product_of(x: Tensor, layers: tuple[Any, ...]) -> Tensor | None:
    """``[…, out]`` of all `layers`; None where they are no one product, or none that a kernel computes.

    Found out every time: a weight may have been given other data since, of another type or of other strides.
    """
    matrices = [layer.matrix() for layer in layers]
    biases = [] if layers[0].bias is None else [layer.bias for layer in layers]
    return product_or_none(x, matrices, biases)


class FewRowsLinear(FewRows, nn.Linear):
    """An ``nn.Linear`` that multiplies few rows by our kernel."""


class FewRowsConv1D(FewRows, Conv1D):
    """GPT-2's linear layer, whose weight is stored as ``[in, out]``."""

    def matrix(self) -> Tensor:
        return super().matrix().t()


#: Per kind of layer, the class that replaces it.
KINDS: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: FewRowsLinear, Conv1D: FewRowsConv1D}


def multiply_few_rows(model: nn.Module, groups: Sequence[Group] = (), exact_products: bool = True) -> int:
    """Makes the plain linear layers of `model`, a private tree, multiply by our kernels where there are some for their weights; returns
    how many there are.

    Args:
        groups: layers that read the same input. Those of a group that are stored alike are multiplied as one.
        exact_products: whether layers on CUDA do, too, in which a row then has the same bits for any number of rows.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    weights = {path: plain_weight(module) for path, module in modules.items()}
    chosen = {path: modules[path] for path, w in weights.items() if w is not None and multiplies(w, exact_products)}
    join(modules, groups, lambda path: _product_kind(chosen[path]) if path in chosen else None)
    for module in chosen.values():
        module.__class__ = KINDS.get(type(module), type(module))  # one module may have two names
    return len(chosen)


def _product_kind(layer: Any) -> Hashable:
    """A value that is equal for layers that a kernel multiplies as one; None for one that it multiplies alone."""
    matrix: Tensor = KINDS[type(layer)].matrix(layer)  # type: ignore[attr-defined]
    alike = matrix.shape[1], matrix.stride(), matrix.dtype, matrix.device, layer.bias is None
    return alike if are_one_product([matrix]) else None
