"""The layers that replace layers in our copy of a model: products with kernels, norms, fused layers.

The kernels read the model's own weights, so changes of weights take effect at once. When a target is created, :mod:`.few_rows`,
:mod:`.same_bits`, :mod:`.fused_layers` and :mod:`.fused_blocks` decide which layers are replaced.
"""

from __future__ import annotations

import functools
import operator
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ..attention import KIND_ATTRIBUTE, LayerKind
from ..kernels import Norm, Operands, attention, products
from ..kernels.products import product_or_none
from ..modules_compat import hooks_of, own_parameters, writes_counted
from ..slot_cache import SlotCache
from .noted_calls import Name

Product = TypeVar("Product", Tensor, Tensor | None)


# Products.


class Latest(threading.local):
    """Keeps each thread's last result for a tensor, so that layers with the same input compute it once."""

    source: Tensor | None = None
    writes = -1
    by: object = None
    result: Any = None

    def of(self, x: Tensor, by: object, compute: Callable[[Tensor], Any]) -> Any:
        """``compute(x)``; or the last result, if `x` and `by` are the same objects as then and `x` was not written since."""
        if self.source is not x or self.by is not by or self.writes != writes_counted(x):
            self.keep(x, by, compute(x))
        return self.result

    def keep(self, x: Tensor, by: object, result: Any) -> None:
        """Stores `result` as the result for `x` and `by`."""
        self.source, self.writes, self.by, self.result = x, writes_counted(x), by, result

    def forget(self) -> None:
        self.source = self.by = self.result = None


#: The joint product that the first layer of a group has computed. It is kept until the last layer has taken its columns.
_products = Latest()


class Joint:
    """Base of layers that may have a joint product.

    Attributes:
        group: the layers of the joint product, this layer included; None without a joint product.
        columns: begin and end of this layer's columns in the product.
    """

    group: tuple[Any, ...] | None = None
    columns: tuple[int, int] = 0, 0

    @staticmethod
    def operands(layers: tuple[Any, ...]) -> Operands | None:
        """The operands of the joint product of `layers`, which are of this class; None if a layer computes more than a product."""
        raise NotImplementedError

    def product(self, x: Tensor, multiply: Callable[[Tensor, tuple[Any, ...]], Product]) -> Product:
        """This layer's columns of the product that `multiply` returns for `x` and the layers of the group."""
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


def biases_of(layers: tuple[Any, ...]) -> list[Tensor]:
    """The biases of `layers`, of which all have one or none."""
    own = own_parameters(layers[0])
    if "bias" in own and own["bias"] is None:  # asked first, because layer.bias takes ten times as long
        return []
    biases = [layer.bias for layer in layers]
    return [] if biases[0] is None else biases


class FewRows(Joint):
    """Base of the layers below.

    Attributes:
        decoders_narrow: a 16-bit copy of a float32 weight, with equal numbers and strides, which is read instead of it; or None.
    """

    decoders_narrow: Tensor | None = None

    def matrix(self) -> Tensor:
        """The matrix ``[out, in]``, with any strides."""
        narrow = getattr(self, "decoders_narrow", None)  # asked of layers before they get this class, too
        return own_parameters(self)["weight"] if narrow is None else narrow  # type: ignore[arg-type, return-value]

    @staticmethod
    def operands(layers: tuple[Any, ...]) -> Operands:
        return Operands([layer.matrix() for layer in layers], [], biases_of(layers))

    def forward(self, x: Tensor) -> Tensor:
        out = self.product(x, product_of)
        if out is None and self.group is not None:
            out = product_of(x, (self,))
        return super().forward(x) if out is None else out  # type: ignore[misc]  # of the layer that it replaces


def product_of(x: Tensor, layers: tuple[Any, ...]) -> Tensor | None:
    """The product ``[…, out]`` of `x` and all `layers`; None if no kernel computes it as one product.

    The kernel checks that in every call, because a weight may get data of another dtype or with other strides.
    """
    by = FewRows.operands(layers)
    return product_or_none(x, by.matrices, by.biases)


