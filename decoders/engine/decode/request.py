"""A request: a checked call of ``generate`` or of a scheduler, and its parts. Several requests may share steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from ...constraints import CompiledGrammar
from ...costs.curve import default_folder
from ...report import Observer, Report
from ...sampling.prefixes import OperationSequences
from ...sampling.processors import SamplingPlan
from ...settings import RuntimeSettings
from ...strategy import Strategy
from ...verifiers.verifier import Verifier
from ..model.buckets import low_precision
from ..model.given import GivenPrompts
from ..model.own_forward import MultimodalInputs
from ..model.target import Target
from .criteria import Criteria, Processors
from .kind import StepKind, kind_of
from .prefix_cache import KeptText

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ...drafters import OtherVocabulary
    from .engine import Engine


class DraftModels(Protocol):
    """Provides the draft models that a call may use. The methods take the loaded draft model or its path."""

    def engine_of(self, model: PreTrainedModel | str) -> Engine:
        """Returns the engine of `model`, a draft model with the target's vocabulary."""

    def vocabulary_of(self, model: PreTrainedModel | str) -> OtherVocabulary | None:
        """Compares the vocabulary of a draft model with the target's, see :attr:`decoders.context.Context.vocabulary_of`."""


@dataclass(frozen=True)
class Models:
    """The models of a call, for strategies.

    Attributes:
        model: the target model, as the user passed it.
        tokenizer: the target's tokenizer; None if the caller gave none.
        assistant_model: the draft model that the caller passed; None if the caller passed none.
        draft_models: returns the engines of the draft models that the strategy may open.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    assistant_model: PreTrainedModel | None
    draft_models: DraftModels


@dataclass(frozen=True)
class Sampling:
    """The values that the sampling plan's operations use.

    Attributes:
        values: the plan's parameters (see :class:`~decoders.sampling.SamplingPlan`).
        seed: seed of the noise.
        sequences: per operation, the token sequences that the operation looks for, each with the bias on the sequence's last token.
    """

    values: tuple[float, ...]
    seed: int
    sequences: OperationSequences = ()


@dataclass(frozen=True)
class Stopping:
    """What ends a row before it has ``max_new_tokens`` tokens.

    Attributes:
        tokens: end-of-sequence ids.
        pad_token: fills rows that have ended.
        criteria: the stopping criteria, called on the host after every token; None if there are none.
    """

    tokens: tuple[int, ...]
    pad_token: int
    criteria: Criteria | None = None


@dataclass(frozen=True)
class Returned:
    """What a call returns besides tokens, and who observes its steps.

    Attributes:
        logits: whether the logits of every generated token are returned.
        top_logprobs: log-probabilities of the generated token and this many likeliest tokens are returned; None: no log-probabilities.
        on_step: called after every step with lists by row: new tokens, all generated tokens, and whether the row has ended.
        observers: called when the call starts, after every step, and when the call ends.
    """

    logits: bool = False
    top_logprobs: int | None = None
    on_step: Callable[[list[list[int]], list[list[int]], list[bool]], None] | None = None
    observers: tuple[Observer, ...] = ()


@dataclass(frozen=True)
class Request:
    """A checked call. All packages in layers below ``hf`` read a call's arguments from this object.

    Attributes:
        models: the models that the strategy may use.
        strategy: proposes drafts.
        resolve: creates a strategy from a registry name and settings, for strategies that are composed of others.
        origin: name and version of the Python package that provides the strategy, for notes on errors.
        verifier: accepts draft tokens. With processors on the host it must be the coupled verifier.
        runtime: settings of the loop.
        prompts: per row, 1-D int64 without padding; -1 at positions without a token id (`given` has their keys and values).
        padded_prompt: ``[B, P]`` int64, the prompts as the user passed them.
        new_tokens: greatest number of tokens to generate per row.
        stopping: the conditions that end a row before it has `new_tokens` tokens.
        plan: the operations on logits inside the step; its `masked` is True if a row has a grammar.
        sampling: the values of the plan's operations, and the seed.
        processors: logits processors that run on the host, because the plan cannot express them; None if there are none.
        grammars: per row, the compiled grammar, or None for a row without a grammar; empty if no row has a grammar.
        returned: results besides tokens, and observers of the steps.
        salts: cache salts per row; empty if every salt is "". Rows with different salts share neither keys and values nor memories of
            strategies.
        given: the beginnings of prompts that the caller passed as embeddings or as a cache; None if the caller passed none.
        multimodal: images and sounds of the prompts; None if there are none.
        rope_table: which rotary table the texts need, see :meth:`~decoders.engine.model.target.Target.rope_table_of`.
        begun: ``time.perf_counter()`` at the call of ``generate``; None in a scheduler, which does not time preparation.
    """

    models: Models
    strategy: Strategy
    resolve: Callable[..., Strategy]
    origin: str
    verifier: Verifier
    runtime: RuntimeSettings
    prompts: list[Tensor]
    padded_prompt: Tensor
    new_tokens: int
    stopping: Stopping
    plan: SamplingPlan
    sampling: Sampling
    processors: Processors | None = None
    grammars: Sequence[CompiledGrammar | None] = ()
    returned: Returned = Returned()
    salts: tuple[str, ...] = ()
    given: GivenPrompts | None = None
    multimodal: MultimodalInputs | None = None
    rope_table: int = 0
    begun: float | None = None

    @property
    def cost_folder(self) -> Path:
        return self.runtime.cost_cache or default_folder()

    def salt_of(self, row: int) -> str:
        return self.salts[row] if self.salts else ""

    @cached_property
    def kind(self) -> StepKind:
        return kind_of(self)

    @property
    def padding(self) -> list[Tensor]:
        """Per row, the padding tokens before its text."""
        lengths = [len(p) if self.given is None else int((p >= 0).sum()) for p in self.prompts]
        return [row[: max(len(row) - own, 0)] for row, own in zip(self.padded_prompt, lengths, strict=True)]

    @property
    def reach(self) -> Sequence[int]:
        """Per row, the number of leading prompt tokens whose keys and values the loop cannot compute from token ids."""
        if self.given is not None:
            return self.given.fixed
        return self.multimodal.ends if self.multimodal is not None else (0,) * len(self.prompts)

    def prefix_of(self, row: int) -> KeptText:
        """A row's prompt, to be compared with kept texts."""
        text, salt, inputs = self.prompts[row].cpu(), self.salt_of(row), self.multimodal
        if self.rope_table:  # the row's keys are computed with another rotary table
            salt = f"\0{self.rope_table} {salt}"
        if inputs is None:
            return KeptText(text, salt=salt)
        return KeptText(text, salt=f"{inputs.hash_of(row)} {salt}", least=inputs.ends[row])

    @property
    def memory_salt(self) -> str:
        """The salt of the strategy's memories; "" for a strategy with `rows_apart`, because its memories hold no texts."""
        return "" if self.strategy.rows_apart else self.salt_of(0)


def empty_report(request: Request, target: Target) -> Report:
    """The report of a request before its first step."""
    strategy, verifier, invariance = request.strategy, request.verifier, target.checks.invariance
    if invariance is not None:
        same_bits: bool | None = invariance.holds
    else:
        same_bits = False if low_precision(target.dtype, target.rounds) else None
    return Report(
        strategy=strategy.name, settings=strategy.settings_in_force(), exact=strategy.exact and verifier.exact,
        verifier=verifier.name, verifier_settings=verifier.settings_in_force(),
        rows=len(request.prompts), prompt_tokens=[len(prompt) for prompt in request.prompts],
        new_tokens=[0] * len(request.prompts),
        same_bits=same_bits, checked=target.checks.day,
        weights=target.precision.weights or "keep", kv_cache=target.precision.cache or "keep",
    )  # fmt: skip
