"""Bases of drafters that read the target's hidden states: a small network, its window of what it has read last, and its strategy.

At slot ``j`` of a row such a network reads the target's hidden state of token ``j``, and the tokens that follow. The last committed
token has no hidden state yet, so with ``length`` tokens committed the last slot is ``length - 2``. A window of the last slots is read
again in every round, at little cost, which replaces rejected tokens and fills in newly known ones. Where steps pass without a round,
the window is read before tokens leave it unread.

Letters: ``B`` rows, ``N`` nodes or tokens of a pass, ``F`` width of the features that the network reads, ``W`` slots of the window,
``Q`` nodes that are continued, ``D`` tokens that can be drafted, ``T`` positions of a block.
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
    """A network in a call that reads a window of the target's last hidden states, and fills trees
    (:class:`~decoders.strategies.draft_tree.Expands`).

    Args:
        context: of the call.
        features: width ``F`` of the features of a node.
        new: most tokens that a step with its own draft commits: its depth, and the target's token after it.
        known: how many slots before them depend on draft tokens; 0 for networks whose slots are made of committed tokens alone.
        vocabulary: tokens that it can propose.
        children: continuations per node.

    Attributes:
        plan, sampling: of the call.
        children: ``C``, continuations per node: those asked for, or the whole of a smaller vocabulary.
        keep_scores: whether expansions have scores, for rejection rules.
        most_id: greatest token id that the target embeds.
        width: ``W``.
        window: ``[B, W, F]``, the features of every row's last slots, in the target's dtype.
        prompts: the rows as the call began, for reading prompts.
        sequences: the rows in this round, set by :meth:`draft`.
    """

    sequences: Sequences

    def __init__(
        self, context: Context, features: int, new: int, known: int, vocabulary: DraftVocabulary, children: int
    ) -> None:
        self.plan, self.sampling, self.vocabulary = context.plan, context.sampling, vocabulary
        self.children = min(children, len(vocabulary))
        self.keep_scores = context.plan is not None and context.plan.sample and not context.coupled
        self.most_id = embeddings_of(context) - 1
        self.new, self.width, self.own_nodes = new, new + known, 1
        # Greatest number of tokens in the window that were never read, and whether this step has a draft of this network.
        self.unread, self.asked = 0, False
        assert context.sequences is not None
        self.prompts = context.sequences  # the row numbers, for reading prompts
        # The features of the last slots of every row, [B, W, F].
        self.window = torch.zeros(context.rows, self.width, features, dtype=dtype_of(context), device=context.device)
        self.index = torch.arange(self.width, device=context.device)

    def static_parts(self) -> dict[str, Any]:
        """The tensors that a recorded step reads and writes; all others are computed in every round."""
        return dict(
            window=self.window, index=self.index, ids=self.vocabulary.ids, sampling=self.sampling, plan=self.plan,
            sizes=(self.new, self.width, self.children, self.keep_scores), own=self.own_parts(),
        )  # fmt: skip

    @abstractmethod
    def own_parts(self) -> Any:
        """The network's own tensors and modules that a recorded step reads and writes: its :class:`~decoders.drafters.ModulePasses`."""

    @abstractmethod
    def read(self, base: Tensor, features: Tensor, sequences: Sequences) -> Any:
        """Runs the network over ``N`` slots of every row, and keeps what :meth:`root` needs of the last one.

        Args:
            base: ``[B]`` int64, the first slot.
            features: ``[B, N, F]``, the target's hidden states of the tokens at these positions.
            sequences: the rows, whose tokens :func:`tokens_from` reads.
        """

    @abstractmethod
    def root(self) -> Expansion:
        """The best continuations ``[B, 1, C]`` of every row's last token. Calls :meth:`read_window` first."""

    @abstractmethod
    def expand(self, nodes: Tensor, tree: TreeTensors) -> Expansion:
        """The best continuations ``[B, Q, C]`` of `nodes` ``[B, Q]`` int64, the last ``Q`` of `tree`."""

    def rebatch(self, rows: Tensor, context: Context) -> None:
        """Keeps the windows of rows that stay; the prompts of new rows come by :meth:`prefill`. rows: as :meth:`Strategy.rebatch`
        gets them.
        """
        assert context.sequences is not None
        self.prompts, self.sampling = context.sequences, context.sampling
        self.window = torch.where((rows >= 0)[:, None, None], self.window[rows.clamp(min=0)], 0)

    def prefill(self, chunk: PromptChunk, features: Tensor) -> None:
        """Reads a chunk of the prompts; features ``[B, N, F]``."""
        start = chunk.positions[:, 0]
        self.read(start, features, self.prompts)
        index = self.prompts.length[:, None] - 1 - self.width + self.index - start[:, None]
        inside = (index >= 0) & (index < features.shape[1])
        taken = _at(features, index.clamp(0, features.shape[1] - 1))
        self.window.copy_(torch.where(inside[..., None], taken, self.window))

    def observe(self, step: Step, features: Tensor) -> None:
        """Moves the window on to the tokens that a step has committed; features ``[B, N, F]`` of its nodes."""
        every = torch.cat([self.window, _at(features, step.path)], dim=1)
        # If the host has not read `known`, a step commits at most one token per level of this strategy's own draft, and at most one
        # per node of another draft. Blocks of this strategy's own drafts are padded to at most twice their size.
        nodes = step.path.shape[1]
        own = self.asked and step.own_nodes != 0 and nodes <= max(2 * self.own_nodes, self.own_nodes + 3)
        most = self.new if own else nodes
        if step.known is not None:
            most = max(map(len, step.known.tokens), default=0)
        self.unread, self.asked = self.unread + most, False
        if self.unread > self.new:  # the window has no room for what was not read
            self.read(step.sequences.length - step.emitted - 1 - self.width, every, step.sequences)
            self.unread = 0
        self.window.copy_(_at(every, step.emitted[:, None] + self.index))

    def draft(self, tree: DraftTree, sequences: Sequences) -> Draft:
        """The draft of a round: :meth:`root` reads the window, and `tree` is filled."""
        self.sequences = sequences
        draft = tree.draft(self)
        self.own_nodes, self.unread, self.asked = len(draft.topology), 0, True
        return draft

    def read_window(self) -> None:
        """Lets the network read the window, in which are all tokens committed since the last round."""
        self.read(self.sequences.length - 1 - self.width, self.window, self.sequences)

    def best(self, logits: Tensor, offsets: Tensor | int) -> Expansion:
        """The best continuations of ``Q`` nodes, by the network's logits, drawn with the noise that the target will draw with.

        Args:
            logits: ``[B, Q, D]``.
            offsets: ``[B, Q]`` int64, or one number for all: how far each node is behind the row's last token.
        """
        written = (self.sequences.length - self.sequences.prompt_length)[:, None]
        return self.vocabulary.best(
            logits, self.children, self.plan, self.sampling, written + offsets, self.keep_scores
        )


