"""Base classes for networks that draft from the target's hidden states, and for the strategies that use these networks.

At slot ``j`` of a row the network reads the target's hidden state of token ``j``, and tokens after token ``j``. The target has not
read the last committed token yet, so with ``length`` committed tokens the last slot is ``length - 2``. Before every draft the network
reads a window of the last slots again, at little cost. Committed tokens then replace rejected draft tokens. If steps pass without a
draft, the network reads the window in time, so that no token leaves the window unread.

Letters: ``B`` rows, ``N`` nodes or tokens of a pass, ``F`` width of the features that the network reads, ``W`` slots of the window,
``Q`` nodes that one pass expands, ``D`` tokens that can be drafted, ``T`` positions of a block.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..drafters import DraftVocabulary, Expansion
from ..strategy import Context, Draft, PromptChunk, Sequences, Step, Strategy
from ..tree import TreeTensors
from .draft_tree import DraftTree

__all__ = [
    "BlockDrafter", "FeatureDrafter", "FeatureState", "FeatureWindow", "ReadsFeatures", "dtype_of", "embeddings_of", "tokens_from",
]  # fmt: skip


class FeatureWindow(ABC):
    """The state of a drafting network in a call. The network reads the target's hidden states in a window of the last slots.

    Implements :class:`~decoders.strategies.draft_tree.Expands`: returns continuations of the nodes of a draft tree.

    Args:
        context: the call's context.
        features: width ``F`` of the features of a node.
        new: greatest number of tokens that a step with this network's draft commits: the draft's depth, plus 1 for the target's token.
        again: number of further slots to read again, because they depended on draft tokens; 0 if slots depend on committed tokens
            only.
        vocabulary: the tokens that the network can propose.
        children: number of continuations per node that the tree requests.

    Attributes:
        plan, sampling: see :class:`~decoders.strategy.Context`.
        children: ``C``, continuations per node: the requested number, or the size of `vocabulary` if that is smaller.
        keep_scores: whether expansions have scores, which verifiers with a rejection rule need.
        most_id: greatest token id that the target embeds.
        width: ``W``, number of slots in the window.
        window: ``[B, W, F]``, the features of every row's last slots, in the target's dtype.
        prompts: the rows when the call began or rows last joined, from which :meth:`prefill` reads the prompts.
        sequences: the rows in this step, set by :meth:`draft`.
    """

    sequences: Sequences

    def __init__(
        self, context: Context, features: int, new: int, again: int, vocabulary: DraftVocabulary, children: int
    ) -> None:
        self.plan, self.sampling, self.vocabulary = context.plan, context.sampling, vocabulary
        self.children = min(children, len(vocabulary))
        self.keep_scores = context.plan is not None and context.plan.sample and not context.coupled
        self.most_id = embeddings_of(context) - 1
        self.new, self.width, self.own_nodes = new, new + again, 1
        # unread: upper bound of the number of window tokens that the network has not read.
        # asked: whether the network has drafted in this step.
        self.unread, self.asked = 0, False
        assert context.sequences is not None
        self.prompts = context.sequences
        self.window = torch.zeros(context.rows, self.width, features, dtype=dtype_of(context), device=context.device)
        self.index = torch.arange(self.width, device=context.device)

    def static_parts(self) -> dict[str, Any]:
        """All objects, by name, that every step uses. A recorded step (CUDA graph) can be replayed only with the same objects."""
        return dict(
            window=self.window, index=self.index, ids=self.vocabulary.ids, sampling=self.sampling, plan=self.plan,
            sizes=(self.new, self.width, self.children, self.keep_scores), own=self.own_parts(),
        )  # fmt: skip

    @abstractmethod
    def own_parts(self) -> Any:
        """The subclass's part of :meth:`static_parts`: tensors and modules, such as its :class:`~decoders.drafters.ModulePasses`."""

    @abstractmethod
    def read(self, base: Tensor, features: Tensor, sequences: Sequences) -> Any:
        """Runs the network over ``N`` slots of every row, and stores the last slot's outputs in attributes, for :meth:`root`.

        Args:
            base: ``[B]`` int64, the first slot.
            features: ``[B, N, F]``, features of the tokens in these slots, from the target's hidden states.
            sequences: the rows; :func:`tokens_from` reads their tokens.
        """

    @abstractmethod
    def root(self) -> Expansion:
        """Calls :meth:`read_window`, and returns the best continuations ``[B, 1, C]`` of every row's last token."""

    @abstractmethod
    def expand(self, nodes: Tensor, tree: TreeTensors) -> Expansion:
        """The best continuations ``[B, Q, C]`` of `nodes` ``[B, Q]`` int64, which are the last ``Q`` nodes of `tree`."""

    def rebatch(self, rows: Tensor, context: Context) -> None:
        """Keeps the windows of rows that stay. :meth:`prefill` fills the windows of new rows. See :meth:`decoders.Strategy.rebatch`."""
        assert context.sequences is not None
        self.prompts, self.sampling = context.sequences, context.sampling
        self.window = torch.where((rows >= 0)[:, None, None], self.window[rows.clamp(min=0)], 0)

    def prefill(self, chunk: PromptChunk, features: Tensor) -> None:
        """Runs the network over a chunk of the prompts, and copies the last features to the window. features: ``[B, N, F]``."""
        start = chunk.positions[:, 0]
        self.read(start, features, self.prompts)
        index = self.prompts.length[:, None] - 1 - self.width + self.index - start[:, None]
        inside = (index >= 0) & (index < features.shape[1])
        taken = _at(features, index.clamp(0, features.shape[1] - 1))
        self.window.copy_(torch.where(inside[..., None], taken, self.window))

    def observe(self, step: Step, features: Tensor) -> None:
        """Moves the window forward, so that it ends with the tokens that the step has committed.

        Args:
            features: ``[B, N, F]``, features of the step's nodes.
        """
        every = torch.cat([self.window, _at(features, step.path)], dim=1)
        # If the host has not read the step's tokens, `most` is an upper bound of their number: `new` if the block holds only this
        # network's draft, else the number of nodes. Padding makes a block at most about twice as large as its draft.
        nodes = step.path.shape[1]
        own = self.asked and step.own_nodes != 0 and nodes <= max(2 * self.own_nodes, self.own_nodes + 3)
        most = self.new if own else nodes
        if step.known is not None:
            most = max(map(len, step.known.tokens), default=0)
        self.unread, self.asked = self.unread + most, False
        if self.unread > self.new:  # unread tokens would leave the window
            self.read(step.sequences.length - step.emitted - 1 - self.width, every, step.sequences)
            self.unread = 0
        self.window.copy_(_at(every, step.emitted[:, None] + self.index))

    def draft(self, tree: DraftTree, sequences: Sequences) -> Draft:
        """Returns the draft of a step: `tree`, filled by :meth:`root` and :meth:`expand`."""
        self.sequences = sequences
        draft = tree.draft(self)
        self.own_nodes, self.unread, self.asked = len(draft.topology), 0, True
        return draft

    def read_window(self) -> None:
        """Runs the network over the window. The window holds all tokens that were committed since the network's last draft."""
        self.read(self.sequences.length - 1 - self.width, self.window, self.sequences)

    def best(self, logits: Tensor, offsets: Tensor | int) -> Expansion:
        """The best continuations of ``Q`` nodes: the largest logits, or when sampling the largest sums of log-probability and noise.

        Args:
            logits: ``[B, Q, D]``.
            offsets: ``[B, Q]`` int64, number of positions from the row's last token to each node; or one number for all nodes.
        """
        written = (self.sequences.length - self.sequences.prompt_length)[:, None]
        return self.vocabulary.best(
            logits, self.children, self.plan, self.sampling, written + offsets, self.keep_scores
        )


