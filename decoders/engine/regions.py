"""A forward pass compiled region by region: one region per distinct kind of decoder layer, whatever the depth."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .compiler import private
from .packing import Packing

#: Modules that transformers numbers by decoder layer: attention modules are.
LAYER_INDEX = "layer_idx"


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The decoder layers of `model`: members of the outermost lists each of which holds attention of one layer index."""
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) > 0:
            indices = [_indices(layer) for layer in module]
            if all(len(index) == 1 for index in indices) and len(set().union(*indices)) == len(module):
                return list(module)
    return []


def _indices(layer: nn.Module) -> set[int]:
    return {i for m in layer.modules() if isinstance(i := getattr(m, LAYER_INDEX, None), int)}


@contextmanager
def layers_as_regions(model: nn.Module) -> Iterator[int]:
    """While inside, Dynamo takes every decoder layer for a region of its own and compiles equal ones once.

    Which are equal is judged by their graphs: layers with another window, activation or scale are other regions.
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
        yield len(marked)
    finally:
        for layer in marked:
            del layer.forward


def _region(function: Callable) -> Callable:
    options = {}
    if "max_reuse_entries" in inspect.signature(torch.compiler.nested_compile_region).parameters:
        options["max_reuse_entries"] = 1 << 20  # the default raises at the ninth
    # A copy, since marking writes to the function.
    return torch.compiler.nested_compile_region(private(function), **options)


class RegionalForward:
    """`function`, a forward pass over `model`, compiled with dynamic sizes and packed weights as inputs of the graph.

    Layers are regions; where that fails, the pass is compiled as a whole, with the same inputs and results. Every size is
    dynamic, and equal sizes are the same size: call :meth:`compile` first, on arguments whose sizes are pairwise different
    unless they must be equal, and which :func:`fixed` has been told about. One row makes a graph of its own.

    Attributes:
        regional: whether layers are regions, None before the first compilation.
    """

    def __init__(self, function: Callable, model: nn.Module, packing: Packing | None = None) -> None:
        self.function, self.model = function, model
        self.packed = [weight.packed for weight in packing.weights] if packing is not None else []
        self.regional: bool | None = None
        self._compiled = self._wrap()

    def __call__(self, *args: Any) -> Any:
        return self._compiled(*args)

    def compile(self, *args: Any) -> None:
        """Makes the graph for arguments like these; raises what the compiler raises if no way of compiling works."""
        use_packed_kernels()
        fixed(*((packed, (0, 1)) for packed in self.packed))
        # With dynamic sizes Dynamo would take the epsilon of a norm for an input. Settings are patched for this thread only.
        with torch._dynamo.config.patch(specialize_float=True):
            if self.regional is not False:
                try:
                    with layers_as_regions(self.model) as count:
                        self(*args)
                    self.regional = count > 0
                    return
                except Exception:
                    if self.regional:  # another number of rows was compiled that way
                        raise
                    self._compiled = self._wrap()
            self(*args)
            self.regional = False

    def _wrap(self) -> Callable:
        options = {
            # The engine compares fingerprints of the weights instead.
            "guard_filter_fn": torch.compiler.skip_guard_on_all_nn_modules_unsafe,
            "size_asserts": False,
        }
        return torch.compile(private(self.function), fullgraph=True, dynamic=True, options=options)


def fixed(*sizes: tuple[Tensor, tuple[int, ...]]) -> None:
    """Declares dimensions that never vary: heads and widths of the cache, for instance."""
    for tensor, dims in sizes:
        for dim in dims:
            torch._dynamo.mark_static(tensor, dim)


@functools.cache
def use_packed_kernels() -> None:
    """Lets inductor call oneDNN's kernel for packed linears itself. Without that it goes through Python, to the same kernel."""
    try:
        from torch._inductor.lowering import fallback_handler, register_lowering

        kernel = fallback_handler(torch.ops.mkldnn._linear_pointwise.default, add_to_fallback_set=False)
    except (ImportError, AttributeError, TypeError):
        return

    @register_lowering(torch.ops.decoders.packed_linear.default, type_promotion_kind=None)
    def _(x: Any, packed: Any, bias: Any, out_features: int) -> Any:
        return kernel(x, packed, bias, "none", [], "")
