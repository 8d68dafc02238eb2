"""What is compiled of a forward pass, and for which sizes."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ....tree import Topology, TreeTensors
from ..cache import CacheBuffers
from ..mixed import PromptPiece, with_logits
from ..mixed import inputs as mixed_inputs
from ..target import ForwardResult, Target
from .regions import RegionalForward, copied_whole, fixed


def plain(target: Target) -> RegionalForward:
    """The forward pass of `target`, to be compiled, on a module tree of its own: the target's own goes on running meanwhile."""
    twin = target.sibling()

    def forward(
        nodes: Tensor, base: Tensor, tree: TreeTensors, buffers: CacheBuffers, view: Tensor, kept: Tensor
    ) -> tuple:  # fmt: skip
        return _tensors(twin.results(twin.inputs(nodes, base, tree, buffers, view), kept))

    return RegionalForward(forward, twin.model, target.matrices)


def mixed(target: Target) -> RegionalForward:
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
    device, view = target.device, torch.arange(176, device=target.device)
    nodes = torch.randint(0, min(target.vocab_size, target.embeddings), (rows, count), device=device)
    buffers = CacheBuffers.allocate(target.layout, rows, 176)
    fixed(*((buffer, (1, 3)) for buffer in buffers.tensors))
    return (
        nodes,
        torch.full((rows,), 19, device=device),
        Topology.chain(count + 1 if count > 1 else 0).tensors(rows, device),
        buffers,
        view[:] if target.static else view[:80],
        torch.arange(count // 3, count, device=device),
    )


def settle_examples(target: Target, rows: int, count: int, slots: int) -> tuple:
    """Arguments of :func:`~decoders.engine.decode.core.settle`, likewise."""
    device, tree = target.device, Topology.chain(count + 1 if count > 1 else 0).tensors(rows, target.device)
    block = torch.zeros(rows, len(tree), dtype=torch.int64, device=device)
    lengths, stops = torch.full((rows,), 20, device=device), torch.full((rows, 8), -1, device=device)
    return (
        block, block.clone(), laid_out_to_settle(tree), torch.zeros(rows, slots, dtype=torch.int64, device=device), lengths,
        lengths + 39, torch.zeros(rows, dtype=torch.bool, device=device), stops,
    )  # fmt: skip


def mixed_examples(target: Target, count: int) -> tuple[Tensor, Tensor, TreeTensors, Tensor, PromptPiece, Tensor]:
    """Likewise for mixed passes, with `count` nodes in each row."""
    rows = 3
    nodes, base, _, _, view, _ = examples(target, rows, count)
    buffers = CacheBuffers.allocate(target.layout, rows + 1, 176)
    fixed(*((buffer, (1, 3)) for buffer in buffers.tensors))
    tokens, start = torch.zeros(1, 13, dtype=torch.int64), torch.full((1,), 23)
    piece = laid_out_piece(PromptPiece(tokens, start, 0, torch.arange(112), buffers))
    tree = laid_out(Topology.chain(count - 1).tensors(rows, target.device))
    return nodes, base, tree, view, piece, with_logits(rows, count, min(count - 1, 2), target.device)


def laid_out_piece(piece: PromptPiece) -> PromptPiece:
    """`piece` as compiled passes take it: where it begins is a tensor there, as any number would be a graph of its own, and so would
    a view be that is the very tensor of the rows'.
    """
    return replace(piece, view=copied_whole(piece.view), latest=0)


def laid_out(tree: TreeTensors) -> TreeTensors:
    """`tree` as compiled passes take it, which read offsets and visibility."""
    offsets, visible = copied_whole(tree.offsets), copied_whole(tree.visible)
    return TreeTensors(offsets, offsets, visible, visible)


def laid_out_to_settle(tree: TreeTensors) -> TreeTensors:
    """`tree` as the compiled :func:`~decoders.engine.decode.core.settle` takes it, which does not read visibility."""
    ancestors = copied_whole(tree.ancestors)
    return TreeTensors(copied_whole(tree.parents), copied_whole(tree.offsets), ancestors, ancestors)