class FeatureDrafter(FeatureWindow):
    """A network that drafts token by token: each level of a tree is a pass over the level before, as in EAGLE.

    A subclass writes :meth:`read`, :meth:`first`, :meth:`further` and :meth:`own_parts`.
    """

    @abstractmethod
    def first(self) -> Tensor:
        """Logits ``[B, 1, D]`` after every row's last token; :meth:`read` has read the window."""

    @abstractmethod
    def further(self, nodes: Tensor, tree: TreeTensors) -> Tensor:
        """Logits ``[B, Q, D]`` after `nodes` ``[B, Q]`` int64, the last ``Q`` of `tree`, whose node 0 is the row's last token."""

    def root(self) -> Expansion:
        self.read_window()
        return self.best(self.first(), 0)

    def expand(self, nodes: Tensor, tree: TreeTensors) -> Expansion:
        logits = self.further(nodes.clamp(0, self.most_id), tree)
        return self.best(logits, tree.offsets[:, -nodes.shape[1] :])


class BlockDrafter(FeatureWindow):
    """A network that drafts all positions of a block in one pass: the continuations of a level are the same under every parent.

    A subclass writes :meth:`read` and :meth:`own_parts`, and a :meth:`root` that returns :meth:`opened` of its logits.
    """

    def opened(self, logits: Tensor) -> Expansion:
        """The first level of a block of ``T`` positions, by its logits ``[B, T, D]``; :meth:`expand` returns the further ones."""
        offsets = torch.arange(logits.shape[1], device=logits.device).expand(logits.shape[:2])
        self.level, self.places = 0, self.best(logits, offsets)
        return self._level(1)

    def expand(self, nodes: Tensor, tree: TreeTensors) -> Expansion:
        self.level += 1
        return self._level(nodes.shape[1])

    def _level(self, nodes: int) -> Expansion:
        """The block's continuations of the present level, repeated for `nodes` nodes."""
        here, places = slice(self.level, self.level + 1), self.places
        scores = None if places.scores is None else places.scores[:, here].expand(-1, nodes, -1)
        return Expansion(
            places.tokens[:, here].expand(-1, nodes, -1), places.weights[:, here].expand(-1, nodes, -1), scores
        )


def dtype_of(context: Context) -> torch.dtype:
    """The dtype of the target's weights, in which a network beside it runs."""
    return next(p.dtype for p in context.model.parameters() if p.is_floating_point())


def embeddings_of(context: Context) -> int:
    """Number of rows of the target's embedding, which may exceed its vocabulary ``V``."""
    return getattr(context.model.get_input_embeddings(), "num_embeddings", context.vocab_size)


def tokens_from(sequences: Sequences, start: Tensor, count: int) -> Tensor:
    """``[B, count]`` int64: the rows' tokens from positions `start` ``[B]`` on; arbitrary tokens beyond either end of a row."""
    places = start[:, None] + torch.arange(count, device=start.device)
    return sequences.tokens.gather(1, torch.minimum(places, sequences.length[:, None] - 1).clamp(min=0))


@dataclass
class FeatureState:
    """The state of a call, for :class:`ReadsFeatures`.

    Attributes:
        drafter: the network with its window and cache.
        tree: the shape of drafts, of :func:`decoders.strategies.draft_tree.shape_of`.
    """

    drafter: FeatureWindow
    tree: DraftTree


class ReadsFeatures(Strategy):
    """Base of strategies whose network reads the target's hidden states and fills a tree.

    A subclass writes `start`, which returns a :class:`FeatureState` or a subclass of it, and names the layers that it reads as
    :attr:`~decoders.Strategy.hidden_layers` or in :meth:`~decoders.Strategy.layers_for`.
    """

    rests = True
    on_device = True

    def features(self, state: Any, given: Step | PromptChunk) -> Tensor:
        """``[B, N, F]``, the features of ``N`` tokens: by default the input of the target's output head, ``given.hidden``. A
        network that reads layers takes them from ``given.layers``.
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
    """``[B, n, F]``: ``states[b, index[b, n]]``."""
    return states.gather(1, index[..., None].expand(-1, -1, states.shape[-1]))
