"""What strategies draft with: a second model (``Context.draft``), a module (``Context.module``), and forced text (``Context.guide``).

Letters: ``B`` rows, ``Q`` nodes that are continued, ``C`` continuations of each, ``N`` nodes of a block, ``V`` vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from .common.devices import in_64_bits
from .errors import UnsupportedError
from .sampling.choice import Candidates, candidates
from .sampling.processors import SamplingInputs, SamplingPlan
from .tree import TreeTensors

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

    from .constraints import Vocabulary
    from .draft import Sequences, Step
    from .settings import Configured


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
    """The result of a pass that verifies a stage's draft.

    Attributes:
        path: ``[B, N]`` int64, the accepted node at each depth; valid up to `emitted`.
        emitted: ``[B]`` int64, tokens appended to the rows.
        expansion: continuations of all ``N`` nodes of the block.
    """

    path: Tensor
    emitted: Tensor
    expansion: Expansion


class Drafter(ABC):
    """A draft model during a call, with its own rows and cache, which follow the committed tokens.

    A round is :meth:`begin`, then passes, then a draft of their results. For a chain, :meth:`extend` appends the model's own
    choice to every row; with a stage, :meth:`advance` verifies the stage's draft tokens as the shared loop does and may append
    several. For a tree, :meth:`root` and :meth:`expand` return the best continuations of nodes, level by level. Everything stays
    on the device.

    Attributes:
        vocab_size: how many of the target's tokens the draft can propose.
        children: ``C``, continuations per node: as many as were asked for, or the whole of a smaller vocabulary.
        mask_token: the id for tokens still to be drafted, for a model trained to draft several in one pass (PARD,
            arXiv:2504.18583); None for others.
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
        """``[B]`` int64, tokens per row, drafted ones included."""

    @abstractmethod
    def begin(self, sequences: Sequences) -> None:
        """Begins a round: copies the committed tokens and drops rejected ones of the last round."""

    @abstractmethod
    def extend(self) -> Expansion:
        """One pass: every row gets the model's own next token, whose log-probability is the expansion's weight. ``C`` is 1."""

    @abstractmethod
    def advance(self) -> Advance:
        """One pass over the stage's draft tokens: every row gets one token or more."""

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
            step: the verified draft.
            own_nodes: nodes that this drafter proposed, the root included. If the block had others (merged strategies), any
                of them may have been accepted.
            displaced: most accepted nodes whose keys and values are not in the slots of their positions: 0 for a chain, the
                depth of a tree.
        """


@dataclass(frozen=True)
class OtherVocabulary:
    """A draft model whose ids mean other tokens than the target's.

    Attributes:
        model: the draft model.
        own: the target's tokens, in bytes.
        other: the draft model's tokens, in bytes.
        begin: the draft model's tokens in front of every text.
        shared: share of the target's text tokens that the draft model has.
    """

    model: PreTrainedModel
    own: Vocabulary
    other: Vocabulary
    begin: tuple[int, ...]
    shared: float


class ModulePasses(ABC):
    """A drafting network that is no language model, during a call: a module with its own slot cache.

    Committed position ``p`` of a row is in slot ``p``, node ``i`` of a block in slot ``base + i``. Slots that a pass writes behind a
    row's end are overwritten before they are read. Everything stays on the device.

    Attributes:
        passes: passes of the module so far.
    """

    passes: int

    @abstractmethod
    def __call__(self, base: Tensor, *inputs: Tensor, tree: TreeTensors | None = None, **options: Any) -> Any:
        """One pass of the module over ``Q`` nodes of every row; returns its output.

        Args:
            base: ``[B]`` int64, slot and position of the block's node 0; all slots in front of it are visible.
            inputs: ``[B, Q, …]`` each, the module's inputs.
            tree: the block, whose last ``Q`` nodes are run; earlier ones were run before. None: a chain. `visible` may be any
                relation, also in both directions; `ancestors` and `parents` are not used.
            options: further keywords of the module. Passes are compiled for each combination, so there should be few.
        """


def cache_keyword(module: nn.Module) -> str:
    """The keyword by which `module` takes its key-value cache, ``cache`` or ``past_key_values``, for calls of layers of transformers.

    transformers 5.24 renamed it, and modeling code of a checkpoint may use either name: the result is the name in ``module.forward``,
    else that of the installed transformers. Call this once per module, not in each pass.
    """
    from .common import transformers_compat

    return transformers_compat.cache_keyword(module)


@dataclass(frozen=True)
class DraftVocabulary:
    """The target's tokens that a drafter with scores of its own can propose.

    Attributes:
        size: ``V``, tokens of the target.
        ids: ``[D]`` int64, the target's id of each draft id, all different; None if they are equal.
    """

    size: int
    ids: Tensor | None = None

    @staticmethod
    def of(size: int, d2t: Tensor | None = None, t2d: Tensor | None = None) -> DraftVocabulary:
        """From the tables in EAGLE-3 checkpoints.

        Args:
            d2t: ``[D]`` integers that are added to draft ids.
            t2d: ``[V]`` bool, the target's tokens that the drafter has, in order. One of the two is enough.

        Raises:
            UnsupportedError: they are no lists, disagree, are empty, or name a token that the target does not have.
        """
        ids: Tensor | None = None
        for name, table in (("d2t", d2t), ("t2d", t2d)):
            if table is not None and (table.dim() != 1 or not len(table)):
                raise UnsupportedError(f"{name} is {list(table.shape)}, not a list of one entry or more")
        if d2t is not None:
            ids = torch.arange(len(d2t), device=d2t.device) + d2t.long()
        if t2d is not None:
            named = t2d.bool().nonzero()[:, 0]
            if ids is not None and not torch.equal(in_64_bits(ids).sort().values.to(ids.device), named):
                raise UnsupportedError("d2t and t2d name different tokens of the target")
            ids = named if ids is None else ids
        if ids is not None and not len(ids):
            raise UnsupportedError("t2d names no token of the target")
        if ids is not None and (
            int(ids.min()) < 0 or int(ids.max()) >= size or len(in_64_bits(ids).unique()) < len(ids)
        ):
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
        if sampling is None:  # a context created outside a call: greedy
            top = scores.log_softmax(-1).topk(count)
            return Expansion(top.indices, top.values, scores if keep_scores else None)
        left = candidates(scores, plan, sampling, positions, at_least=count).settled()
        dense = left.dense() if keep_scores or self.ids is not None else None
        if self.ids is not None and dense is not None:  # only the draft's tokens need noise
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
        """A drafter with its own rows, cache and compiled passes.

        Args:
            model: loaded, or a path.
            ahead: most nodes that a round writes behind the committed tokens.
            children: continuations per node in :attr:`Expansion.tokens`.
            stage: a strategy that drafts for the draft model, whose rounds then consist of :meth:`Drafter.advance`.
            seldom: whether it may be asked late or never: it reads the prompts when it first drafts, or where rows join and leave
                as they join. One with a stage reads them at once.

        Raises:
            UnsupportedError: the model cannot draft for this target, or the stage needs hidden states or prompts, which only the target
                provides.
        """


class OpensModule(Protocol):
    """:attr:`Context.module`: prepares a drafting network that is no language model for a call."""

    def __call__(
        self, module: nn.Module, *, ahead: int, example: tuple[Tensor, ...], on_device: bool = True
    ) -> ModulePasses:
        """The module's passes, with a slot cache, tree masks and products as for a draft model, compiled if the call is.

        Args:
            module: called with its inputs and ``attention_mask``, ``position_ids`` and ``cache`` (or ``past_key_values``, if its
                ``forward`` has that), which it passes on to attention layers of transformers (such as ``LlamaDecoderLayer``;
                :func:`cache_keyword` returns their name of the cache).
            ahead: most nodes that a step writes behind a row.
            example: its inputs for one node, ``[1, 1, …]`` each.
            on_device: False if the strategy waits for the device: such steps are not recorded.

        Raises:
            UnsupportedError: the module is on another device.
        """


class Forced(Protocol):
    """The text that the grammars of a call's rows force.

    Attributes:
        on_device: whether :meth:`forced` never waits for the device.
    """

    on_device: bool

    def expect(self, sequences: Sequences) -> None:
        """Announces calls of :meth:`forced`, so that it is prepared before a step is recorded. sequences: the rows at the start."""

    def forced(self, sequences: Sequences, limit: int) -> Tensor:
        """``[B, K]`` int64, tokens of the bytes that must come next, -1 behind the last one; ``K`` is at most `limit`.

        The bytes are split into tokens as each row has spelled such text before. The last bytes are left out where a row has no
        history of them and the tokenizer might join them with what follows.

        Args:
            sequences: the rows as committed, as :meth:`Strategy.propose` gets them.
            limit: most tokens per row.
        """
