"""The layers that replace layers in our copy of a model: products with kernels, norms, fused attention.

The kernels read the model's own weights, so changes of weights take effect immediately. When a target is created, :mod:`.few_rows`,
:mod:`.same_bits`, :mod:`.fused_layers` and :mod:`.fused_blocks` decide which layers are replaced.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ..kernels import Norm, Operands, attention, products
from ..kernels.products import product_or_none
from ..modules_compat import is_parametrized, own_parameters, writes_counted
from ..slot_cache import SlotCache
from .noted_calls import Name

Product = TypeVar("Product", Tensor, Tensor | None)


# Products.


class Latest(threading.local):
    """Stores each thread's last result for a tensor, so that layers with the same input compute it once."""

    source: Tensor | None = None
    writes = -1
    by: object = None
    result: Any = None

    def of(self, x: Tensor, by: object, compute: Callable[[Tensor], Any]) -> Any:
        """Returns the stored result if it belongs to the objects `x` and `by` and `x` was not written since; else ``compute(x)``."""
        if self.source is not x or self.by is not by or self.writes != writes_counted(x):
            self.keep(x, by, compute(x))
        return self.result

    def keep(self, x: Tensor, by: object, result: Any) -> None:
        """Stores `result` as the result for `x` and `by`."""
        self.source, self.writes, self.by, self.result = x, writes_counted(x), by, result

    def forget(self) -> None:
        self.source = self.by = self.result = None


#: The joint product that the first layer of a group has computed. The product is kept until the last layer has taken its columns.
_products = Latest()


class Joint:
    """Base of linear layers. Several layers with the same input may compute one joint product.

    Attributes:
        group: the layers of the joint product, this layer included; None without a joint product.
        columns: begin and end of this layer's columns in the product.
    """

    group: tuple[Any, ...] | None = None
    columns: tuple[int, int] = 0, 0

    @staticmethod
    def operands(layers: Sequence[Any]) -> Operands | None:
        """The operands of products with `layers`, which are of this class; None if a layer computes more than a product."""
        raise NotImplementedError

    def product(self, x: Tensor, multiply: Callable[[Tensor, tuple[Any, ...]], Product]) -> Product:
        """Multiplies `x` by all layers of the group with `multiply`, and returns this layer's columns of the product."""
        group, (begin, end) = self.group, self.columns
        if group is None:
            return multiply(x, (self,))
        if torch.compiler.is_dynamo_compiling():  # the compiler merges equal products
            product = multiply(x, group)
            return product if product is None else product[..., begin:end]
        joint: Product = _products.of(x, group[0], lambda x: multiply(x, group))
        if joint is None:
            return joint
        if end == joint.shape[-1]:
            _products.forget()
        return joint.narrow(-1, begin, end - begin)


def bias_of(layer: Any) -> Tensor | None:
    """The bias of a linear layer; None without a bias."""
    own = own_parameters(layer)  # looked up first, because `layer.bias` takes ten times as long
    if "bias" in own:
        return own["bias"]
    return cast(Tensor | None, layer.bias)


def biases_of(layers: Sequence[Any]) -> list[Tensor]:
    """The biases of the `layers` that have a bias."""
    biases = [bias_of(layer) for layer in layers]
    return [bias for bias in biases if bias is not None]


class FewRows(Joint):
    """Base of linear layers that multiply with the kernels for few rows.

    Attributes:
        decoders_narrow: None, or a 16-bit copy of a float32 weight with equal numbers and strides. Kernels then read the copy.
        decoders_exact: whether a row must have the same bits among hundreds of rows, too.
    """

    decoders_narrow: Tensor | None = None
    decoders_exact = False

    def matrix(self) -> Tensor:
        """The matrix ``[out, in]``, with any strides."""
        narrow = getattr(self, "decoders_narrow", None)  # the method also runs for plain layers, without this attribute
        return own_parameters(self)["weight"] if narrow is None else narrow  # type: ignore[arg-type, return-value]

    @staticmethod
    def operands(layers: Sequence[Any]) -> Operands:
        return Operands([layer.matrix() for layer in layers], [], biases_of(layers))

    def forward(self, x: Tensor) -> Tensor:
        if is_parametrized(self):
            return super().forward(x)  # type: ignore[misc]  # the forward of the replaced class
        out = self.product(x, product_of)
        if out is None and self.group is not None:
            out = product_of(x, (self,))
        return super().forward(x) if out is None else out  # type: ignore[misc]  # the forward of the replaced class


def product_of(x: Tensor, layers: tuple[Any, ...]) -> Tensor | None:
    """The product ``[…, out]`` of `x` and all `layers`; None if no kernel computes it as one product.

    The kernel checks the weights in every call, because a user may assign data with another dtype or other strides.
    """
    by = FewRows.operands(layers)
    return product_or_none(x, by.matrices, by.biases, layers[0].decoders_exact)


