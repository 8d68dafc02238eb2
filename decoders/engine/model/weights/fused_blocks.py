"""Fused decoder layers on CUDA: a product's last kernel also computes residuals, norms, rotary positions and writes to the cache.

A pass over a few tokens shows what a layer computes: which module reads another module's result, and that a residual is the sum of two
results, bit for bit. Then the fused layer runs on trial: if the layer computes more, results differ, and it stays unfused.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Hashable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn

from ..cache import SlotCache
from ..kernels import Norm, attention, epilogues
from ..torch_compat import hooks_of, own_parameters
from .few_rows import FewRowsConv1D, FewRowsLinear, product_of
from .fused import Latest
from .fused_layers import LOUD, close
from .noted_calls import ORDER, Call, Name, noted_calls, once
from .same_bits import Formula

_log = logging.getLogger("decoders")
Result = TypeVar("Result")
#: A norm's module and its formula; None without a norm.
NormOf = tuple[nn.Module | None, Formula | None]
NO_NORM: NormOf = (None, None)


class Attention(NamedTuple):
    """What an attention module computes.

    Attributes:
        group: its layers of queries, keys and values, with a joint product.
        out: its last layer.
        norms: of the heads of queries and keys.
        names: names of the arguments for its input, cos and sin, the mask and the cache.
        layer: its number in the cache.
        scaling, softcap: of scores.
        sinks: the name of the parameter with sinks, or None.
    """

    group: tuple[Any, ...]
    out: Any
    norms: tuple[NormOf, NormOf]
    names: tuple[Name, Name, Name, Name]
    layer: int
    scaling: float | None
    softcap: float | None
    sinks: str | None


class Step(NamedTuple):
    """Half of a decoder layer: a module, a norm of its result before the sum with the residual, and a norm of the sum."""

    module: nn.Module
    before: NormOf
    after: NormOf


class Layer(NamedTuple):
    """What a decoder layer computes.

    Attributes:
        first: the first norm.
        steps: attention and feed-forward layers.
        names: names of the arguments for its input, cos and sin, the mask and the cache.
    """

    first: NormOf
    steps: tuple[Step, ...]
    names: tuple[Name, Name, Name, Name]


#: The result of a layer's first norm, computed by the layer before it.
_normed = Latest()


@torch.no_grad()
def fuse_blocks(layers: Sequence[nn.Module], run: Callable[[Callable[[SlotCache], None]], Any]) -> int:
    """Fuses the `layers` of a private copy that runs the CUDA attention kernel, if their structure is known; returns their number.

    run: calls its argument with the cache, then runs the model on a few tokens.
    """
    if any(
        any(hooks_of(module)) or "forward" in vars(module)
        for layer in layers
        for module in layer.modules()
        if module is not layer
    ):
        return 0
    with noted_calls(layers, run) as (calls, attended):
        pass
    for layer in layers:
        for module in layer.children():
            if module in attended and (plan := _tried(_attention, module, calls, *attended[module])) is not None:
                module.__class__, vars(module)["decoders_block"] = _attention_class(cast(Hashable, type(module))), plan
    fused: list[Call | None] = []
    for layer in layers:
        chosen, call = _tried(_layer, layer, calls) or (None, None)
        kind = _layer_class(cast(Hashable, type(layer)))
        compute = kind.compute  # type: ignore[attr-defined]
        tried = None if chosen is None or call is None else _tried(compute, chosen, call.given, call.options)
        computes = tried is not None and call is not None and close(tried, call.result)
        if computes:
            layer.__class__, vars(layer)["decoders_block"], vars(layer)["decoders_following"] = kind, chosen, NO_NORM
        fused.append(call if computes else None)
    for one, other in pairwise(fused):
        if one is not None and other is not None and other.name_of(one.result) is not None:
            # Stored separately, because a compiled region would take another layer's values as inputs.
            vars(one.module)["decoders_following"] = vars(other.module)["decoders_block"].first
    return sum(call is not None for call in fused)


def _tried(function: Callable[..., Result], *given: Any) -> Result | None:
    """``function(*given)``, or None if it fails: an unfused part only loses time."""
    try:
        return function(*given)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # another design, or a kernel that exceeds the GPU
        _log.info("part of a layer runs unfused: %s: %s", type(error).__name__, error)
        return None


def _norm_of(module: nn.Module) -> NormOf | None:
    formula = getattr(type(module), "decoders_formula", None)
    return None if formula is None else (module, formula)


def _as_norm(norm: NormOf) -> Norm:
    module, formula = norm
    return Norm() if module is None or formula is None else Norm(own_parameters(module)["weight"], *formula)


def _attention(
    module: nn.Module, calls: dict[nn.Module, list[Call]], query: Tensor, mask: Tensor, options: dict[str, Any], update: tuple
) -> Attention | None:  # fmt: skip
    call, (cache, key_states, value_states, layer) = once(calls, module), update
    linear: list[Any] = [
        m for m in module.children() if isinstance(m, FewRowsLinear | FewRowsConv1D) and once(calls, m)
    ]
    group = linear[0].group if linear else None
    norms = [norm for m in module.children() if once(calls, m) and (norm := _norm_of(m)) is not None]
    width, result = query.shape[3], call.result if call is not None else None
    if call is None or group is None or len(group) != 3 or len(norms) not in (0, 2) or type(cache) is not SlotCache:
        return None
    if not isinstance(result, tuple) or len(result) != 2 or result[1] is not None or cache.buffers.key_scales:
        return None
    out = next((m for m in linear if m not in group and calls[m][0].result is result[0]), None)
    reads: Any = calls[group[0]][0].given[0] if calls[group[0]][0].given else None
    turns = next(
        (v for v in call.options.values() if isinstance(v, tuple) and len(v) == 2 and isinstance(v[0], Tensor)), None
    )
    names = tuple(map(call.name_of, (reads, turns, mask, cache)))
    same = key_states.shape[3] == value_states.shape[3] == width and key_states.shape[1] == value_states.shape[1]
    sizes = [len(m.matrix()) for m in group]
    # An attention with further tensor arguments (positions) may use them beyond the length of the trial.
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
    plan = Attention(tuple(group), out, both, cast(Any, names), layer, scaling, softcap, sinks)
    buffers, rows = (cache.buffers.keys[layer], cache.buffers.values[layer]), torch.arange(len(cache.slots))[:, None]

    def written() -> list[Tensor]:
        return [buffer[rows.to(buffer.device), :, cache.slots].transpose(1, 2) for buffer in buffers]

    for buffer in buffers:
        buffer.zero_()
    tried = attend(module, plan, reads, turns, mask, cache)
    if tried is None or not close(product_of(tried, (out,)), result[0]):
        return None
    if not all(close(own, other) for own, other in zip(written(), (key_states, value_states), strict=True)):
        return None
    # Large inputs show whether the module clamps keys or values.
    loud = LOUD * reads
    module(
        *(loud if v is reads else v for v in call.given),
        **{k: loud if v is reads else v for k, v in call.options.items()},
    )
    plain = written()
    for buffer in buffers:
        buffer.zero_()
    attend(module, plan, loud, turns, mask, cache)
    return plan if all(close(own, other) for own, other in zip(written(), plain, strict=True)) else None


def attend(
    module: nn.Module, plan: Attention, x: Tensor, turns: tuple[Tensor, Tensor], mask: Tensor, cache: Any
) -> Tensor | None:
    """The input of an attention module's last layer, ``[B, N, H D]``; None if the kernels do not compute it."""
    if type(cache) is not SlotCache or cache.buffers.key_scales or cache.view > cache.buffers.slots:
        return None
    keys, values = cache.buffers.keys[plan.layer], cache.buffers.values[plan.layer]
    matrices, group = [layer.matrix() for layer in plan.group], plan.group
    biases = [] if group[0].bias is None else [layer.bias for layer in group]
    norms = _as_norm(plan.norms[0]), _as_norm(plan.norms[1])
    rotated = epilogues.linear_rotated(x, matrices, biases, norms, *turns, cache.slots, keys, values)
    if rotated is None:
        return None
    query, new_keys, new_values = rotated
    if new_keys is not None and new_values is not None:
        cache.update(new_keys, new_values, plan.layer)
    view, sinks = cache.view, None if plan.sinks is None else own_parameters(module)[plan.sinks]
    options: dict[str, Any] = dict(scaling=plan.scaling, softcap=plan.softcap, s_aux=sinks)
    out, _ = attention.kernel_attention(
        module, query.transpose(1, 2), keys[:, :, :view], values[:, :, :view], mask, **options
    )
    return out.reshape(*x.shape[:-1], -1)


