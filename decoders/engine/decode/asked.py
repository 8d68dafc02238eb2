"""What a request asks for, by subject: the models that strategies may use, how tokens are drawn, what ends a row, what is returned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ...report import Observer
from ...sampling.prefixes import OperationSequences
from .criteria import Criteria

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ...drafters import OtherVocabulary
    from .engine import Engine


class DraftModels(Protocol):
    """The draft models that a call may use, each given loaded or as a path."""

    def engine_of(self, model: PreTrainedModel | str) -> Engine:
        """The engine of a draft model whose vocabulary is the target's."""

    def vocabulary_of(self, model: PreTrainedModel | str) -> OtherVocabulary | None:
        """See :attr:`decoders.context.Context.vocabulary_of`."""


@dataclass(frozen=True)
class Models:
    """The models of a call, for strategies.

    Attributes:
        model: the user's.
        tokenizer: the tokenizer, if the caller gave one.
        assistant_model: the draft model, for strategies that need one.
        draft_models: the draft models that the strategy may open.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    assistant_model: PreTrainedModel | None
    draft_models: DraftModels


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn by the plan.

    Attributes:
        values: the plan's parameters (see :class:`~decoders.sampling.SamplingPlan`).
        seed: of the noise.
        sequences: per operation, the sequences of tokens that it looks for, each with the bias of its last token.
    """

    values: tuple[float, ...]
    seed: int
    sequences: OperationSequences = ()


@dataclass(frozen=True)
class Stopping:
    """What ends a row before its budget does.

    Attributes:
        tokens: end-of-sequence ids.
        pad_token: fills rows that have ended.
        criteria: asked after every token, on the host.
    """

    tokens: tuple[int, ...]
    pad_token: int
    criteria: Criteria | None = None


@dataclass(frozen=True)
class Returned:
    """What a call returns besides tokens, and the observers of its steps.

    Attributes:
        logits: return the logits of every generated token.
        top_logprobs: number of likeliest tokens whose log probabilities are kept beside the generated token's; None: keep none.
        on_step: called after every step with the new tokens of every row, all tokens of every row, and which rows have ended.
        observers: called when it starts, after every step, and when it ends.
    """

    logits: bool = False
    top_logprobs: int | None = None
    on_step: Callable[[list[list[int]], list[list[int]], list[bool]], None] | None = None
    observers: tuple[Observer, ...] = ()
