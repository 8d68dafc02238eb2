"""Decoder layers with fused residuals, norms and products. On the CPU, one operator may compute several layers.

:mod:`.fused_blocks` decides which layers are replaced. The parts of a layer are in :mod:`.layers`.
"""

from __future__ import annotations

import functools
import operator
import threading
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from ..attention import KIND_ATTRIBUTE, LayerKind
from ..kernels import products
from ..modules_compat import hooks_of, own_parameters
from ..slot_cache import SlotCache
from .fused_layers import Gated
from .layers import NO_NORM, Attention, Formula, Latest, NormOf, as_norm, attend, bias_of, taken
from .noted_calls import Name


class HalfLayer(NamedTuple):
    """Half of a decoder layer.

    Attributes:
        module: the attention or the feed-forward module.
        before: the norm of the module's result, before this result is added to the residual.
        after: the norm of the sum.
    """

    module: nn.Module
    before: NormOf
    after: NormOf


class Whole(NamedTuple):
    """A decoder layer in the form that the CPU's operator takes: an attention module, followed by a gated feed-forward module.

    Attributes:
        attention, plan: the attention module, and its structure.
        linear: the linear layers for queries, keys, values and the attention's output; then gate, up and down.
        norms: five norms: of queries, of keys, of the attention's result, of the sum with the residual, of the feed-forward's result.
        formula: the norms' formula; None without norms.
        activation: the argument `kind` of :func:`products.gated_linear`.
    """

    attention: nn.Module
    plan: Attention
    linear: tuple[Any, ...]
    norms: tuple[NormOf, ...]
    formula: Formula | None
    activation: int

    @classmethod
    def of(cls, halves: Sequence[HalfLayer]) -> Whole | None:
        """The decoder layer with these `halves`; None if the layer has another structure, or norms with several formulas."""
        if len(halves) != 2 or (plan := vars(halves[0].module).get("decoders_block")) is None or plan.kernel != "cpu":
            return None
        attention, gated = halves[0].module, cast(Gated | None, vars(halves[1].module).get("decoders_gated"))
        norms = *plan.norms, halves[0].before, halves[0].after, halves[1].before
        formulas = {formula for _, formula in norms if formula is not None}
        if gated is None or len(formulas) > 1:
            return None
        linear = *plan.group, plan.out, *gated.pair, gated.down
        return cls(attention, plan, linear, norms, next(iter(formulas), None), gated.kind)

    @property
    def biased(self) -> tuple[bool, ...]:
        """Which of the linear layers have a bias now."""
        return tuple(bias_of(layer) is not None for layer in self.linear)

    @property
    def kind(self) -> Hashable:
        """The arguments that must be equal for one call of the operator to compute several layers."""
        normed, plan = tuple(module is not None for module, _ in self.norms), self.plan
        return self.formula, self.activation, self.biased, normed, plan.scaling, plan.softcap, plan.sinks is None


def whole_layers(
    layers: Sequence[Whole], firsts: Sequence[NormOf], x: Tensor, reads: Tensor, turns: tuple[Tensor, Tensor],
    mask: Tensor, cache: Any,
) -> tuple[list[Tensor], Tensor] | None:  # fmt: skip
    """Computes consecutive `layers` of the same :attr:`Whole.kind` with one call of the operator.

    Args:
        firsts: for each layer, the first norm of the next layer; :data:`NO_NORM` for the last layer if that norm is not computed.
        reads: `x`, normalized by the first norm of the first layer.
        turns: cos and sin of the rotary positions.

    Returns:
        the layers' results, and the last result normalized by the last norm in `firsts`; None if the operator rejects `layers`.
    """
    one = layers[0]
    formula = one.formula or firsts[0][1] or Formula(0.0, False, False)
    if (
        type(cache) is not SlotCache
        or not cache.is_read_as_stored
        or any(own not in (None, formula) for _, own in firsts)
    ):
        return None
    linear = [own for layer in layers for own in layer.linear]
    by = linear[0].operands(linear) if len({*map(type, linear)}) == 1 else None
    if by is None:
        return None
    of = cache.buffers
    keys, values, key_scales, value_scales = (
        [tensors[layer.plan.layer] for layer in layers] if tensors else []
        for tensors in (of.keys, of.values, of.key_scales, of.value_scales)
    )
    norms = [module for layer, first in zip(layers, firsts, strict=True) for module, _ in (*layer.norms, first)]
    weights = [own_parameters(module)["weight"] for module in norms if module is not None]
    biased = sum(has << place for place, has in enumerate(one.biased))
    normed = sum((module is not None) << place for place, module in enumerate(norms[: len(one.norms) + 1]))
    sinks = [own_parameters(layer.attention)[layer.plan.sinks] for layer in layers if layer.plan.sinks is not None]
    # Windows are read in every call, because the self-check shortens them.
    kinds = [getattr(layer.attention, KIND_ATTRIBUTE, LayerKind()) for layer in layers]
    scaling = keys[0].shape[3] ** -0.5 if one.plan.scaling is None else one.plan.scaling
    return products.decoder_layers(
        x, reads, by.matrices, by.scales, by.biases, biased, by.digits, weights, normed, *formula, *turns,
        cache.slots, keys, values, key_scales, value_scales, cache.view, mask, sinks,
        [kind.window or 0 for kind in kinds], [kind.chunk or 0 for kind in kinds], scaling, one.plan.softcap or 0.0,
        one.activation,
    )  # fmt: skip


