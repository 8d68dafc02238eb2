"""What a strategy drafts with: a second model (``Context.draft``), and what a grammar forces (``Context.guide``).

Letters: ``B`` rows, ``Q`` nodes that are continued, ``C`` continuations of each, ``N`` nodes of a block, ``V`` vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from .errors import UnsupportedError
from .sampling.choice import Candidates, candidates
from .sampling.processors import SamplingInputs, SamplingPlan
from .tree import TreeTensors

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

    from .constraints import Vocabulary
    from .settings import Configured
    from .tree.draft import Sequences, Step


@dataclass(frozen=True)
class Expansion:
    """Continuations that a draft model proposes for ``Q`` nodes.

    Attributes:
        tokens: ``[B, Q, C]`` int64, its ``C`` best next tokens of every node; when sampling, of the scores with noise.
        weights: ``[B, Q, C]`` float32, their log-probabilities: of ``softmax(scores + noise)``, noise 0 when greedy.
        scores: ``[B, Q, V]`` float32, the processed scores themselves, if the call needs them; ``-inf`` for tokens of the
            target that the draft does not have.
    """

    tokens: Tensor
    weights: Tensor
    scores: Tensor | None


@dataclass(frozen=True)
class Advance:
    """What a pass with a stage's draft in it has come to.

    Attributes:
        path: ``[B, N]`` int64, the accepted node at each depth; valid up to `emitted`.
        emitted: ``[B]`` int64, tokens that the rows have got.
        expansion: continuations of all ``N`` nodes of the block.
    """

    path: Tensor
    emitted: Tensor
    expansion: Expansion


class Drafter(ABC):
    """A draft model for the length of a call, with rows and a cache of its own that follow what is committed.

    A round is :meth:`begin`, then passes, then a draft made of what they gave. In a chain, :meth:`extend` appends the model's own
    choice to every row; with a stage, :meth:`advance` verifies the stage's draft tokens as the shared loop does and may append
    several. In a tree, :meth:`root` and :meth:`expand` give the best continuations of nodes, level by level. Everything stays on
    the device.

    Attributes:
        vocab_size: how many of the target's tokens the draft can propose.
        children: ``C``, continuations given per node: as many as were asked for, or the whole of a small vocabulary.
        mask_token: what stands for a token that is still to be drafted, of a model that was trained to draft several in one pass
            (PARD, arXiv:2504.18583); None of others.
    """

    vocab_size: int
    children: int
    mask_token: int | None = None

    @property
    @abstractmethod
    def passes(self) -> int:
        """Forward passes so far."""

    @property
    @abstractmethod
    def length(self) -> Tensor:
        """``[B]`` int64, tokens per row including what has been drafted."""

    @abstractmethod
    def begin(self, sequences: Sequences) -> None:
        """Takes over what is committed; drafts of the last round that were rejected are forgotten."""

    @abstractmethod
    def extend(self) -> Expansion:
        """One pass: every row gets the model's own next token, whose log-probability is the expansion's weight. ``C`` is 1."""

    @abstractmethod
    def advance(self) -> Advance:
        """One pass with the stage's draft tokens in it: every row gets one token or more."""

    @abstractmethod
    def root(self) -> Expansion:
        """One pass: the best continuations of every row's last token. ``Q`` is 1."""

    @abstractmethod
    def expand(self, nodes: Tensor, tree: TreeTensors) -> Expansion:
        """One pass: the best continuations of `nodes` ``[B, Q]``, the last ``Q`` of `tree` (whose node 0 is the last token)."""

    @abstractmethod
    def drafted(self, count: int) -> Tensor:
        """``[B, count]`` int64: the tokens written since :meth:`begin`; -1 behind the last one of a row."""

    @abstractmethod
    def observe(self, step: Step, own_nodes: int, displaced: int = 0) -> None:
        """Learns how many tokens at a row's end this model has not read, or not where they belong.

        Args:
            step: what became of the draft.
            own_nodes: nodes of the draft that this drafter made, the root included. If the block held others (merged
                strategies), any of them may have been accepted.
            displaced: most accepted nodes whose keys and values are not in the slots of their positions: 0 for a chain, the
                depth of a tree.
        """