class FewRowsLinear(FewRows, nn.Linear):
    """An ``nn.Linear`` that multiplies with a kernel."""


class FewRowsConv1D(FewRows, Conv1D):
    """GPT-2's linear layer, whose weight is stored as ``[in, out]``."""

    def matrix(self) -> Tensor:
        return super().matrix().t()


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
        """The norm as models of transformers compute it. x: ``[…, H]``, weight: ``[H]``."""
        wide = x.float()
        quotient = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.epsilon)
        factor = 1.0 + weight.float() if self.one_added else weight
        return (factor * (quotient.to(x.dtype) if self.rounded_first else quotient)).to(x.dtype)


@functools.cache
def norm_class(plain: Any, formula: Formula, rms_norm: Callable[..., Tensor]) -> type[nn.Module]:
    """The class that replaces the norm class `plain`. It computes with the operator `rms_norm`."""

    def forward(self: Any, x: Tensor, *more: Any, **options: Any) -> Any:
        if more or options or x.dtype != self.weight.dtype or not x.numel():
            return plain.forward(self, x, *more, **options)
        return rms_norm(x, self.weight, *formula)

    namespace = {"forward": forward, "decoders_formula": formula, "__module__": plain.__module__}
    return type(plain.__name__, (plain,), namespace)


#: A norm's module and formula; both None if there is no norm.
NormOf = tuple[nn.Module | None, Formula | None]
NO_NORM: NormOf = (None, None)


def _as_norm(norm: NormOf) -> Norm:
    module, formula = norm
    return Norm() if module is None or formula is None else Norm(own_parameters(module)["weight"], *formula)


# Fused layers.


@functools.cache
def gated_class(plain: Any, kind: int, gate_first: bool) -> type[nn.Module]:
    """The class that replaces a gated feed-forward layer's. kind, gate_first: as of :func:`products.gated_linear`."""

    def inner(parts: tuple, x: Tensor) -> Tensor | None:
        by = parts[0][0].operands(parts[0])
        return None if by is None else products.gated_linear(x, by, kind, gate_first)

    def compute(parts: tuple, x: Tensor) -> Tensor | None:
        middle = inner(parts, x)
        return None if middle is None else parts[1](middle)

    def forward(self: Any, x: Tensor, *more: Any, **options: Any) -> Any:
        # This skips the calls of the parts, and so their hooks. A layer whose parts have hooks is therefore not fused.
        out = None if more or options else compute(self.decoders_gated, x)
        return plain.forward(self, x, *more, **options) if out is None else out

    parts = {"inner": staticmethod(inner), "compute": staticmethod(compute), "decoders_activation": (kind, gate_first)}
    namespace = {"forward": forward, **parts, "__module__": plain.__module__}
    return type(plain.__name__, (plain,), namespace)