def _taken(given: tuple, options: dict[str, Any], names: Sequence[Name]) -> list[Any]:
    """Arguments by name, None for absent arguments."""
    return [
        options.get(name) if isinstance(name, str) else given[name] if name < len(given) else None
        for name in cast(Any, names)
    ]


@functools.cache
def _attention_class(plain: Any) -> type[nn.Module]:
    def forward(self: Any, *given: Any, **options: Any) -> Any:
        plan = self.decoders_block
        inputs = _taken(given, options, plan.names)
        inner = None if any(each is None for each in inputs) else attend(self, plan, *inputs)
        out = None if inner is None else product_of(inner, (plan.out,))
        return plain.forward(self, *given, **options) if out is None else (out, None)

    return type(plain.__name__, (plain,), {"forward": forward, "__module__": plain.__module__})


def _inner(module: Any, x: Tensor, turns: Any, mask: Tensor, cache: Any) -> tuple[Tensor | None, Any]:
    """The input of the last linear layer of attention or a feed-forward layer, and this linear layer."""
    if (gated := vars(module).get("decoders_gated")) is not None:
        return type(module).inner(gated, x), gated[1]
    plan = module.decoders_block
    return attend(module, plan, x, turns, mask, cache), plan.out


def _layer(layer: nn.Module, calls: dict[nn.Module, list[Call]]) -> tuple[Layer | None, Call | None]:
    """The structure of a decoder layer, and its call; None twice if the structure is unknown."""
    call, children = once(calls, layer), set(layer.children())
    order = [each for each in calls[ORDER] if each.module in children]
    nothing = None, None
    if call is None or not isinstance(call.result, Tensor) or any(len(calls[each.module]) > 1 for each in order):
        return nothing
    stream: Any = next(
        (v for v in (*call.given, *call.options.values()) if isinstance(v, Tensor) and v.dim() == 3), None
    )
    names: tuple[Name, ...] | None = None
    norms: list[NormOf] = []  # in front of each step
    steps: list[Step] = []
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
            return nothing
        step, before = order[place], NO_NORM
        own: Any = vars(step.module)
        result = step.result[0] if isinstance(step.result, tuple) else step.result
        if "decoders_block" in own:
            inputs = _taken(step.given, step.options, own["decoders_block"].names)
            names = (begin, *map(call.name_of, inputs[1:]))
        elif "decoders_gated" not in own:
            return nothing
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
            return nothing
        stream = following
        norms.append(norm)
        steps.append(Step(step.module, before, NO_NORM))
    if names is None or None in names:
        return nothing
    steps = [step._replace(after=norm) for step, norm in zip(steps, [*norms[1:], NO_NORM], strict=True)]
    return Layer(norms[0], tuple(steps), cast(Any, names)), call


