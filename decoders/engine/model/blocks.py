"""The input of a forward pass: a block of nodes, text before it, and a piece of another row's prompt."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ...common.devices import moved_together
from ...draft import Draft, check_draft
from ...sampling.processors import Masks
from ...tree import Topology, TreeTensors
from .buckets import node_bucket, pad_block
from .cache import CacheBuffers


class LeadingText(NamedTuple):
    """Text at the beginning of a block: causal nodes before its root.

    Attributes:
        length: nodes of every row.
        latest_start: the largest slot in which a row's text begins, known to the host.
    """

    length: int = 0
    latest_start: int = 0


def causal_block(rows: int, n: int, device: torch.device) -> TreeTensors:
    """A chunk of text as a block: a chain of `n` nodes that are not verified."""
    index = torch.arange(n, device=device)
    visible = (index[:, None] >= index[None]).expand(rows, n, n)
    offsets = index.expand(rows, n)
    return TreeTensors((offsets - 1).clamp(min=0), offsets, visible, visible)


def after_text(count: int, tree: TreeTensors) -> TreeTensors:
    """`tree` with `count` text tokens before its root, for a forward pass: offsets and visibility only."""
    text = causal_block(tree.offsets.shape[0], count, tree.offsets.device)
    n = count + len(tree)
    index = torch.arange(n, device=tree.offsets.device)
    pad = torch.nn.functional.pad
    # All nodes from the root on see the text before the root.
    in_front = (index[:, None] >= count) & (index[None] < count)
    visible = pad(tree.visible, (count, 0, count, 0)) | pad(text.visible, (0, len(tree), 0, len(tree))) | in_front
    offsets = torch.cat([text.offsets, tree.offsets + count], dim=1)
    return TreeTensors(offsets, offsets, visible, visible)


@dataclass(frozen=True)
class PromptPiece:
    """A piece of a prompt that a step of other rows reads.

    Attributes:
        tokens: ``[1, C]`` int64.
        start: ``[1]`` int64, slot of the first token.
        latest: `start` on the host.
        view: ``[view]``; its length is the number of slots that attention looks at.
        buffers: the cache of the step's rows and, as the last row, of the prompt.
    """

    tokens: Tensor
    start: Tensor
    latest: int
    view: Tensor
    buffers: CacheBuffers

    @property
    def alone(self) -> tuple[Tensor, Tensor, CacheBuffers, Tensor, int]:
        """The piece as the arguments of a separate pass, :meth:`Target.prefill`."""
        rows = len(self.buffers.keys[0])
        return self.tokens, self.start, self.buffers.of_rows(rows - 1, rows), self.view, self.latest


class PassInput(NamedTuple):
    """The input of a forward pass, and the place of its output.

    Attributes:
        nodes: ``[B, N]`` int64 token ids; ids outside the vocabulary (-1, "no draft token") run as an arbitrary token. If `tree` has
            more nodes, these are its last, and earlier passes ran the others.
        base: ``[B]`` int64, position and slot of the tree's node 0: keys and values go to slots ``base … base+N-1``. Negative if a
            block begins before its row: nodes before position 0 have no results, and go to slots at the end of the cache.
        view: ``[view]``, any values; its length is the number of slots that attention looks at, at least ``base + N``.
        text: nodes at the block's beginning without results.
        piece: a piece of another row's prompt to read.
        root: ``[B, H]``, the embedding of the node after the text, if it is not a token.
    """

    nodes: Tensor
    base: Tensor
    tree: TreeTensors
    buffers: CacheBuffers
    view: Tensor
    text: LeadingText = LeadingText()
    piece: PromptPiece | None = None
    root: Tensor | None = None


@dataclass(frozen=True)
class NodeBlock:
    """The nodes that one step verifies.

    Attributes:
        draft_tokens: ``[B, N-1]`` int64, the draft tokens, -1 for none.
        tree: the tree of the ``N`` nodes; node 0 is each row's last committed token.
        view: ``[view]`` int64, ``range`` of the slots that attention looks at.
        masks: grammar masks after each node, if rows have grammars.
        text: tokens before node 0 that run with the block: the end of the prompts in the first step, or a few tokens that were
            accepted on a branch.
        piece: the piece of another row's prompt to read in the same pass.
        root: ``[B, H]``, the embedding of node 0, if it is not a token.
    """

    draft_tokens: Tensor
    tree: TreeTensors
    view: Tensor
    masks: Masks | None = None
    text: LeadingText = LeadingText()
    piece: PromptPiece | None = None
    root: Tensor | None = None

    def shape_of(self, draft: Draft, on_device: bool) -> Topology | TreeTensors:
        """The tree of the `draft` behind this block: on the device if `on_device`, else on the draft's device."""
        return self.tree if on_device and isinstance(draft.topology, TreeTensors) else draft.topology