@dataclass(frozen=True)
class OtherVocabulary:
    """A draft model to whom ids mean other tokens than to the target.

    Attributes:
        model: it.
        own: the target's tokens, in bytes.
        other: its own tokens, in bytes.
        begin: its tokens in front of every text.
        shared: share of the target's text tokens that it has.
    """

    model: PreTrainedModel
    own: Vocabulary
    other: Vocabulary
    begin: tuple[int, ...]
    shared: float


class ModulePasses(ABC):
    """A drafter that is no language model, for the length of a call: a module with a slot cache of its own.

    Committed position ``p`` of a row lives in slot ``p``, node ``i`` of a block in slot ``base + i``. What a pass writes behind a
    row's end is written anew before anything sees it. Everything stays on the device.

    Attributes:
        passes: passes of the module so far.
    """

    passes: int

    @abstractmethod
    def __call__(self, base: Tensor, *inputs: Tensor, tree: TreeTensors | None = None, **options: Any) -> Any:
        """One pass of the module over ``Q`` nodes of every row; what it gives.

        Args:
            base: ``[B]`` int64, slot and position of the block's node 0; all slots in front of it are seen.
            inputs: ``[B, Q, …]`` each, what the module reads.
            tree: the block, whose last ``Q`` nodes these are; those before have been run since. None: a chain, as text is.
                Here `visible` is free: nodes may see each other in both directions. `ancestors` and `parents` are not looked at.
            options: keywords that `module` is called with as well, few different ones; compiled passes are made for each.
        """


def cache_keyword(module: nn.Module) -> str:
    """The keyword by which `module` takes its key-value cache, ``cache`` or ``past_key_values``, for calls of layers of transformers.

    transformers 5.24 renamed it, and modeling code of a checkpoint may know the other name: it is the one that ``module.forward``
    names, else that of the installed transformers. Ask once, where a module is made, not in each pass.
    """
    from .common import transformers_compat

    return transformers_compat.cache_keyword(module)


@dataclass(frozen=True)
class DraftVocabulary:
    """The tokens of the target that a drafter with scores of its own can propose.

    Attributes:
        size: ``V``, tokens of the target.
        ids: ``[D]`` int64, the target's id of each draft id, each once; None: they are the same.
    """

    size: int
    ids: Tensor | None = None

    @staticmethod
    def of(size: int, d2t: Tensor | None = None, t2d: Tensor | None = None) -> DraftVocabulary:
        """Of the tables that EAGLE-3 checkpoints hold.

        Args:
            d2t: ``[D]`` integers, what is added to a draft id.
            t2d: ``[V]`` bool, which of the target's tokens there are, in order. One of the two is enough.

        Raises:
            UnsupportedError: they are no lists, disagree, or name no token or one that the target does not have.
        """
        ids: Tensor | None = None
        for name, table in (("d2t", d2t), ("t2d", t2d)):
            if table is not None and (table.dim() != 1 or not len(table)):
                raise UnsupportedError(f"{name} is {list(table.shape)}, not a list of one entry or more")
        if d2t is not None:
            ids = torch.arange(len(d2t), device=d2t.device) + d2t.long()
        if t2d is not None:
            named = t2d.bool().nonzero()[:, 0]
            if ids is not None and not torch.equal(ids.sort().values, named):
                raise UnsupportedError("d2t and t2d name different tokens of the target")
            ids = named if ids is None else ids
        if ids is not None and not len(ids):
            raise UnsupportedError("t2d names no token of the target")
        if ids is not None and (int(ids.min()) < 0 or int(ids.max()) >= size or len(ids.unique()) < len(ids)):
            raise UnsupportedError(f"a draft vocabulary names tokens outside of 0 … {size - 1}, or one twice")
        return DraftVocabulary(size, ids)

    def __len__(self) -> int:
        return self.size if self.ids is None else len(self.ids)

    def best(
        self, logits: Tensor, count: int, plan: SamplingPlan | None, sampling: SamplingInputs | None, positions: Tensor,
        keep_scores: bool = False,
    ) -> Expansion:  # fmt: skip
        """The `count` best continuations of every node, in the target's ids, drawn with the target's noise for these ids.

        Args:
            logits: ``[B, Q, D]``, the drafter's own.
            plan, sampling: of the :class:`~decoders.strategy.Context`.
            positions: ``[B, Q]`` int64, tokens that the row has generated before each node's continuation.
            keep_scores: whether the expansion has scores, ``-inf`` for tokens that the drafter does not have.
        """
        plan = plan or SamplingPlan()
        scores = logits.float()
        if self.ids is not None:
            scores = scores.new_full((*logits.shape[:2], self.size), float("-inf")).index_copy(-1, self.ids, scores)
        if sampling is None:  # a context made by hand: greedy
            top = scores.log_softmax(-1).topk(count)
            return Expansion(top.indices, top.values, scores if keep_scores else None)
        left = candidates(scores, plan, sampling, positions, at_least=count).settled()
        dense = left.dense() if keep_scores or self.ids is not None else None
        if self.ids is not None and dense is not None:  # noise is needed for these alone
            own = self.ids.expand(*logits.shape[:2], -1)
            left = Candidates(dense.index_select(-1, self.ids), own, self.size)
        tokens, weights = left.best(count, plan, sampling, positions)
        return Expansion(tokens, weights, dense if keep_scores else None)