class FewRowsLinear(FewRows, nn.Linear):
    """An ``nn.Linear`` that multiplies with a kernel."""


class FewRowsConv1D(FewRows, Conv1D):
    """GPT-2's linear layer. Its weight is stored as ``[in, out]``."""

    def matrix(self) -> Tensor:
        return FewRows.matrix(self).t()  # not super(), which refuses plain layers


# Norms.


class Formula(NamedTuple):
    """How a norm computes ``x / sqrt(mean(x²) + epsilon) * weight``.

    Attributes:
        epsilon: the constant under the root.
        one_added: whether the factor is ``1 + weight`` instead of ``weight``, as in Gemma.
        rounded_first: whether the quotient is rounded to the dtype of `x` before the multiplication (Llama), not after it (OLMo 2).
    """

    epsilon: float
    one_added: bool
    rounded_first: bool

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        """`x` ``[…, H]``, normalized and multiplied by `weight` ``[H]``, with the bits of transformers' models."""
        wide = x.float()
        quotient = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.epsilon)
        factor = 1.0 + weight.float() if self.one_added else weight
        return (factor * (quotient.to(x.dtype) if self.rounded_first else quotient)).to(x.dtype)


@functools.cache
def norm_class(plain: Any, formula: Formula, rms_norm: Callable[..., Tensor]) -> type[nn.Module]:
    """The class that replaces the norm class `plain`. Its forward calls the operator `rms_norm`."""

    def forward(self: Any, x: Tensor, *more: Any, **options: Any) -> Any:
        if more or options or x.dtype != self.weight.dtype or not x.numel():
            return plain.forward(self, x, *more, **options)
        return rms_norm(x, self.weight, *formula)

    namespace = {"forward": forward, "decoders_formula": formula, "__module__": plain.__module__}
    return type(plain.__name__, (plain,), namespace)


#: A norm's module and formula; both None if there is no norm.
NormOf = tuple[nn.Module | None, Formula | None]
NO_NORM: NormOf = (None, None)


def as_norm(norm: NormOf) -> Norm:
    """`norm` in the form that kernels take."""
    module, formula = norm
    return Norm() if module is None or formula is None else Norm(own_parameters(module)["weight"], *formula)


# Fused attention.


class Attention(NamedTuple):
    """The structure of an attention module, as the fused module needs it.

    Attributes:
        group: the linear layers of queries, keys and values, which have a joint product.
        out: the module's last linear layer.
        norms: the norm of query heads, and the norm of key heads.
        names: names of the arguments for the input, cos and sin, the mask and the cache.
        layer: the module's index in the cache.
        scaling, softcap: factor and soft cap of scores.
        sinks: name of the parameter with attention sinks; None without sinks.
        kernel: the kernel that computes attention.
    """

    group: tuple[Any, ...]
    out: Any
    norms: tuple[NormOf, NormOf]
    names: tuple[Name, Name, Name, Name]
    layer: int
    scaling: float | None
    softcap: float | None
    sinks: str | None
    kernel: attention.Kernel


def attend(
    module: nn.Module, plan: Attention, x: Tensor, turns: tuple[Tensor, Tensor], mask: Tensor, cache: Any
) -> Tensor | None:
    """Writes keys and values to the cache. Returns the input of the module's last linear layer, ``[B, N, H D]``; None if no kernel
    computes it. turns: cos and sin of the rotary positions.
    """
    if type(cache) is not SlotCache or not cache.is_read_as_stored:
        return None
    keys, values = cache.buffers.keys[plan.layer], cache.buffers.values[plan.layer]
    if cache.view > keys.shape[2]:
        return None
    norms, by = (as_norm(plan.norms[0]), as_norm(plan.norms[1])), plan.group[0].operands(plan.group)
    rotated = None if by is None else products.linear_rotated(x, by, norms, *turns, cache.slots, keys, values)
    if rotated is None:
        return None
    query, new_keys, new_values = rotated
    if new_keys is not None and new_values is not None:
        seen_keys, seen_values = cast(Any, cache.update(new_keys, new_values, plan.layer))
    else:
        seen_keys, seen_values = cast(Any, (cache.seen(keys, None), cache.seen(values, None)))
    sinks = None if plan.sinks is None else own_parameters(module)[plan.sinks]
    options: dict[str, Any] = dict(scaling=plan.scaling, softcap=plan.softcap, s_aux=sinks, kernel=plan.kernel)
    out, _ = attention.kernel_attention(module, query.transpose(1, 2), seen_keys, seen_values, mask, **options)
    return out.reshape(*x.shape[:-1], -1)


def taken(given: tuple, options: dict[str, Any], names: Sequence[Name]) -> list[Any]:
    """Selects a call's arguments by their `names`; None for an absent argument."""
    return [
        options.get(name) if isinstance(name, str) else given[name] if name < len(given) else None
        for name in cast(Any, names)
    ]