class FeatureDrafter(FeatureWindow):
    """A network that drafts token by token, as in EAGLE. One pass over a level of the tree gives the next level.

    A subclass implements :meth:`read`, :meth:`first`, :meth:`further` and :meth:`own_parts`.
    """

    @abstractmethod
    def first(self) -> Tensor:
        """Logits ``[B, 1, D]`` after every row's last token. Called after :meth:`read_window`."""

    @abstractmethod
    def further(self, nodes: Tensor, tree: TreeTensors) -> Tensor:
        """Logits ``[B, Q, D]`` after `nodes` ``[B, Q]`` int64, the last ``Q`` nodes of `tree`. Node 0 is the row's last token."""

    def root(self) -> Expansion:
        self.read_window()
        return self.best(self.first(), 0)

    def expand(self, nodes: Tensor, tree: TreeTensors) -> Expansion:
        logits = self.further(nodes.clamp(0, self.most_id), tree)
        return self.best(logits, tree.offsets[:, -nodes.shape[1] :])


class BlockDrafter(FeatureWindow):
    """A network that drafts all positions of a block in one pass. All nodes of a level have the same continuations.

    A subclass implements :meth:`read`, :meth:`own_parts`, and :meth:`root`, which ends with ``return self.opened(logits)``.
    """

    def opened(self, logits: Tensor) -> Expansion:
        """The continuations on the first level, from the block's logits ``[B, T, D]``. :meth:`expand` returns the later levels."""
        offsets = torch.arange(logits.shape[1], device=logits.device).expand(logits.shape[:2])
        self.level, self.places = 0, self.best(logits, offsets)
        return self._level(1)

    def expand(self, nodes: Tensor, tree: TreeTensors) -> Expansion:
        self.level += 1
        return self._level(nodes.shape[1])

    def _level(self, nodes: int) -> Expansion:
        """The block's continuations at the current level, repeated for each of the `nodes` nodes of this level."""
        here, places = slice(self.level, self.level + 1), self.places
        scores = None if places.scores is None else places.scores[:, here].expand(-1, nodes, -1)
        return Expansion(
            places.tokens[:, here].expand(-1, nodes, -1), places.weights[:, here].expand(-1, nodes, -1), scores
        )