class Attention(NamedTuple):
    """What the fused form of an attention module needs to know about the module.

    Attributes:
        group: the linear layers of queries, keys and values, which have a joint product.
        out: the module's last linear layer.
        norms: the norms of the heads of queries, and of keys.
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


class Step(NamedTuple):
    """Half of a decoder layer: a module, a norm of its result before it is added to the residual, and a norm of the sum."""

    module: nn.Module
    before: NormOf
    after: NormOf


class Whole(NamedTuple):
    """An attention module and the gated feed-forward layer behind it, as an operator of the CPU computes them.

    Attributes:
        attention: the attention module; `plan` is its structure.
        products: the groups of layers whose products are computed, in order.
        norms: of queries, keys, the attention module's result, the first sum, the feed-forward layer's result.
        formula: the norms' formula; None without norms.
        activation: kind and gate_first of :func:`products.gated_linear`.
    """

    attention: nn.Module
    plan: Attention
    products: tuple[tuple[Any, ...], ...]
    norms: tuple[NormOf, ...]
    formula: Formula | None
    activation: tuple[int, bool]

    @classmethod
    def of(cls, steps: Sequence[Step]) -> Whole | None:
        """A layer of these `steps`; None if they are others, or their norms have several formulas."""
        if len(steps) != 2 or (plan := vars(steps[0].module).get("decoders_block")) is None or plan.kernel != "cpu":
            return None
        attention, gated = steps[0].module, vars(steps[1].module).get("decoders_gated")
        norms = *plan.norms, steps[0].before, steps[0].after, steps[1].before
        formulas = {formula for _, formula in norms if formula is not None}
        if gated is None or len(formulas) > 1:
            return None
        products = plan.group, (plan.out,), gated[0], (gated[1],)
        activation = cast(Any, type(steps[1].module)).decoders_activation
        return cls(attention, plan, products, norms, next(iter(formulas), None), activation)

    @property
    def kind(self) -> Hashable:
        """What an operator takes once for all layers that it computes together."""
        biased = tuple(layers[0].bias is not None for layers in self.products)
        normed, plan = tuple(module is not None for module, _ in self.norms), self.plan
        return self.formula, self.activation, biased, normed, plan.scaling, plan.softcap, plan.sinks is None


def whole_layers(
    layers: Sequence[Whole], firsts: Sequence[NormOf], x: Tensor, reads: Tensor, turns: tuple[Tensor, Tensor],
    mask: Tensor, cache: Any,
) -> tuple[list[Tensor], Tensor] | None:  # fmt: skip
    """The result of each of the `layers`, which follow each other and are of one :attr:`Whole.kind`, and the norm of the last result.

    None if the operator does not compute them.

    Args:
        firsts: the first norm of the layer behind each layer; the last may be :data:`NO_NORM`.
        reads: the first norm of `x`.
    """
    one = layers[0]
    formula = one.formula or firsts[0][1] or Formula(0.0, False, False)
    if type(cache) is not SlotCache or cache.buffers.key_scales or any(own not in (None, formula) for _, own in firsts):
        return None
    operands = [group[0].operands(group) for layer in layers for group in layer.products]
    if None in operands or len({by.digits for by in operands}) > 1:
        return None
    keys, values = (
        [buffers[layer.plan.layer] for layer in layers] for buffers in (cache.buffers.keys, cache.buffers.values)
    )
    norms = [module for layer, first in zip(layers, firsts, strict=True) for module, _ in (*layer.norms, first)]
    # Read now, because the self-check shortens windows.
    kinds = [getattr(layer.attention, KIND_ATTRIBUTE, LayerKind()) for layer in layers]
    return products.decoder_layers(
        x,
        reads,
        [matrix for by in operands for matrix in by.matrices],
        [scale for by in operands for scale in by.scales],
        [bias for by in operands for bias in by.biases],
        sum(bool(by.biases) << place for place, by in enumerate(operands[: len(one.products)])),
        operands[0].digits,
        [own_parameters(module)["weight"] for module in norms if module is not None],
        sum((module is not None) << place for place, module in enumerate(norms[: len(one.norms) + 1])),
        *formula,
        *turns,
        cache.slots,
        keys,
        values,
        cache.view,
        mask,
        [own_parameters(layer.attention)[layer.plan.sinks] for layer in layers if layer.plan.sinks is not None],
        [kind.window or 0 for kind in kinds],
        [kind.chunk or 0 for kind in kinds],
        keys[0].shape[3] ** -0.5 if one.plan.scaling is None else one.plan.scaling,
        one.plan.softcap or 0.0,
        *one.activation,
    )


class Layer(NamedTuple):
    """What the fused form of a decoder layer needs to know about the layer.

    Attributes:
        first: the layer's first norm.
        steps: its attention and its feed-forward layer.
        names: names of the arguments for the input, cos and sin, the mask and the cache.
        whole: the layer in the form of the CPU's operator for whole layers; None if the layer has another structure.
    """

    first: NormOf
    steps: tuple[Step, ...]
    names: tuple[Name, Name, Name, Name]
    whole: Whole | None = None


class Following(NamedTuple):
    """The decoder layer that reads another layer's result.

    Attributes:
        layer: the decoder layer.
        alike: whether an operator can compute both layers together: they are of one :attr:`Whole.kind`, and get the same arguments.
    """

    layer: nn.Module
    alike: bool


class Ahead(threading.local):
    """Results that an operator has computed together with those of a layer in front of them, in the order in which layers are called.

    Attributes:
        source, rest: the input of the next layer, and the other arguments that all layers were computed with.
        results: the layers and their results, the next one last.
    """

    source: Tensor | None = None
    rest: Sequence[Any] = ()
    results: Sequence[tuple[nn.Module, Tensor]] = ()

    def keep(self, source: Tensor, rest: Sequence[Any], results: Sequence[tuple[nn.Module, Tensor]]) -> None:
        self.source, self.rest, self.results = (source, rest, results) if results else (None, (), ())

    def of(self, layer: nn.Module, x: Any, rest: Sequence[Any]) -> Tensor | None:
        """The result of `layer` for `x` and `rest`; None if it was not computed."""
        if not self.results:
            return None
        expected, result = self.results[-1]
        fits = expected is layer and self.source is x and all(map(operator.is_, self.rest, rest))
        self.keep(result, rest, self.results[:-1] if fits else ())
        return result if fits else None


#: Layers of more tokens than this are computed one by one: they take long themselves, and all results at once would take memory.
MOST_AHEAD = 64
#: The result of a layer's first norm, which the layer before it has computed.
_normed = Latest()
_ahead = Ahead()


def attend(
    module: nn.Module, plan: Attention, x: Tensor, turns: tuple[Tensor, Tensor], mask: Tensor, cache: Any
) -> Tensor | None:
    """The input of an attention module's last linear layer, ``[B, N, H D]``; None if the kernels do not compute it."""
    if type(cache) is not SlotCache or cache.buffers.key_scales:
        return None
    keys, values = cache.buffers.keys[plan.layer], cache.buffers.values[plan.layer]
    if cache.view > keys.shape[2]:
        return None
    norms, by = (_as_norm(plan.norms[0]), _as_norm(plan.norms[1])), plan.group[0].operands(plan.group)
    rotated = None if by is None else products.linear_rotated(x, by, norms, *turns, cache.slots, keys, values)
    if rotated is None:
        return None
    query, new_keys, new_values = rotated
    if new_keys is not None and new_values is not None:
        cache.update(new_keys, new_values, plan.layer)
    view, sinks = cache.view, None if plan.sinks is None else own_parameters(module)[plan.sinks]
    options: dict[str, Any] = dict(scaling=plan.scaling, softcap=plan.softcap, s_aux=sinks, kernel=plan.kernel)
    out, _ = attention.kernel_attention(
        module, query.transpose(1, 2), keys[:, :, :view], values[:, :, :view], mask, **options
    )
    return out.reshape(*x.shape[:-1], -1)


