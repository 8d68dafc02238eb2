"""The interfaces with which strategies draft: ``Context.draft`` opens a draft model, ``Context.module`` prepares a drafting network,
and ``Context.guide`` looks up the text that a grammar forces.

Letters: ``B`` rows, ``Q`` nodes to continue, ``C`` continuations per node, ``N`` nodes of a block, ``V`` vocabulary.
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
    from .sequences import Sequences, Step
    from .settings import Configured


@dataclass(frozen=True)
class Expansion:
    """Continuations that a draft model proposes for ``Q`` nodes.

    Attributes:
        tokens: ``[B, Q, C]`` int64, the ``C`` best next tokens of every node, by scores plus noise. Greedy decoding has noise 0.
        weights: ``[B, Q, C]`` float32, log-probabilities of the tokens under ``softmax(scores + noise)``.
        scores: ``[B, Q, V]`` float32, the draft model's logits after the call's operations on logits, ``-inf`` for tokens that the
            draft model lacks; None if the call does not need them.
    """

    tokens: Tensor
    weights: Tensor
    scores: Tensor | None


@dataclass(frozen=True)
class Advance:
    """The result of a draft model's pass that verifies the draft of a stage (a strategy that drafts for the draft model).

    Attributes:
        path: ``[B, N]`` int64, the accepted node at each depth; valid at depths below `emitted`.
        emitted: ``[B]`` int64, number of tokens appended to each row.
        expansion: continuations of all ``N`` nodes that the pass verified.
    """

    path: Tensor
    emitted: Tensor
    expansion: Expansion


class Drafter(ABC):
    """A draft model during a call. It stores its own copy of the committed tokens, followed by draft tokens, and has its own cache.

    A round computes one draft: it calls :meth:`begin` and then runs forward passes. For a chain, :meth:`extend` appends the draft
    model's own next token to every row. For a tree, :meth:`root` and :meth:`expand` return the best continuations of nodes, level by
    level. With a stage (a strategy that drafts for the draft model), :meth:`advance` verifies the stage's draft tokens as the target
    verifies drafts, and may append several tokens. All results stay on the device.

    Attributes:
        vocab_size: number of the target's tokens that the draft model can propose.
        children: ``C``, continuations per node: the requested number, or the size of the draft model's vocabulary if that is smaller.
        mask_token: the mask id of a model that was trained to draft several tokens in one pass (PARD, arXiv:2504.18583); None for
            others.
    """

    vocab_size: int
    children: int
    mask_token: int | None = None

    @property
    @abstractmethod
    def passes(self) -> int:
        """Number of forward passes so far."""

    @property
    @abstractmethod
    def length(self) -> Tensor:
        """``[B]`` int64, number of tokens per row, draft tokens included."""

    @abstractmethod
    def begin(self, sequences: Sequences) -> None:
        """Begins the next draft: copies the committed tokens, and drops the rejected tokens of the last draft."""

    @abstractmethod
    def extend(self) -> Expansion:
        """Runs one pass, appends the draft model's next token to every row, and returns it with its log-probability; ``C`` is 1."""

    @abstractmethod
    def advance(self) -> Advance:
        """Runs one forward pass that verifies the stage's draft (see the class), and appends at least one token to every row."""

    @abstractmethod
    def root(self) -> Expansion:
        """Runs one pass, and returns the best continuations of every row's last token; ``Q`` is 1."""

    @abstractmethod
    def expand(self, nodes: Tensor, tree: TreeTensors) -> Expansion:
        """Runs one pass over the last ``Q`` nodes of `tree`, whose tokens are `nodes` ``[B, Q]``, and returns their best continuations.

        Node 0 of the tree is the row's last token.
        """

    @abstractmethod
    def drafted(self, count: int) -> Tensor:
        """``[B, count]`` int64: the tokens appended since :meth:`begin`, -1 after a row's last token."""

    @abstractmethod
    def observe(self, step: Step, own_nodes: int, displaced: int = 0) -> None:
        """Computes from a step how many of a row's last tokens the draft model must read again before it drafts.

        Args:
            step: the verified draft.
            own_nodes: number of nodes that this drafter proposed, root included. If ``step.own_nodes`` is not None, it replaces this
                argument. In merged strategies the step also verifies nodes of other drafters, and may accept them.
            displaced: greatest number of accepted tokens that the draft model must read again, because their nodes are not in the slots
                of their positions: 0 for a chain, the depth for a tree.
        """


