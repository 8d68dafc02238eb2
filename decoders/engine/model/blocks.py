"""The input of a pass of the model: a block of nodes, text in front of it, and a piece of another row's prompt."""

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
    """Text that a block begins with: causal nodes in front of its root.

    Attributes:
        length: nodes of every row.
        latest_start: the largest slot in which it begins in a row, known to the host.
    """

    length: int = 0
    latest_start: int = 0


def causal_block(rows: int, n: int, device: torch.device) -> TreeTensors:
    """A chunk of text as a block: a chain of `n` nodes, none of which is verified."""
    index = torch.arange(n, device=device)
    visible = (index[:, None] >= index[None]).expand(rows, n, n)
    offsets = index.expand(rows, n)
    return TreeTensors((offsets - 1).clamp(min=0), offsets, visible, visible)


def after_text(count: int, tree: TreeTensors) -> TreeTensors:
    """`tree` with `count` tokens of text in front of its root, for a forward pass: offsets and visibility only."""
    text = causal_block(tree.offsets.shape[0], count, tree.offsets.device)
    n = count + len(tree)
    index = torch.arange(n, device=tree.offsets.device)
    pad = torch.nn.functional.pad
    # Text in front of the root is visible to all nodes from the root on.
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
        latest: the same on the host.
        view: ``[view]``, whose length is the number of slots that their attention looks at.
        buffers: of the step's rows and one more, the row of the prompt.
    """

    tokens: Tensor
    start: Tensor
    latest: int
    view: Tensor
    buffers: CacheBuffers

    @property
    def alone(self) -> tuple[Tensor, Tensor, CacheBuffers, Tensor, int]:
        """The piece as arguments of a pass of its own, see :meth:`Target.prefill`."""
        rows = len(self.buffers.keys[0])
        return self.tokens, self.start, self.buffers.of_rows(rows - 1, rows), self.view, self.latest


class PassInput(NamedTuple):
    """What one pass of the model runs, and where it writes.

    Attributes:
        nodes: ``[B, N]`` int64 token ids; ids outside the vocabulary (-1, "no draft token") are run as some token. If `tree` has
            more nodes, these are its last ones, and the others were run before.
        base: ``[B]`` int64, position and slot of the tree's node 0: keys and values are written to slots ``base … base+N-1``. Negative
            if a block begins before its row: results of nodes in front of position 0 are unused, and they are written to slots at
            the end of the cache.
        view: ``[view]``, any values: its length is the number of slots that attention looks at, at least ``base + N``.
        text: nodes that the block begins with, for which there are no results.
        piece: is read as well.
        root: ``[B, H]``, the embedding of the node behind the text where that is no token.
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
        tree: of the ``N`` nodes; node 0 is each row's last committed token.
        view: ``[view]`` int64, ``range`` of the slots that attention looks at.
        masks: grammar masks after each node, if rows have grammars.
        text: tokens in front of node 0 that are run with the block: the end of the prompts in the first step, or a few tokens that
            were accepted on a branch.
        piece: the piece of another row's prompt that is read in the same pass.
        root: ``[B, H]``, the embedding of node 0 where that is no token.
    """

    draft_tokens: Tensor
    tree: TreeTensors
    view: Tensor
    masks: Masks | None = None
    text: LeadingText = LeadingText()
    piece: PromptPiece | None = None
    root: Tensor | None = None

    def shape_of(self, draft: Draft, on_device: bool) -> Topology | TreeTensors:
        """The tree of the `draft` that this block was made of, for who walks it on the device, or else where the draft is."""
        return self.tree if on_device and isinstance(draft.topology, TreeTensors) else draft.topology


class Blocks:
    """Turns drafts into blocks: checked, padded to sizes for compiled or recorded code, with a topology per row.

    A session has one for each number of rows, because recorded steps read the tensors that are kept here.

    Args:
        static, multiple: see :class:`~decoders.engine.model.target.Target`.

    Attributes:
        exact: whether blocks are not padded: in uncompiled passes over several rows, for which kernels give every row the same bits.
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
        elif self.static:  # on a device an index out of bounds would end the process without a message
            tree = replace(tree, parents=tree.parents.clamp(0, len(tree) - 1))
        if not draft.tokens.shape[1] and nodes == self.no_draft_token.shape[1] + 1:
            return self.no_draft_token, tree.padded(nodes)
        draft_tokens, _ = pad_block(draft.tokens, tree, nodes)
        return draft_tokens, tree.padded(nodes)

    def _nothing(self, tree: Topology, nodes: int) -> tuple[Tensor, TreeTensors]:
        """A block without draft tokens, of which there is one for each size."""
        if nodes not in self._empty:
            self._empty[nodes] = self._brought(torch.empty(self.rows, 0, dtype=torch.int64, device="cpu"), tree, nodes)
        return self._empty[nodes]

    def _brought(self, tokens: Tensor, tree: Topology | TreeTensors, nodes: int) -> tuple[Tensor, TreeTensors]:
        """A draft on the host as :meth:`of` returns it, padded there and brought to the device in one copy."""
        padded, tree = pad_block(tokens, tree, nodes)
        if isinstance(tree, Topology):
            if (tree, nodes) not in self._host_trees:
                self._host_trees[tree, nodes] = tree.padded(nodes).tensors(self.rows, tokens.device)
            tree = self._host_trees[tree, nodes]
        own, *parts = moved_together([padded, *vars(tree).values()], self.device)
        return own, TreeTensors(*parts)

    def size(self, nodes: int) -> int:
        """Nodes of the padded block for a draft of so many nodes, the root included."""
        return nodes if self.exact or (self.single and nodes == 1) else node_bucket(nodes, self.static, self.multiple)

    def tensors(self, tree: Topology) -> TreeTensors:
        """`tree` as tensors on the device, cached."""
        size = self.size(len(tree))
        if (tree, size) not in self._trees:
            self._trees[tree, size] = tree.padded(size).tensors(self.rows, self.device)
        return self._trees[tree, size]


def without_empty_end(draft: Draft, finished: Tensor) -> Draft:
    """`draft` without the nodes at its end that have no draft token in any unfinished row. finished: ``[B]`` bool."""
    width = draft.tokens.shape[1]
    if not width or not isinstance(draft.topology, Topology):
        return draft
    drafted = (draft.tokens >= 0).cpu() & ~finished.cpu()[:, None]
    return draft.head(int((drafted.any(0) * torch.arange(1, width + 1, device="cpu")).amax()))