def taken(given: tuple, options: dict[str, Any], names: Sequence[Name]) -> list[Any]:
    """The arguments with the names `names`; None for an absent argument."""
    return [
        options.get(name) if isinstance(name, str) else given[name] if name < len(given) else None
        for name in cast(Any, names)
    ]


@functools.cache
def attention_class(plain: Any) -> type[nn.Module]:
    """The class that replaces the class `plain` of an attention module. Its objects have an :class:`Attention`."""

    def forward(self: Any, *given: Any, **options: Any) -> Any:
        plan = self.decoders_block
        inputs = taken(given, options, plan.names)
        inner = None if any(each is None for each in inputs) else attend(self, plan, *inputs)
        out = None if inner is None else plan.out(inner)
        return plain.forward(self, *given, **options) if out is None else (out, None)

    return type(plain.__name__, (plain,), {"forward": forward, "__module__": plain.__module__})


def _inner(module: Any, x: Tensor, turns: Any, mask: Tensor, cache: Any) -> tuple[Tensor | None, Any]:
    """The input of the last linear layer in an attention module or a feed-forward layer, and that linear layer."""
    if (gated := vars(module).get("decoders_gated")) is not None:
        return type(module).inner(gated, x), gated[1]
    plan = module.decoders_block
    return attend(module, plan, x, turns, mask, cache), plan.out


