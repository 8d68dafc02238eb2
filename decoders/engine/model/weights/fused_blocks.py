"""Chooses the decoder layers to fuse. The products of a fused layer also compute residuals, norms and rotary positions.

A pass over a few tokens shows what a layer computes: which module reads which result, and which results are added to the residual.
Then the fused layer runs on trial. If its result differs from the layer's own result, the layer stays unfused.
"""

from __future__ import annotations

import functools
import inspect
import logging
import operator
from collections.abc import Callable, Hashable, Sequence
from itertools import pairwise
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from ..kernels import attention
from ..modules_compat import hooks_of, own_parameters
from ..slot_cache import SlotCache
from .decoder_layers import Following, HalfLayer, Layer, Whole, layer_class
from .fused import outputs_of
from .fused_layers import LOUD, close
from .layers import NO_NORM, Attention, Joint, NormOf, attend, taken
from .noted_calls import ORDER, Call, Name, noted_calls, once

_log = logging.getLogger("decoders")
Result = TypeVar("Result")


@torch.no_grad()
def fuse_blocks(
    layers: Sequence[nn.Module], kernel: attention.Kernel, run: Callable[[Callable[[SlotCache], None]], Any]
) -> int:
    """Fuses those decoder `layers` in our copy of a model that have a known structure. Returns the number of fused layers.

    kernel: computes the model's attention; run: takes a function, calls it with the cache, then runs the model on a few tokens.
    """
    if any(
        any(hooks_of(module)) or "forward" in vars(module)
        for layer in layers
        for module in layer.modules()
        if module is not layer
    ):
        return 0
    calls, attended = noted_calls(layers, kernel, run)
    for layer in layers:
        for module in layer.children():
            if (
                module in attended
                and (plan := _tried(_attention, module, calls, kernel, *attended[module])) is not None
            ):
                module.__class__, vars(module)["decoders_block"] = attention_class(cast(Hashable, type(module))), plan
    fused = [_fuse(layer, calls) for layer in layers]
    for one, other in pairwise(fused):
        if one is not None and other is not None and other.name_of(one.result) is not None:
            # Following is not a field of Layer, because a compiled region would then take the following layer's weights as inputs.
            vars(one.module)["decoders_following"] = Following(other.module, _alike(one, other))
    return sum(call is not None for call in fused)


def _fuse(layer: nn.Module, calls: dict[nn.Module, list[Call]]) -> Call | None:
    """Fuses a decoder layer, and returns its call; None if its structure is unknown, or if the fused layer has other results."""
    call, chosen = once(calls, layer), _tried(_layer, layer, calls)
    if call is None or chosen is None:
        return None
    fused_class, inputs = layer_class(cast(Hashable, type(layer))), taken(call.given, call.options, chosen.names)
    compute = fused_class.compute  # type: ignore[attr-defined]
    # Without halves, only the operator for whole layers can give the result.
    if chosen.whole is not None and not close(_tried(compute, chosen._replace(halves=()), *inputs), call.result, layer):
        chosen = chosen._replace(whole=None)
    if not close(_tried(compute, chosen, *inputs), call.result, layer):
        return None
    layer.__class__, vars(layer)["decoders_block"], vars(layer)["decoders_following"] = fused_class, chosen, None
    return call


def _alike(one: Call, other: Call) -> bool:
    """Whether an operator can compute the layers of the two calls together."""
    plans = [vars(call.module)["decoders_block"] for call in (one, other)]
    rest = [taken(call.given, call.options, plan.names)[1:] for call, plan in zip((one, other), plans, strict=True)]
    wholes, formulas = [plan.whole for plan in plans], [plan.first[1] for plan in plans]
    kinds = None not in wholes and wholes[0].kind == wholes[1].kind and formulas[0] == formulas[1]
    return kinds and all(map(operator.is_, *rest))


def is_whole(layer: nn.Module) -> bool:
    """Whether an operator computes `layer` as a whole."""
    plan = vars(layer).get("decoders_block")
    return isinstance(plan, Layer) and plan.whole is not None


def _tried(function: Callable[..., Result], *given: Any) -> Result | None:
    """Returns ``function(*given)``; None after an error: the part of a layer then stays unfused, which is only slower."""
    try:
        return function(*given)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # the layer has another structure, or a kernel needs more resources than the GPU has
        _log.info("part of a layer runs unfused: %s: %s", type(error).__name__, error)
        return None


def _norm_of(module: nn.Module) -> NormOf | None:
    formula = getattr(type(module), "decoders_formula", None)
    return None if formula is None else (module, formula)


