"""The input and the result of a forward pass: a block of nodes (a root and draft tokens), text before it, a piece of a prompt."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...common.devices import moved_together
from ...draft import Draft
from ...sampling.processors import Masks
from ...tree import Topology, TreeTensors
from .buckets import node_bucket
from .cache import CacheBuffers


class LeadingText(NamedTuple):
    """Committed text that runs before a block's root.

    Attributes:
        length: number of text tokens, the same in every row.
        latest_start: the largest of the slots in which the rows' texts begin, as a number on the host.
    """

    length: int = 0
    latest_start: int = 0


def causal_block(rows: int, n: int, device: torch.device) -> TreeTensors:
    """The tree of a chunk of text: a chain of `n` nodes, which is not verified."""
    index = torch.arange(n, device=device)
    visible = (index[:, None] >= index[None]).expand(rows, n, n)
    offsets = index.expand(rows, n)
    return TreeTensors((offsets - 1).clamp(min=0), offsets, visible, visible)


def after_text(count: int, tree: TreeTensors) -> TreeTensors:
    """Returns `tree` with `count` text tokens before its root. Only offsets and visibility are valid: a forward pass needs no more."""
    text = causal_block(tree.offsets.shape[0], count, tree.offsets.device)
    n = count + len(tree)
    index = torch.arange(n, device=tree.offsets.device)
    # The root and all nodes after it see the text before the root.
    in_front = (index[:, None] >= count) & (index[None] < count)
    visible = F.pad(tree.visible, (count, 0, count, 0)) | F.pad(text.visible, (0, len(tree), 0, len(tree))) | in_front
    offsets = torch.cat([text.offsets, tree.offsets + count], dim=1)
    return TreeTensors(offsets, offsets, visible, visible)


def ending(values: Tensor, count: int) -> Tensor:
    """The last `count` entries along dimension 1. Compiled code gathers the entries: a slice's strides would need another graph."""
    if torch.compiler.is_dynamo_compiling():
        return values.index_select(1, torch.arange(count, device=values.device) + (values.shape[1] - count))
    return values if values.shape[1] == count else values[:, -count:]


@dataclass(frozen=True)
class PromptPiece:
    """A piece of a prompt that is prefilled in the same pass in which other rows decode.

    Attributes:
        tokens: ``[1, C]`` int64.
        start: ``[1]`` int64, slot of the first token.
        latest: `start` as a Python number.
        view: ``[view]``; its length is the number of slots that the piece's attention reads.
        buffers: the cache of the decoding rows, with the prompt's row as an additional last row.
    """

    tokens: Tensor
    start: Tensor
    latest: int
    view: Tensor
    buffers: CacheBuffers

    @property
    def alone(self) -> tuple[Tensor, Tensor, CacheBuffers, Tensor, int]:
        """The arguments of :meth:`Target.prefill` that prefill the piece in a separate pass."""
        rows = len(self.buffers.keys[0])
        return self.tokens, self.start, self.buffers.of_rows(rows - 1, rows), self.view, self.latest