def _block(layer: nn.Module) -> Layer:
    return cast(Layer, vars(layer)["decoders_block"])


def _behind(layer: nn.Module, tokens: int) -> tuple[list[nn.Module], NormOf]:
    """The layers behind `layer` that an operator computes together with it, and the first norm behind these. A hook ends them, because
    it may change a result in place.
    """
    layers = [layer]
    while True:
        following: Following | None = vars(layers[-1])["decoders_following"]
        if following is None or hooks_of(layers[-1])[0] or hooks_of(following.layer)[1]:
            return layers[1:], NO_NORM
        if not following.alike or tokens > MOST_AHEAD:
            return layers[1:], _block(following.layer).first
        layers.append(following.layer)


@functools.cache
def layer_class(plain: Any) -> type[nn.Module]:
    """The class that replaces the class `plain` of a decoder layer. Its objects have a :class:`Layer`."""

    def compute(plan: Layer, x: Tensor | None, *rest: Any, own: nn.Module | None = None) -> Tensor | None:
        """The layer's result; None if it cannot be computed.

        Args:
            rest: cos and sin, the mask and the cache.
            own: the layer, if layers behind it may be computed, too, so that they have their results when they are called.
        """
        if x is None or rest[0] is None or rest[1] is None:
            return None
        traced = torch.compiler.is_dynamo_compiling()
        behind, following = ([], NO_NORM) if own is None else _behind(own, x.numel() // x.shape[-1])
        first: Any = plan.first[0]
        reads = x if first is None else first(x) if traced else _normed.of(x, first, first)
        firsts = *(_block(layer).first for layer in behind), following
        if not traced:
            _normed.forget()  # the stored tensor may belong to a recording
            if plan.whole is not None:
                wholes = [plan.whole, *(cast(Whole, _block(layer).whole) for layer in behind)]
                if (computed := whole_layers(wholes, firsts, x, reads, *rest)) is not None:
                    results, reads = computed
                    if following[0] is not None:
                        _normed.keep(results[-1], following[0], reads)
                    _ahead.keep(results[0], rest, list(zip(behind, results[1:], strict=True))[::-1])
                    return results[0]
        for step in plan.steps:
            inner, last = _inner(step.module, reads, *rest)
            if inner is None:
                return None
            after = firsts[0] if step is plan.steps[-1] else step.after
            norms = _as_norm(step.before), _as_norm(after)
            by = last.operands((last,))
            both = None if by is None else products.linear_to_residual(inner, by, x, *norms)
            if both is None:
                return None
            x, normed = both
            reads = x if after[0] is None else normed
        if firsts[0][0] is not None:
            _normed.keep(x, firsts[0][0], reads)
        return x

    def forward(self: Any, *given: Any, **options: Any) -> Any:
        x, *rest = taken(given, options, self.decoders_block.names)
        if torch.compiler.is_dynamo_compiling():
            out = compute(self.decoders_block, x, *rest)
        elif (out := _ahead.of(self, x, rest)) is None:
            if hooks_of(self)[1]:  # they may have changed the input in place
                _normed.forget()
            out = compute(self.decoders_block, x, *rest, own=self)
        return plain.forward(self, *given, **options) if out is None else out

    namespace = {"forward": forward, "compute": staticmethod(compute), "__module__": plain.__module__}
    return type(plain.__name__, (plain,), namespace)