class OpensDraft(Protocol):
    """:attr:`Context.draft`: opens a draft model for the length of a call."""

    def __call__(
        self, model: PreTrainedModel | str, *, ahead: int, children: int = 1, stage: Configured | None = None,
        seldom: bool = False,
    ) -> Drafter:  # fmt: skip
        """A drafter with rows, a cache and compiled passes of its own.

        Args:
            model: loaded, or the path of one.
            ahead: most nodes that a round writes behind the committed tokens.
            children: continuations of each node that :attr:`Expansion.tokens` has.
            stage: drafts for the draft model, whose rounds are then made of :meth:`Drafter.advance`.
            seldom: whether it may be asked late or never: it reads the prompts when it first drafts; where rows come and go, as
                they join. One with a stage reads them at once.

        Raises:
            UnsupportedError: a model that cannot draft for this target, or a stage that drafts from what only the target hands out.
        """


class OpensModule(Protocol):
    """:attr:`Context.module`: makes a drafter that is no language model ready for a call."""

    def __call__(
        self, module: nn.Module, *, ahead: int, example: tuple[Tensor, ...], on_device: bool = True
    ) -> ModulePasses:
        """Its passes, with a slot cache, tree masks and packed weights like a draft model's, compiled where the call compiles.

        Args:
            module: is called with its inputs and ``attention_mask``, ``position_ids`` and ``cache`` (or ``past_key_values``, if its
                ``forward`` has that), all ready, which it hands to attention layers of transformers (``LlamaDecoderLayer``, say;
                :func:`cache_keyword` has the name that they take it by).
            ahead: most nodes that a step writes behind a row.
            example: what it reads of one node, ``[1, 1, …]`` each.
            on_device: false where what drafts with it waits for the device: such a step is not recorded.

        Raises:
            UnsupportedError: a module on another device.
        """


class Forced(Protocol):
    """What the grammars of a call's rows force them to write.

    Attributes:
        on_device: whether :meth:`forced` never waits for the device.
    """

    on_device: bool

    def expect(self, sequences: Sequences) -> None:
        """:meth:`forced` will be asked; `sequences` are the rows as they begin. What it needs is there before a step is recorded."""

    def forced(self, sequences: Sequences, limit: int) -> Tensor:
        """``[B, K]`` int64, tokens of the bytes that must come next, -1 behind the last one; ``K`` is at most `limit`.

        Where several tokens would do, as each row has spelled such text before. The last bytes are left out where a row has no
        history of them and the tokenizer might join them with what follows.

        Args:
            sequences: the rows as committed, as :meth:`Strategy.propose` gets them.
            limit: most tokens per row.
        """