def dtype_of(context: Context) -> torch.dtype:
    """The dtype of the target's weights. Drafting networks run in the same dtype."""
    return next(p.dtype for p in context.model.parameters() if p.is_floating_point())


def embeddings_of(context: Context) -> int:
    """Number of rows of the target's embedding. It may exceed the vocabulary size ``V``."""
    return getattr(context.model.get_input_embeddings(), "num_embeddings", context.vocab_size)


def tokens_from(sequences: Sequences, start: Tensor, count: int) -> Tensor:
    """The rows' tokens at `count` positions from `start` ``[B]`` on, ``[B, count]`` int64. Tokens outside a row are arbitrary."""
    places = start[:, None] + torch.arange(count, device=start.device)
    return sequences.tokens.gather(1, torch.minimum(places, sequences.length[:, None] - 1).clamp(min=0))


@dataclass
class FeatureState:
    """The state of a call, for :class:`ReadsFeatures`.

    Attributes:
        drafter: the network with its window and KV cache.
        tree: the shape of drafts, from :func:`decoders.strategies.draft_tree.shape_of`.
    """

    drafter: FeatureWindow
    tree: DraftTree


class ReadsFeatures(Strategy):
    """Base of strategies whose network reads the target's hidden states and fills a tree.

    A subclass implements `start`, which returns a :class:`FeatureState` or an instance of a subclass, and names the layers that its
    network reads in :attr:`~decoders.Strategy.hidden_layers` or :meth:`~decoders.Strategy.layers_for`.
    """

    rests = True
    on_device = True

    def features(self, state: Any, given: Step | PromptChunk) -> Tensor:
        """The features ``[B, N, F]`` of ``N`` tokens: by default ``given.hidden``, the input of the target's output head.

        A strategy whose network reads layers overrides this, and returns the layers' outputs from ``given.layers``.
        """
        return given.hidden

    def prefill(self, state: Any, chunk: PromptChunk) -> None:
        state.drafter.prefill(chunk, self.features(state, chunk))

    def rebatch(self, state: Any, rows: Tensor, context: Context) -> Any:
        state.drafter.rebatch(rows, context)
        state.tree = state.tree.of_rows(context.rows, context.device)
        return state

    def propose(self, state: Any, sequences: Sequences) -> Draft:
        return state.drafter.draft(state.tree, sequences)

    def observe(self, state: Any, step: Step) -> None:
        state.drafter.observe(step, self.features(state, step))


def _at(states: Tensor, index: Tensor) -> Tensor:
    """The states at ``index`` ``[B, n]`` of each row, ``states[b, index[b, n]]``: ``[B, n, F]``."""
    return states.gather(1, index[..., None].expand(-1, -1, states.shape[-1]))