def _attention(
    module: nn.Module, calls: dict[nn.Module, list[Call]], kernel: attention.Kernel, query: Tensor, mask: Tensor,
    options: dict[str, Any], update: tuple,
) -> Attention | None:  # fmt: skip
    """The structure of an attention module; None if it is unknown. The last four arguments are as `noted_calls` returns them."""
    call, (cache, key_states, value_states, number) = once(calls, module), update
    linear: list[Any] = [m for m in module.children() if isinstance(m, Joint) and once(calls, m)]
    group = linear[0].group if linear else None
    norms = [norm for m in module.children() if once(calls, m) and (norm := _norm_of(m)) is not None]
    width, result = query.shape[3], call.result if call is not None else None
    if call is None or group is None or len(group) != 3 or len(norms) not in (0, 2) or type(cache) is not SlotCache:
        return None
    if any(product not in linear for product in group):  # it is inside an adapter, which adds to its result
        return None
    if not isinstance(result, tuple) or len(result) != 2 or result[1] is not None:
        return None
    out = next((m for m in linear if m not in group and calls[m][0].result is result[0]), None)
    reads: Any = calls[group[0]][0].given[0] if calls[group[0]][0].given else None
    turns = next(
        (v for v in call.options.values() if isinstance(v, tuple) and len(v) == 2 and isinstance(v[0], Tensor)), None
    )
    names = tuple(map(call.name_of, (reads, turns, mask, cache)))
    same = key_states.shape[3] == value_states.shape[3] == width and key_states.shape[1] == value_states.shape[1]
    sizes = list(map(outputs_of, group))
    # A module with further tensor arguments (positions) stays unfused: the trial's text may be too short to show their effect.
    named = inspect.signature(type(module).forward).parameters
    more = [value for name, value in call.options.items() if name in named and name not in names]
    if any(isinstance(value, Tensor) for value in (*more, *(v for i, v in enumerate(call.given) if i not in names))):
        return None
    if out is None or turns is None or None in names or not same or turns[0].dim() != 3 or turns[0].shape[-1] != width:
        return None
    if sizes != [heads * width for heads in (query.shape[1], key_states.shape[1], value_states.shape[1])]:
        return None
    if norms and (norms[0][1] != norms[1][1] or any(len(own_parameters(m)["weight"]) != width for m, _ in norms if m)):  # type: ignore[arg-type]
        return None
    sinks = next(
        (name for name, own in own_parameters(module).items() if own is not None and own is options.get("s_aux")), None
    )
    if sinks is None and options.get("s_aux") is not None:
        return None
    both = cast(tuple[NormOf, NormOf], tuple(norms) or (NO_NORM, NO_NORM))
    scaling, softcap = options.get("scaling"), options.get("softcap")
    plan = Attention(tuple(group), out, both, cast(Any, names), number, scaling, softcap, sinks, kernel)
    buffers, rows = (cache.buffers.keys[number], cache.buffers.values[number]), torch.arange(len(cache.slots))[:, None]

    def written() -> list[Tensor]:
        return [buffer[rows.to(buffer.device), :, cache.slots].transpose(1, 2) for buffer in buffers]

    for buffer in buffers:
        buffer.zero_()
    tried = attend(module, plan, reads, turns, mask, cache)
    if tried is None or not close(out(tried), result[0], out):
        return None
    if not all(close(own, other) for own, other in zip(written(), (key_states, value_states), strict=True)):
        return None
    # Large inputs show whether the module clamps keys or values.
    for factor in LOUD:
        loud = factor * reads
        module(
            *(loud if v is reads else v for v in call.given),
            **{k: loud if v is reads else v for k, v in call.options.items()},
        )
        plain = written()
        if all(own.isfinite().all() for own in plain):
            break
    for buffer in buffers:
        buffer.zero_()
    attend(module, plan, loud, turns, mask, cache)
    return plan if all(close(own, other) for own, other in zip(written(), plain, strict=True)) else None


def _layer(layer: nn.Module, calls: dict[nn.Module, list[Call]]) -> Layer | None:
    """The structure of a decoder layer; None if it is unknown."""
    call, children = once(calls, layer), set(layer.children())
    order = [each for each in calls[ORDER] if each.module in children]
    if call is None or not isinstance(call.result, Tensor) or any(len(calls[each.module]) > 1 for each in order):
        return None
    stream: Any = next(
        (v for v in (*call.given, *call.options.values()) if isinstance(v, Tensor) and v.dim() == 3), None
    )
    names: tuple[Name, ...] | None = None
    norms: list[NormOf] = []  # the norm before each half
    halves: list[HalfLayer] = []
    begin, place = call.name_of(stream), 0
    while place < len(order):
        reads, norm = stream, NO_NORM
        if (
            (known := _norm_of(order[place].module)) is not None
            and order[place].given[:1]
            and order[place].given[0] is stream
        ):
            reads, norm = order[place].result, known
            place += 1
        if place == len(order) or order[place].name_of(reads) is None:
            return None
        step, before = order[place], NO_NORM
        own: Any = vars(step.module)
        result = step.result[0] if isinstance(step.result, tuple) else step.result
        if "decoders_block" in own:
            inputs = taken(step.given, step.options, own["decoders_block"].names)
            names = (begin, *map(call.name_of, inputs[1:]))
        elif "decoders_gated" not in own:
            return None
        place += 1
        if (
            place < len(order)
            and (known := _norm_of(order[place].module)) is not None
            and order[place].given[:1]
            and order[place].given[0] is result
        ):
            result, before = order[place].result, known
            place += 1
        if place == len(order):
            following: Any = call.result
        else:
            following = next(
                (v for v in (*order[place].given, *order[place].options.values()) if isinstance(v, Tensor)), None
            )
        if not isinstance(following, Tensor) or not torch.equal(stream + result, following):
            return None
        stream = following
        norms.append(norm)
        halves.append(HalfLayer(step.module, before, NO_NORM))
    if names is None or None in names:
        return None
    halves = [half._replace(after=norm) for half, norm in zip(halves, [*norms[1:], NO_NORM], strict=True)]
    return Layer(norms[0], tuple(halves), cast(Any, names), Whole.of(halves))


@functools.cache
def attention_class(plain: Any) -> type[nn.Module]:
    """The class that replaces `plain`, a class of attention modules. Its objects store an :class:`Attention` as ``decoders_block``."""

    def forward(self: Any, *given: Any, **options: Any) -> Any:
        plan = self.decoders_block
        inputs = taken(given, options, plan.names)
        inner = None if any(each is None for each in inputs) else attend(self, plan, *inputs)
        out = None if inner is None else plan.out(inner)
        return plain.forward(self, *given, **options) if out is None else (out, None)

    return type(plain.__name__, (plain,), {"forward": forward, "__module__": plain.__module__})
