"""Fused parts of layers: gated feed-forward layers, and rotary positions on CPUs.

In a small layer, the operations around the products cost as much as the products, mostly in calls. A part is recognized by its
results: the kernel runs on random numbers, and the part stays unfused if results differ by more than rounding.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable
from types import FunctionType
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels import cpu, epilogues
from ..kernels.products import has_kernel
from ..torch_compat import hooks_of
from .few_rows import FewRows, product_of
from .fused import outputs_of

#: First parameters of functions that apply rotary positions.
_ROTATED = ["q", "k", "cos", "sin"]
#: Trials are repeated with inputs this many times as large, to detect clamps.
LOUD = 64
#: Activations in the order of their numbers in the kernel.
ACTIVATIONS: tuple[Callable[[Tensor], Tensor], ...] = (F.silu, functools.partial(F.gelu, approximate="tanh"))


@torch.no_grad()
def fuse_layers(model: nn.Module) -> None:
    """Fuses parts of the layers of `model`, a private copy whose linear layers are already replaced, if there are kernels."""
    devices = {parameter.device for parameter in model.parameters()}
    kernels = cpu.chosen().kernels if all(device.type == "cpu" for device in devices) else None
    if kernels is None and not all(map(has_kernel, devices)):
        return
    rotating: dict[type[nn.Module], type[nn.Module] | None] = {}
    for module in model.modules():
        if "forward" in vars(module):
            continue
        kind = type(module)
        if kind not in rotating:
            rotating[kind] = None if kernels is None else _rotating(kind, kernels.rotary)
        if (gated := _gated(module, None if kernels is None else kernels.gated_activation)) is not None:
            module.__class__, vars(module)["decoders_gated"] = gated
        elif (replaced := rotating[kind]) is not None:
            module.__class__ = replaced


def _gated(module: nn.Module, activation: Callable | None) -> tuple[type[nn.Module], tuple] | None:
    """The class that replaces a gated feed-forward layer, ``down(activation(gate(x)) * up(x))``, and its linear layers.

    activation: see :func:`~decoders.engine.model.kernels.epilogues.gated_linear`.
    """
    children = list(module.children())
    linear: list[Any] = [child for child in children if isinstance(child, FewRows)]
    others = [child for child in children if not isinstance(child, FewRows)]
    pair: tuple[Any, ...] = next((child.group for child in linear if child.group is not None), ())
    # gate and up are a group: same input, same storage.
    if len(linear) != 3 or len(pair) != 2 or sum(child.group is pair for child in linear) != 2 or len(others) != 1:
        return None
    if any(True for _ in others[0].parameters()) or any(any(hooks_of(child)) for child in children):
        return None
    down = next(each for each in linear if each is not pair[0] and each is not pair[1])
    if outputs_of(pair[0]) != outputs_of(pair[1]) or (kind := _activation(others[0])) is None:
        return None
    inputs, weight = pair[0].matrix().shape[1], pair[0].weight
    x = torch.randn(1, 4, inputs, generator=torch.Generator().manual_seed(0), device="cpu").to(weight)
    try:
        expected, loud = module(x), module(LOUD * x)
    except Exception:  # other arguments
        return None
    if not isinstance(expected, Tensor) or not isinstance(loud, Tensor):
        return None
    for gate_first in (True, False):
        stand_in = _gated_class(cast(Hashable, type(module)), activation, kind, gate_first)
        tried = stand_in.compute((pair, down), x)  # type: ignore[attr-defined]
        if tried is None or not close(tried, expected):
            continue
        tried = stand_in.compute((pair, down), LOUD * x)  # type: ignore[attr-defined]
        if tried is not None and close(tried, loud):
            return stand_in, (pair, down)
    return None


@functools.cache
def _gated_class(plain: Any, activation: Callable | None, kind: int, gate_first: bool) -> type[nn.Module]:
    def inner(parts: tuple, x: Tensor) -> Tensor | None:
        pair = parts[0]
        biases = [] if pair[0].bias is None else [layer.bias for layer in pair]
        return epilogues.gated_linear(x, [layer.matrix() for layer in pair], biases, kind, gate_first, activation)

    def compute(parts: tuple, x: Tensor) -> Tensor | None:
        middle = inner(parts, x)
        return None if middle is None else product_of(middle, (parts[1],))

    def forward(self: Any, x: Tensor, *more: Any, **options: Any) -> Any:
        # Skips the calls of the parts, and so their hooks: a layer whose parts have hooks is not fused.
        out = None if more or options else compute(self.decoders_gated, x)
        return plain.forward(self, x, *more, **options) if out is None else out

    parts = {"inner": staticmethod(inner), "compute": staticmethod(compute)}
    namespace = {"forward": forward, **parts, "__module__": plain.__module__}
    return type(plain.__name__, (plain,), namespace)


def _activation(module: nn.Module) -> int | None:
    """The number of the activation that `module` computes."""
    x = torch.linspace(-12, 12, 1001, device="cpu")
    try:
        out = module(x)
    except Exception:  # not an activation
        return None
    if not isinstance(out, Tensor):
        return None
    return next((n for n, known in enumerate(ACTIVATIONS) if torch.allclose(out, known(x), rtol=1e-6, atol=1e-7)), None)


def close(ours: Tensor | None, other: Tensor) -> bool:
    """Whether `ours` and `other` differ by rounding only."""
    if ours is None or ours.shape != other.shape:
        return False
    error = (ours.float() - other.float()).abs().max()
    return bool(error <= 8 * torch.finfo(other.dtype).eps * other.float().abs().max().clamp(min=1e-6))


def _rotating(plain: Any, rotary: Callable) -> type[nn.Module] | None:
    """The class that replaces a class whose ``forward`` calls a function for rotary positions: the same code with the kernel's.

    Created for every model, since it has the functions that the code refers to at that time.
    """
    function = inspect.unwrap(plain.forward)
    if not isinstance(function, FunctionType):
        return None
    rotates = {name for name in function.__code__.co_names if _is_rotary(function.__globals__.get(name))}
    if not rotates:
        return None
    spaces = function.__globals__ | {name: _rotary(function.__globals__[name], rotary) for name in rotates}
    forward = FunctionType(function.__code__, spaces, function.__name__, function.__defaults__, function.__closure__)
    forward.__kwdefaults__ = function.__kwdefaults__

    def either(self: Any, *given: Any, **options: Any) -> Any:
        # Dynamo looks up a function's globals in their module, so compiled code runs the original. The bits are the same.
        run = plain.forward if torch.compiler.is_dynamo_compiling() else forward
        return run(self, *given, **options)

    return type(plain.__name__, (plain,), {"forward": either, "__module__": plain.__module__})


def _is_rotary(function: Any) -> bool:
    """Whether ``function(q, k, cos, sin)`` applies rotary positions to the two halves of every head."""
    if not isinstance(function, FunctionType) or list(inspect.signature(function).parameters)[:4] != _ROTATED:
        return False
    generator = torch.Generator().manual_seed(0)
    q, k, angles = (
        torch.randn(*size, generator=generator, device="cpu") for size in ((2, 4, 3, 8), (2, 2, 3, 8), (2, 3, 8))
    )
    cos, sin = angles.cos(), angles.sin()
    try:
        turned = function(q, k, cos, sin)
    except Exception:  # another function
        return False
    if not isinstance(turned, tuple) or len(turned) != 2:
        return False
    return all(
        close(ours, own * cos[:, None] + _half_turned(own) * sin[:, None])
        for ours, own in zip(turned, (q, k), strict=True)
    )


def _half_turned(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


def _rotary(plain: Callable, rotary: Callable) -> Callable:
    def apply(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *more: Any, **options: Any) -> tuple[Tensor, Tensor]:
        fits = (
            q.dtype == k.dtype == cos.dtype == sin.dtype
            and q.dtype in cpu.TYPES
            and cos.dim() == 3
            and q.dim() == k.dim() == 4
            and q.shape[-1] == cos.shape[-1]
        )
        if more or options or not fits or q.stride(-1) != 1 or k.stride(-1) != 1:
            return plain(q, k, cos, sin, *more, **options)
        cos, sin = cos.contiguous(), sin.contiguous()
        return rotary(q, cos, sin).transpose(1, 2), rotary(k, cos, sin).transpose(1, 2)

    return apply