@dataclass(frozen=True)
class OtherVocabulary:
    """A draft model whose vocabulary differs from the target's.

    Attributes:
        own, other: the vocabularies of the target (own) and of the draft model (other).
        begin: the tokens that the draft model expects before every text.
        shared: fraction of the target's text tokens that the draft model also has.
    """

    model: PreTrainedModel
    own: Vocabulary
    other: Vocabulary
    begin: tuple[int, ...]
    shared: float


class ModulePasses(ABC):
    """Runs the forward passes of a drafting network (a module that is not a language model) during a call, with its own slot cache.

    The committed token at position ``p`` of a row is in slot ``p`` of the cache. Node ``i`` of the draft tree is in slot ``base + i``,
    where ``base`` is the first argument of each pass. Slots that a pass writes after a row's end are overwritten before they are read.
    All results stay on the device.

    Attributes:
        passes: number of forward passes so far.
    """

    passes: int

    @abstractmethod
    def __call__(self, base: Tensor, *inputs: Tensor, tree: TreeTensors | None = None, **options: Any) -> Any:
        """Runs the module on ``Q`` nodes of every row and returns its output.

        Args:
            base: ``[B]`` int64, slot and position of node 0. All earlier slots are visible.
            inputs: ``[B, Q, …]`` each, the module's inputs.
            tree: the draft tree. This pass runs the tree's last ``Q`` nodes; earlier passes ran the other nodes. None: a chain. The
                tree's `visible` may be any mask, also a bidirectional mask. The tree's `ancestors` and `parents` are not read.
            options: further keyword arguments of the module. Each combination of values is compiled separately, so use few
                combinations.
        """


def cache_keyword(module: nn.Module) -> str:
    """The keyword with which `module` takes the KV cache: ``cache`` or ``past_key_values``.

    The signature of ``module.forward`` tells which, or else the version of the installed transformers (5.24 renamed the keyword). Call
    this function once per module, not in each pass.
    """
    from .common import transformers_compat

    return transformers_compat.cache_keyword(module)


@dataclass(frozen=True)
class DraftVocabulary:
    """The target's tokens that a drafting network with its own output head can propose.

    Attributes:
        size: ``V``, number of the target's tokens.
        ids: ``[D]`` int64, the target's id of each draft id, without duplicates; None if draft ids are the target's ids.
    """

    size: int
    ids: Tensor | None = None

    @staticmethod
    def of(size: int, d2t: Tensor | None = None, t2d: Tensor | None = None) -> DraftVocabulary:
        """The draft vocabulary from the tables of an EAGLE-3 checkpoint; one of the two tables is enough.

        Args:
            d2t: ``[D]`` integers: the target's id minus the draft id, for each draft id.
            t2d: ``[V]`` bool, True for the target's tokens that the drafter has. Draft ids number these tokens from 0, in order.

        Raises:
            UnsupportedError: the tables have another shape, disagree, are empty, or name a token that the target lacks.
        """
        ids: Tensor | None = None
        for name, table in (("d2t", d2t), ("t2d", t2d)):
            if table is not None and (table.dim() != 1 or not len(table)):
                raise UnsupportedError(f"{name} must be a 1-D tensor with at least one entry, not {list(table.shape)}")
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
            raise UnsupportedError(f"a draft vocabulary names tokens outside of 0 … {size - 1}, or a token twice")
        return DraftVocabulary(size, ids)

    def __len__(self) -> int:
        return self.size if self.ids is None else len(self.ids)

    def best(
        self, logits: Tensor, count: int, plan: SamplingPlan | None, sampling: SamplingInputs | None, positions: Tensor,
        keep_scores: bool = False,
    ) -> Expansion:  # fmt: skip
        """The `count` best continuations of every node, as the target's ids; in sampling, by scores plus the target's noise.

        Args:
            logits: ``[B, Q, D]``, the drafter's logits.
            plan, sampling: from the :class:`~decoders.strategy.Context`.
            positions: ``[B, Q]`` int64, number of tokens that the row has generated before each node's continuation.
            keep_scores: whether the expansion has scores. Scores are ``-inf`` for tokens that the drafter lacks.
        """
        plan = plan or SamplingPlan()
        scores = logits.float()
        if self.ids is not None:
            scores = scores.new_full((*logits.shape[:2], self.size), float("-inf")).index_copy(-1, self.ids, scores)
        if sampling is None:  # a context created outside a call is greedy
            top = scores.log_softmax(-1).topk(count)
            return Expansion(top.indices, top.values, scores if keep_scores else None)
        left = candidates(scores, plan, sampling, positions, at_least=count).settled()
        dense = left.dense() if keep_scores or self.ids is not None else None
        if self.ids is not None and dense is not None:  # only tokens that the drafter knows need noise
            own = self.ids.expand(*logits.shape[:2], -1)
            left = Candidates(dense.index_select(-1, self.ids), own, self.size)
        tokens, weights = left.best(count, plan, sampling, positions)
        return Expansion(tokens, weights, dense if keep_scores else None)


