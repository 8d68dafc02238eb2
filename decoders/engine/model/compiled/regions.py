"""A forward pass that is compiled layer by layer. Equal layers share a graph, so many layers compile about as fast as few."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ....common.transformers_compat import decoder_layers
from ....tree import Topology, TreeTensors
from .. import torch_compat
from ..blocks import ForwardResult, PromptPiece
from ..cache import CacheBuffers
from ..mixed import inputs as mixed_inputs
from ..mixed import with_logits
from ..target import Target
from .functions import private

#: Number of slots per row in the example arguments that passes are compiled with.
EXAMPLE_SLOTS = 176


@contextmanager
def layers_as_regions(model: nn.Module) -> Iterator[list[Callable]]:
    """Within this context, every decoder layer is a region: Dynamo compiles one graph for all layers whose graphs are equal.

    Yields the functions that are compiled. The caller keeps them, because Dynamo drops a function's graphs with the function.
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
    return torch_compat.compiled_region(private(function))  # a copy, because torch writes to the function


class RegionalForward:
    """Compiles `function`, a forward pass over `model`, with dynamic sizes. Weights are inputs of the graph.

    Layers are regions. If compiling by regions fails, the pass is compiled as a whole, with the same inputs and results. Declare
    constant sizes with :func:`fixed`, then call :meth:`compile`, once for one row and once for several. The sizes of `quantized`
    matrices are constant, too; all others are dynamic. Dynamo treats equal sizes in the arguments of :meth:`compile` as one size, so
    sizes that may differ later must differ in these arguments.

    Attributes:
        regional: whether layers are regions; None before the first compilation.
    """

    def __init__(self, function: Callable, model: nn.Module, quantized: Sequence[Tensor] = ()) -> None:
        self.function, self.model, self.quantized = function, model, quantized
        self.regional: bool | None = None
        self._regions: list[Callable] = []
        self._compiled = self._wrap()

    def __call__(self, *args: Any) -> Any:
        with torch_compat.without_default_device():
            return self._compiled(*args)

    def compile(self, *args: Any) -> None:
        """Compiles the graph for arguments like `args`. Raises the compiler's error if the pass or regions that worked before fail."""
        fixed(*((matrix, tuple(range(matrix.dim()))) for matrix in self.quantized))
        with torch_compat.floats_as_constants():
            if self.regional is not False:
                try:
                    with layers_as_regions(self.model) as regions:
                        self(*args)
                    self.regional = bool(regions)
                    self._regions += regions
                    return
                except Exception:
                    if self.regional:  # regions worked before, for another number of rows
                        raise
                    self._compiled = self._wrap()
            self(*args)
            self.regional = False

    def _wrap(self) -> Callable:
        options = {
            "size_asserts": False,
            "post_grad_custom_pre_pass": torch_compat.EqualOnce(),
            # Without this option, rounding to low precision depends on fusion, which differs between one row and several.
            "emulate_precision_casts": True,
        }
        return torch_compat.compiled_whole(private(self.function), dynamic=True, options=options)


def fixed(*sizes: tuple[Tensor, tuple[int, ...]]) -> None:
    """Declares constant dimensions of tensors, such as heads and widths of the cache. sizes: pairs of a tensor and dimensions."""
    for tensor, dims in sizes:
        for dim in dims:
            torch_compat.mark_static(tensor, dim)


def copied_whole(tensor: Tensor) -> Tensor:
    """A contiguous copy of `tensor` that is not a view.

    Dynamo has guards on strides and on the bases of views, so without the copy some trees would need another graph. ``contiguous`` is
    not enough, because it returns views of a single row unchanged.
    """
    return tensor.clone(memory_format=torch.contiguous_format)


def regional_forward(target: Target) -> RegionalForward:
    """The forward pass of `target`, to be compiled, with a copy of the modules, because the target's modules also run uncompiled."""
    twin = target.sibling()

    def forward(
        nodes: Tensor, base: Tensor, tree: TreeTensors, buffers: CacheBuffers, view: Tensor, kept: Tensor
    ) -> tuple:  # fmt: skip
        return _tensors(twin.results(twin.inputs(nodes, base, tree, buffers, view), kept))

    return RegionalForward(forward, twin.model, target.matrices)


def regional_mixed(target: Target) -> RegionalForward:
    """The mixed pass of `target` (:mod:`~decoders.engine.model.mixed`), to be compiled, on a copy of the modules."""
    twin = target.sibling()

    def forward(
        nodes: Tensor, base: Tensor, tree: TreeTensors, view: Tensor, piece: PromptPiece, kept: Tensor
    ) -> tuple:  # fmt: skip
        return _tensors(twin.results(mixed_inputs(twin, nodes, base, tree, view, piece), kept))

    return RegionalForward(forward, twin.model, target.matrices)


def _tensors(result: ForwardResult) -> tuple[Tensor, ...]:
    return (result.logits, result.hidden) if result.layers is None else (result.logits, result.hidden, result.layers)


def examples(target: Target, rows: int, count: int) -> tuple[Tensor, Tensor, TreeTensors, CacheBuffers, Tensor, Tensor]:
    """Arguments to compile a pass with. Sizes that may differ are pairwise different, because Dynamo treats equal sizes as one size.

    The `count` nodes are the last nodes of a larger tree, as in level-by-level drafting, and the first of them get no logits. The graph
    then also serves whole trees and text. If `count` is 1, the node is a whole tree. If sizes are static, the view covers all slots.
    """
    device, view = target.device, torch.arange(EXAMPLE_SLOTS, device=target.device)
    nodes = torch.randint(0, min(target.vocab_size, target.vocabulary.embeddings), (rows, count), device=device)
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
    """Arguments to compile a mixed pass with, like :func:`examples`. count: number of nodes in each row."""
    rows = 3
    nodes, base, _, _, view, _ = examples(target, rows, count)
    buffers = target.buffers(rows + 1, EXAMPLE_SLOTS)
    fixed(*((buffer, (1, 3)) for buffer in buffers.tensors))
    tokens, start = torch.zeros(1, 13, dtype=torch.int64), torch.full((1,), 23)
    piece = laid_out_piece(PromptPiece(tokens, start, 0, torch.arange(112), buffers))
    tree = laid_out(Topology.chain(count - 1).tensors(rows, target.device))
    return nodes, base, tree, view, piece, with_logits(rows, count, min(count - 1, 2), target.device)


def laid_out_piece(piece: PromptPiece) -> PromptPiece:
    """`piece` in the form for compiled passes. `latest` is 0, because each number would need its own graph. The view is a copy, because
    a view that shares memory with the rows' view would need another graph, too.
    """
    return replace(piece, view=copied_whole(piece.view), latest=0)


def laid_out(tree: TreeTensors) -> TreeTensors:
    """`tree` in the form for compiled passes: contiguous copies of offsets and visibility, which are all that a pass reads."""
    offsets, visible = copied_whole(tree.offsets), copied_whole(tree.visible)
    return TreeTensors(offsets, offsets, visible, visible)