class PassInput(NamedTuple):
    """The input of a forward pass, and the cache that it writes.

    Attributes:
        nodes: ``[B, N]`` int64 token ids; ids outside the vocabulary (-1, "no draft token") run as an arbitrary token. If `tree` has
            more than ``N`` nodes, `nodes` are the last nodes of `tree`, and earlier passes ran the nodes before them.
        base: ``[B]`` int64, position and slot of the tree's node 0: keys and values go to slots ``base … base+N-1``. It is negative
            if a row has fewer tokens before its root than `text`. Nodes before position 0 have no valid results, and their keys and
            values go to slots at the end of the cache.
        view: ``[view]``, any values; its length is the number of slots that attention reads, at least ``base + N``.
        text: the committed tokens at the beginning of `nodes`, which get no results.
        piece: a piece of another row's prompt to prefill in this pass.
        root: ``[B, H]``, the input embedding of the root, which comes after the text; None if the root is a token.
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
class ForwardResult:
    """The result of a pass over a block of ``N`` nodes.

    Attributes:
        logits: ``[B, N, V]`` float32.
        hidden: ``[B, N, H]``, the output head's input.
        layers: ``[B, N, T, H]``, outputs of the ``T`` watched layers; None if no layer is watched.
    """

    logits: Tensor
    hidden: Tensor
    layers: Tensor | None = None

    def behind(self, count: int) -> ForwardResult:
        """These results without the hidden states of the first `count` nodes, which got no logits."""
        if not count:
            return self
        layers = self.layers[:, count:] if self.layers is not None else None
        return ForwardResult(self.logits, self.hidden[:, count:], layers)

    def followed_by(self, other: ForwardResult) -> ForwardResult:
        """The results of these nodes, followed by the results of the nodes of `other`."""
        own, others = self.layers, other.layers
        layers = torch.cat([own, others], 1) if own is not None and others is not None else None
        logits, hidden = torch.cat([self.logits, other.logits], 1), torch.cat([self.hidden, other.hidden], 1)
        return ForwardResult(logits, hidden, layers)


@dataclass(frozen=True)
class NodeBlock:
    """The nodes that one step verifies.

    Attributes:
        draft_tokens: ``[B, N-1]`` int64; -1 for no draft token.
        tree: the tree of the ``N`` nodes; node 0 is each row's last committed token.
        view: ``[view]`` int64, 0 … view-1, the slots that attention reads.
        masks: the tokens that the grammar allows after each node; None if no row has a grammar.
        text: committed tokens that run before node 0: the end of the prompts in the first step, or a few tokens that were
            accepted on a branch and have to run again.
        piece: the piece of another row's prompt to prefill in the same pass.
        root: ``[B, H]``, the input embedding of node 0; None if node 0 is a token.
    """

    draft_tokens: Tensor
    tree: TreeTensors
    view: Tensor
    masks: Masks | None = None
    text: LeadingText = LeadingText()
    piece: PromptPiece | None = None
    root: Tensor | None = None

    def shape_of(self, draft: Draft, on_device: bool) -> Topology | TreeTensors:
        """The topology of this block's `draft`; if `on_device` and the topology consists of tensors, the block's own :attr:`tree`."""
        return self.tree if on_device and isinstance(draft.topology, TreeTensors) else draft.topology


class Blocks:
    """Turns drafts into blocks: pads drafts to the sizes of compiled or recorded code, and creates the tree tensors of all rows.

    A session (rows with their cache) has one `Blocks` object per number of rows, because recorded steps read tensors in this object.

    Args:
        static, multiple: see :class:`~decoders.engine.model.target.Target`.

    Attributes:
        exact: whether every block keeps its size. Uncompiled passes over several rows need no padding (unless ``Target.rounds`` or
            ``Target.pads_blocks``).
        single: whether a block of one node per row keeps its size, because padding would not change its bits.
    """

    def __init__(self, rows: int, device: torch.device, static: bool = False, multiple: int = 1) -> None:
        self.rows, self.device, self.static, self.multiple = rows, device, static, multiple
        self.exact = self.single = False
        self.no_draft_token = torch.full((rows, self.size(1) - 1), -1, dtype=torch.int64, device=device)
        self._trees: dict[tuple[Topology, int], TreeTensors] = {}
        self._host_trees: dict[tuple[Topology, int], TreeTensors] = {}
        self._empty: dict[int, tuple[Tensor, TreeTensors]] = {}

    def of(self, draft: Draft) -> tuple[Tensor, TreeTensors]:
        """The padded draft tokens ``[B, N-1]`` and the tree of ``N`` nodes, where ``N`` is the padded :meth:`size`.

        The caller has checked the draft with :func:`~decoders.draft.check_draft`.
        """
        tree, nodes = draft.topology, self.size(draft.tokens.shape[1] + 1)
        if self.static and isinstance(tree, Topology) and not draft.tokens.shape[1]:
            return self._nothing(tree, nodes)
        if draft.on_host and (self.static or draft.tokens.device != self.device):
            return self._brought(draft.tokens, tree, nodes)
        if isinstance(tree, Topology):
            trees = self.tensors(tree, nodes)
        else:
            if self.static:  # an index out of bounds would end the process on a GPU
                tree = replace(tree, parents=tree.parents.clamp(0, len(tree) - 1))
            trees = tree.padded(nodes)
        if not draft.tokens.shape[1] and nodes == self.no_draft_token.shape[1] + 1:
            return self.no_draft_token, trees
        return padded_tokens(draft.tokens, nodes), trees

    def _nothing(self, tree: Topology, nodes: int) -> tuple[Tensor, TreeTensors]:
        """The padded tokens and the tree for a draft without tokens, which are created once per size."""
        if nodes not in self._empty:
            self._empty[nodes] = self._brought(torch.empty(self.rows, 0, dtype=torch.int64, device="cpu"), tree, nodes)
        return self._empty[nodes]

    def _brought(self, tokens: Tensor, tree: Topology | TreeTensors, nodes: int) -> tuple[Tensor, TreeTensors]:
        """Pads a draft on the host, moves tokens and tree to the device in one copy, and returns both."""
        if isinstance(tree, TreeTensors):
            trees = tree.padded(nodes)
        else:
            if (tree, nodes) not in self._host_trees:
                self._host_trees[tree, nodes] = tree.padded(nodes).tensors(self.rows, tokens.device)
            trees = self._host_trees[tree, nodes]
        own, *parts = moved_together([padded_tokens(tokens, nodes), *vars(trees).values()], self.device)
        return own, TreeTensors(*parts)

    def size(self, nodes: int) -> int:
        """The padded size of a block for a draft of `nodes` nodes. Both numbers include the root."""
        return nodes if self.exact or (self.single and nodes == 1) else node_bucket(nodes, self.static, self.multiple)

    def tensors(self, tree: Topology, nodes: int) -> TreeTensors:
        """`tree`, padded to `nodes` nodes, as tensors on the device. The tensors are created once per tree and size."""
        if (tree, nodes) not in self._trees:
            self._trees[tree, nodes] = tree.padded(nodes).tensors(self.rows, self.device)
        return self._trees[tree, nodes]


def padded_tokens(draft_tokens: Tensor, nodes: int) -> Tensor:
    """Pads draft tokens ``[B, N-1]`` with -1 ("no draft token") for a block of the size `nodes`, root included."""
    missing = nodes - 1 - draft_tokens.shape[1]
    return F.pad(draft_tokens, (0, missing), value=-1) if missing else draft_tokens


def without_empty_end(draft: Draft, finished: Tensor) -> Draft:
    """Cuts the nodes at the end of `draft` that are empty (-1) in all unfinished rows. finished: ``[B]`` bool."""
    width = draft.tokens.shape[1]
    if not width or not isinstance(draft.topology, Topology):
        return draft
    drafted = (draft.tokens >= 0).cpu() & ~finished.cpu()[:, None]
    return draft.head(int((drafted.any(0) * torch.arange(1, width + 1, device="cpu")).amax()))
