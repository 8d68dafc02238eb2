"""A forward pass compiled region by region: one region per distinct kind of decoder layer, whatever the depth."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ....common.layers import decoder_layers
from ....tree import Topology, TreeTensors
from .. import torch_compat
from ..blocks import PromptPiece
from ..cache import CacheBuffers
from ..mixed import inputs as mixed_inputs
from ..mixed import with_logits
from ..target import ForwardResult, Target
from ..weights.quantized import use_quantized_kernels
from .functions import private

#: Slots of the rows that passes are compiled for.
EXAMPLE_SLOTS = 176


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


def regional_forward(target: Target) -> RegionalForward:
    """The forward pass of `target`, to be compiled, on another module tree, since the target's own is in use meanwhile."""
    twin = target.sibling()

    def forward(
        nodes: Tensor, base: Tensor, tree: TreeTensors, buffers: CacheBuffers, view: Tensor, kept: Tensor
    ) -> tuple:  # fmt: skip
        return _tensors(twin.results(twin.inputs(nodes, base, tree, buffers, view), kept))

    return RegionalForward(forward, twin.model, target.matrices)


def regional_mixed(target: Target) -> RegionalForward:
    """The same for passes that read a piece of a prompt as well."""
    twin = target.sibling()

    def forward(
        nodes: Tensor, base: Tensor, tree: TreeTensors, view: Tensor, piece: PromptPiece, kept: Tensor
    ) -> tuple:  # fmt: skip
        return _tensors(twin.results(mixed_inputs(twin, nodes, base, tree, view, piece), kept))

    return RegionalForward(forward, twin.model, target.matrices)


def _tensors(result: ForwardResult) -> tuple[Tensor, ...]:
    return (result.logits, result.hidden) if result.layers is None else (result.logits, result.hidden, result.layers)


def examples(target: Target, rows: int, count: int) -> tuple[Tensor, Tensor, TreeTensors, CacheBuffers, Tensor, Tensor]:
    """Arguments to compile for: sizes that may differ are pairwise different, or Dynamo would take one for another.

    The block is the end of its tree, as where a tree is drafted level by level, and the first of its nodes get no logits; one graph
    serves that, whole trees and text. A single node is a whole tree. Where attention looks at all slots, there are as many of both.
    """
    device, view = target.device, torch.arange(EXAMPLE_SLOTS, device=target.device)
    nodes = torch.randint(0, min(target.vocab_size, target.embeddings), (rows, count), device=device)
    buffers = target.buffers(rows, EXAMPLE_SLOTS)
    fixed(*((buffer, (1, 3)) for buffer in buffers.tensors))
    return (
        nodes,
        torch.full((rows,), 19, device=device),
        laid_out(Topology.chain(count + 1 if count > 1 else 0).tensors(rows, device)),
        buffers,
        view[:] if target.static else view[:80],
        torch.arange(count // 3, count, device=device),
    )


def mixed_examples(target: Target, count: int) -> tuple[Tensor, Tensor, TreeTensors, Tensor, PromptPiece, Tensor]:
    """Likewise for mixed passes, with `count` nodes in each row."""
    rows = 3
    nodes, base, _, _, view, _ = examples(target, rows, count)
    buffers = target.buffers(rows + 1, EXAMPLE_SLOTS)
    fixed(*((buffer, (1, 3)) for buffer in buffers.tensors))
    tokens, start = torch.zeros(1, 13, dtype=torch.int64), torch.full((1,), 23)
    piece = laid_out_piece(PromptPiece(tokens, start, 0, torch.arange(112), buffers))
    tree = laid_out(Topology.chain(count - 1).tensors(rows, target.device))
    return nodes, base, tree, view, piece, with_logits(rows, count, min(count - 1, 2), target.device)


def laid_out_piece(piece: PromptPiece) -> PromptPiece:
    """`piece` as compiled passes take it: with its beginning as a tensor, because each number would get its own graph, and with a view
    of its own, because one that is the rows' tensor itself would too.
    """
    return replace(piece, view=copied_whole(piece.view), latest=0)


def laid_out(tree: TreeTensors) -> TreeTensors:
    """`tree` as compiled passes take it; they read offsets and visibility only."""
    offsets, visible = copied_whole(tree.offsets), copied_whole(tree.visible)
    return TreeTensors(offsets, offsets, visible, visible)