class Layer(NamedTuple):
    """The structure of a decoder layer, as the fused layer needs it.

    Attributes:
        first: the layer's first norm.
        halves: its attention and its feed-forward layer.
        names: names of the arguments for the input, cos and sin, the mask and the cache.
        whole: the layer in the form of the CPU's operator for whole layers; None if the layer has another structure.
    """

    first: NormOf
    halves: tuple[HalfLayer, ...]
    names: tuple[Name, Name, Name, Name]
    whole: Whole | None = None


class Following(NamedTuple):
    """The decoder layer that reads a layer's result.

    Attributes:
        layer: the decoder layer.
        alike: whether one call of the operator can compute both layers: their :attr:`Whole.kind` and their other arguments are equal.
    """

    layer: nn.Module
    alike: bool


class Ahead(threading.local):
    """Results that the operator has computed ahead, in the call of an earlier layer, for layers that are called later.

    Attributes:
        source, rest: the input of the layer that is called next, and the other arguments, which are the same for all layers.
        results: pairs of a layer and its result; the layer that is called next comes last.
    """

    source: Tensor | None = None
    rest: Sequence[Any] = ()
    results: Sequence[tuple[nn.Module, Tensor]] = ()

    def keep(self, source: Tensor, rest: Sequence[Any], results: Sequence[tuple[nn.Module, Tensor]]) -> None:
        self.source, self.rest, self.results = (source, rest, results) if results else (None, (), ())

    def of(self, layer: nn.Module, x: Any, rest: Sequence[Any]) -> Tensor | None:
        """The result of `layer` for `x` and `rest`; None if it was not computed ahead."""
        if not self.results:
            return None
        expected, result = self.results[-1]
        fits = expected is layer and self.source is x and all(map(operator.is_, self.rest, rest))
        self.keep(result, rest, self.results[:-1] if fits else ())
        return result if fits else None


#: With more tokens than this, layers are computed one by one: each takes long anyway, and the results of all layers would need memory.
MOST_AHEAD = 64
#: A layer's result after the first norm of the next layer. The operator that computes the layer also computes this norm.
_normed = Latest()
_ahead = Ahead()


def _inner(module: Any, x: Tensor, turns: Any, mask: Tensor, cache: Any) -> tuple[Tensor | None, Any]:
    """Computes an attention or feed-forward module except its last linear layer. Returns the input of that layer (None if no kernel
    computes it), and the layer.
    """
    if (gated := vars(module).get("decoders_gated")) is not None:
        return gated.inner(x), gated.down
    plan = module.decoders_block
    return attend(module, plan, x, turns, mask, cache), plan.out


def _block(layer: nn.Module) -> Layer:
    return cast(Layer, vars(layer)["decoders_block"])


def _behind(layer: nn.Module, tokens: int) -> tuple[list[nn.Module], NormOf]:
    """The layers after `layer` that an operator computes together with it, and the first norm of the next layer after these. A layer
    with a hook ends the list, because the hook may change the layer's result in place.
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
    """The class that replaces `plain`, a class of decoder layers. Its objects store a :class:`Layer` as ``decoders_block``."""

    def compute(plan: Layer, x: Tensor | None, *rest: Any, own: nn.Module | None = None) -> Tensor | None:
        """The layer's result; None if no kernel computes it.

        Args:
            rest: cos and sin, the mask and the cache.
            own: the layer, if this call may also compute the layers after it; None to compute only this layer.
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
        for half in plan.halves:
            inner, last = _inner(half.module, reads, *rest)
            if inner is None:
                return None
            after = firsts[0] if half is plan.halves[-1] else half.after
            norms = as_norm(half.before), as_norm(after)
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
            if hooks_of(self)[1]:  # pre-hooks may have changed the input in place
                _normed.forget()
            out = compute(self.decoders_block, x, *rest, own=self)
        return plain.forward(self, *given, **options) if out is None else out

    namespace = {"forward": forward, "compute": staticmethod(compute), "__module__": plain.__module__}
    return type(plain.__name__, (plain,), namespace)