class Blocks:
    """Turns drafts into blocks: checks them, pads them to sizes for compiled or recorded code, and gives every row a tree.

    A session has an object for each number of rows, because recorded steps read the tensors that it keeps.

    Args:
        static, multiple: see :class:`~decoders.engine.model.target.Target`.

    Attributes:
        exact: True for blocks without padding: in uncompiled passes over several rows, if kernels give a row the same bits anyway.
        single: the same for blocks of one node; with quantized weights also for one row.
    """

    def __init__(self, rows: int, device: torch.device, static: bool = False, multiple: int = 1) -> None:
        self.rows, self.device, self.static, self.multiple = rows, device, static, multiple
        self.exact = self.single = False
        self.no_draft_token = torch.full((rows, self.size(1) - 1), -1, dtype=torch.int64, device=device)
        self._trees: dict[tuple[Topology, int], TreeTensors] = {}
        self._host_trees: dict[tuple[Topology, int], TreeTensors] = {}
        self._empty: dict[int, tuple[Tensor, TreeTensors]] = {}

    def of(self, draft: Draft, proposer: str) -> tuple[Tensor, TreeTensors]:
        """Draft tokens ``[B, N-1]`` and the tree of ``N`` nodes, a :func:`~decoders.engine.model.buckets.node_bucket`.

        Raises:
            DraftError: `proposer` broke the contract.
        """
        check_draft(draft, proposer, self.rows)
        tree, nodes = draft.topology, self.size(len(draft.topology))
        if self.static and isinstance(tree, Topology) and not draft.tokens.shape[1]:
            return self._nothing(tree, nodes)
        if draft.on_host and (self.static or draft.tokens.device != self.device):
            return self._brought(draft.tokens, tree, nodes)
        if isinstance(tree, Topology):
            tree = self.tensors(tree)
        elif self.static:  # an index out of bounds would end the process on a GPU
            tree = replace(tree, parents=tree.parents.clamp(0, len(tree) - 1))
        if not draft.tokens.shape[1] and nodes == self.no_draft_token.shape[1] + 1:
            return self.no_draft_token, tree.padded(nodes)
        draft_tokens, _ = pad_block(draft.tokens, tree, nodes)
        return draft_tokens, tree.padded(nodes)

    def _nothing(self, tree: Topology, nodes: int) -> tuple[Tensor, TreeTensors]:
        """A block without draft tokens, cached by size."""
        if nodes not in self._empty:
            self._empty[nodes] = self._brought(torch.empty(self.rows, 0, dtype=torch.int64, device="cpu"), tree, nodes)
        return self._empty[nodes]

    def _brought(self, tokens: Tensor, tree: Topology | TreeTensors, nodes: int) -> tuple[Tensor, TreeTensors]:
        """:meth:`of` for a draft on the host: pads it there and moves it to the device in one copy."""
        padded, tree = pad_block(tokens, tree, nodes)
        if isinstance(tree, Topology):
            if (tree, nodes) not in self._host_trees:
                self._host_trees[tree, nodes] = tree.padded(nodes).tensors(self.rows, tokens.device)
            tree = self._host_trees[tree, nodes]
        own, *parts = moved_together([padded, *vars(tree).values()], self.device)
        return own, TreeTensors(*parts)

    def size(self, nodes: int) -> int:
        """The nodes of the padded block for a draft of `nodes` nodes, root included."""
        return nodes if self.exact or (self.single and nodes == 1) else node_bucket(nodes, self.static, self.multiple)

    def tensors(self, tree: Topology) -> TreeTensors:
        """`tree` as tensors on the device, cached."""
        size = self.size(len(tree))
        if (tree, size) not in self._trees:
            self._trees[tree, size] = tree.padded(size).tensors(self.rows, self.device)
        return self._trees[tree, size]


def without_empty_end(draft: Draft, finished: Tensor) -> Draft:
    """`draft` without last nodes that have no draft token in any unfinished row. finished: ``[B]`` bool."""
    width = draft.tokens.shape[1]
    if not width or not isinstance(draft.topology, Topology):
        return draft
    drafted = (draft.tokens >= 0).cpu() & ~finished.cpu()[:, None]
    return draft.head(int((drafted.any(0) * torch.arange(1, width + 1, device="cpu")).amax()))
