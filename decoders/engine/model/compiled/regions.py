"""A forward pass compiled region by region: one region per distinct kind of decoder layer, whatever the depth."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ....common.layers import decoder_layers
from .. import torch_compat
from ..weights.quantized import use_quantized_kernels
from .compiler import private


@contextmanager
def layers_as_regions(model: nn.Module) -> Iterator[list[Callable]]:
    """While inside, Dynamo takes every decoder layer for a region of its own and compiles equal ones once.

    Which are equal is judged by their graphs: layers with another window, activation or scale are other regions.

    Gives the functions that stand for layers. Dynamo drops graphs made of them once they are gone.
    """
    regions: dict[Callable, Callable] = {}
    marked = []
    for layer in decoder_layers(model):
        if "forward" in vars(layer):
            continue
        plain = type(layer).forward
        if plain not in regions:
            regions[plain] = _region(plain)
        layer.forward = types.MethodType(regions[plain], layer)
        marked.append(layer)
    try:
        yield list(regions.values())
    finally:
        for layer in marked:
            del layer.forward


def _region(function: Callable) -> Callable:
    return torch_compat.compiled_region(private(function))  # a copy, since marking writes to the function


class RegionalForward:
    """`function`, a forward pass over `model`, compiled with dynamic sizes and packed weights as inputs of the graph.

    Layers are regions; where that fails, the pass is compiled as a whole, with the same inputs and results. Every size is
    dynamic, and equal sizes are the same size: call :meth:`compile` first, on arguments whose sizes are pairwise different
    unless they must be equal, and which :func:`fixed` has been told about. One row makes a graph of its own.

    Attributes:
        regional: whether layers are regions, None before the first compilation.
    """

    def __init__(self, function: Callable, model: nn.Module, packed: Sequence[Tensor] = ()) -> None:
        self.function, self.model, self.packed = function, model, packed
        self.regional: bool | None = None
        self._regions: list[Callable] = []
        self._compiled = self._wrap()

    def __call__(self, *args: Any) -> Any:
        return self._compiled(*args)

    def compile(self, *args: Any) -> None:
        """Makes the graph for arguments like these; raises what the compiler raises if no way of compiling works."""
        use_packed_kernels()
        fixed(*((packed, tuple(range(packed.dim()))) for packed in self.packed))
        with torch_compat.floats_as_constants():
            if self.regional is not False:
                try:
                    with layers_as_regions(self.model) as regions:
                        self(*args)
                    self.regional = bool(regions)
                    self._regions += regions
                    return
                except Exception:
                    if self.regional:  # another number of rows was compiled that way
                        raise
                    self._compiled = self._wrap()
            self(*args)
            self.regional = False

    def _wrap(self) -> Callable:
        options = {
            "size_asserts": False,
            "post_grad_custom_pre_pass": torch_compat.EqualOnce(),
            # What a graph rounds to low precision would else depend on what it fuses, which one row and several do differently.
            "emulate_precision_casts": True,
        }
        return torch_compat.compiled_whole(private(self.function), dynamic=True, options=options)


def fixed(*sizes: tuple[Tensor, tuple[int, ...]]) -> None:
    """Declares dimensions that never vary: heads and widths of the cache, for instance."""
    for tensor, dims in sizes:
        for dim in dims:
            torch_compat.mark_static(tensor, dim)


def copied_whole(tensor: Tensor) -> Tensor:
    """A copy that is no view of anything, with the strides of its shape.

    Dynamo guards strides, and for what it compiles with a view, what that is a view of: other trees would be another graph. Of one row
    ``contiguous`` gives views and slices back as they are.
    """
    return tensor.clone(memory_format=torch.contiguous_format)


@functools.cache
def use_packed_kernels() -> None:
    """Lets inductor call the kernels of packed and of quantized linears itself."""
    use_quantized_kernels()
    torch_compat.lower_to_packed_kernel(torch.ops.decoders.packed_linear.default)