@functools.cache
def _layer_class(plain: Any) -> type[nn.Module]:
    def compute(plan: Layer, given: tuple, options: dict[str, Any], following: NormOf = NO_NORM) -> Tensor | None:
        x, turns, mask, cache = _taken(given, options, plan.names)
        if x is None or turns is None or mask is None:
            return None
        traced = torch.compiler.is_dynamo_compiling()
        first: Any = plan.first[0]
        reads = x if first is None else first(x) if traced else _normed.of(x, first, first)
        if not traced:
            _normed.forget()  # it may belong to a recording
        for step in plan.steps:
            inner, last = _inner(step.module, reads, turns, mask, cache)
            if inner is None:
                return None
            after = following if step is plan.steps[-1] else step.after
            norms = _as_norm(step.before), _as_norm(after)
            both = epilogues.linear_to_residual(inner, last.matrix(), last.bias, x, *norms)
            if both is None:
                return None
            x, normed = both
            reads = x if after[0] is None else normed
        if following[0] is not None:
            _normed.keep(x, following[0], reads)
        return cast(Tensor, x)

    def forward(self: Any, *given: Any, **options: Any) -> Any:
        following = NO_NORM if torch.compiler.is_dynamo_compiling() else self.decoders_following
        out = compute(self.decoders_block, given, options, following)
        return plain.forward(self, *given, **options) if out is None else out

    namespace = {"forward": forward, "compute": staticmethod(compute), "__module__": plain.__module__}
    return type(plain.__name__, (plain,), namespace)
