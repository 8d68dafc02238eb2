"""Fuses gated feed-forward layers, and finds out which layers of a model can be fused.

In a small layer, the operators around the products cost as much as the products, mostly by call overhead. A layer is recognized by
its results: the layer and the kernel run on random numbers. If their results differ by more than rounding, the layer stays unfused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels import products
from ..modules_compat import hooks_of
from .fused import outputs_of
from .layers import Joint

#: A trial also runs with inputs times the first of these factors that gives finite results, to detect layers that clamp values.
LOUD = (64, 8, 1)
#: The activations that the kernels compute. The index of an activation is the argument `kind` of the kernels.
ACTIVATIONS: tuple[Callable[[Tensor], Tensor], ...] = (F.silu, functools.partial(F.gelu, approximate="tanh"))


class Gated(NamedTuple):
    """The structure of a gated feed-forward layer: the linear layers `pair` (gate and up) and `down`, and the activation's index."""

    pair: tuple[Any, ...]
    down: Any
    kind: int

    def inner(self, x: Tensor) -> Tensor | None:
        """The input of `down`; None if no kernel computes it."""
        by = self.pair[0].operands(self.pair)
        return None if by is None else products.gated_linear(x, by, self.kind)

    def __call__(self, x: Tensor) -> Tensor | None:
        inner = self.inner(x)
        return None if inner is None else self.down(inner)


@functools.cache
def gated_class(plain: Any) -> type[nn.Module]:
    """The class that replaces `plain`, a class of gated feed-forward layers. Its objects store :class:`Gated` as ``decoders_gated``."""

    def forward(self: Any, x: Tensor, *more: Any, **options: Any) -> Any:
        # The kernel calls no parts of the layer, so the parts' hooks do not run. A layer with hooks on its parts is not fused.
        out = None if more or options else self.decoders_gated(x)
        return plain.forward(self, x, *more, **options) if out is None else out

    return type(plain.__name__, (plain,), {"forward": forward, "__module__": plain.__module__})


@torch.no_grad()
def fuse_layers(model: nn.Module) -> None:
    """Fuses gated feed-forward layers of `model`, our copy of a model, if their linear layers multiply with kernels."""
    for module in model.modules():
        if "forward" not in vars(module) and (gated := _gated(module)) is not None:
            module.__class__ = gated_class(cast(Hashable, type(module)))
            vars(module)["decoders_gated"] = gated


def _gated(module: nn.Module) -> Gated | None:
    """The structure of the gated layer ``down(activation(gate(x)) * up(x))``; None for other modules."""
    children = list(module.children())
    linear: list[Any] = [child for child in children if isinstance(child, Joint)]
    others = [child for child in children if not isinstance(child, Joint)]
    pair: tuple[Any, ...] = next((child.group for child in linear if child.group is not None), ())
    # gate and up must be a group: they have the same input and are stored alike.
    if len(linear) != 3 or len(pair) != 2 or sum(child.group is pair for child in linear) != 2 or len(others) != 1:
        return None
    if any(True for _ in others[0].parameters()) or any(any(hooks_of(child)) for child in children):
        return None
    down = next(each for each in linear if each is not pair[0] and each is not pair[1])
    if outputs_of(pair[0]) != outputs_of(pair[1]) or (kind := _activation(others[0])) is None:
        return None
    x = torch.randn(1, 4, outputs_of(down), generator=torch.Generator().manual_seed(0), device="cpu")
    for factor in LOUD:
        both = torch.cat([x, factor * x]).to(pair[0].weight)  # one pass reads the weights once
        try:
            expected = module(both)
        except Exception:  # the module takes other arguments
            return None
        if not isinstance(expected, Tensor):
            return None
        if expected.isfinite().all():
            break
    for gated in (Gated(pair, down, kind), Gated(pair[::-1], down, kind)):
        tried = gated(both)
        if tried is not None and tried.shape == expected.shape and all(map(close, tried, expected, (down, down))):
            return gated
    return None


def _activation(module: nn.Module) -> int | None:
    """The index in :data:`ACTIVATIONS` of the activation that `module` computes; None for other modules."""
    x = torch.linspace(-12, 12, 1001, device="cpu")
    try:
        out = module(x)
    except Exception:  # the module is not an activation
        return None
    if not isinstance(out, Tensor):
        return None
    return next((n for n, known in enumerate(ACTIVATIONS) if torch.allclose(out, known(x), rtol=1e-6, atol=1e-6)), None)


def close(ours: Tensor | None, other: Tensor, by: nn.Module | None = None) -> bool:
    """Whether `ours` and `other` differ only by rounding. by: the module that computes them. If `by` has quantized layers, the
    tolerance is larger, because quantized layers round their inputs to 16 bits.
    """
    if ours is None or ours.shape != other.shape:
        return False
    narrow = by is not None and any(vars(module).get("digits") == 1 for module in by.modules())
    error, epsilon = (ours.float() - other.float()).abs().max(), max(torch.finfo(other.dtype).eps, narrow * 2**-15)
    return bool(error <= 8 * epsilon * other.float().abs().max().clamp(min=1e-6))