class OpensDraft(Protocol):
    """:attr:`Context.draft`: opens a draft model for a call."""

    def __call__(
        self, model: PreTrainedModel | str, *, ahead: int, children: int = 1, stage: Configured | None = None,
        seldom: bool = False,
    ) -> Drafter:  # fmt: skip
        """A drafter with its own rows, cache and compiled passes.

        Args:
            model: a model object or a path.
            ahead: greatest number of nodes that a draft writes to the cache after the committed tokens.
            children: number of continuations per node in :attr:`Expansion.tokens`.
            stage: a strategy that drafts for the draft model; the draft model then drafts with calls of :meth:`Drafter.advance`.
            seldom: whether the strategy may draft late or never. If True, the draft model reads the prompts when it first drafts, and
                not at the start of the call. In a scheduler, the draft model reads a row's prompt when the row joins. With a stage, it
                always reads the prompts at the start.

        Raises:
            UnsupportedError: the model cannot draft for this target, or the stage needs hidden states or prompts. Only the target
                provides these.
        """


class OpensModule(Protocol):
    """:attr:`Context.module`: prepares a drafting network, a module that is not a language model, for a call."""

    def __call__(
        self, module: nn.Module, *, ahead: int, example: tuple[Tensor, ...], on_device: bool = True
    ) -> ModulePasses:
        """Returns an object that runs the module with a slot cache, tree masks and kernels, as the loop runs draft models; compiled if
        the call is compiled.

        Args:
            module: called with its inputs and ``attention_mask``, ``position_ids`` and ``cache`` (or ``past_key_values``, if its
                ``forward`` has this keyword). It must pass these three to its attention layers. The layers must be transformers' own,
                such as ``LlamaDecoderLayer``; :func:`cache_keyword` returns their keyword for the cache.
            ahead: greatest number of nodes that a step writes after a row's committed tokens.
            example: the module's inputs for one node, ``[1, 1, …]`` each.
            on_device: False if the strategy waits for the device. Its steps are then not recorded as CUDA graphs.

        Raises:
            UnsupportedError: the module is on another device.
        """


class Forced(Protocol):
    """Looks up forced text: bytes that must come next in a row, because its grammar allows no others.

    Attributes:
        on_device: whether :meth:`forced` never waits for the device.
    """

    on_device: bool

    def expect(self, sequences: Sequences) -> None:
        """Prepares :meth:`forced` before CUDA graphs of steps are recorded. sequences: the rows at the start of the call."""

    def forced(self, sequences: Sequences, limit: int) -> Tensor:
        """Returns tokens for the bytes that must come next, ``[B, K]`` int64, -1 after the last token; ``K`` is at most `limit`.

        The bytes are split as earlier in the row: the next token is the token that last followed the same token there, else the row's
        latest token that begins with the next byte. If neither fits, the tokenizer splits the bytes, except bytes at the end that it
        may join with later bytes.

        Args:
            sequences: the committed rows, the argument of :meth:`Strategy.propose`.
            limit: greatest number of tokens per row.
        """
