"""What a call asks for, in the loop's terms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from ...constraints import CompiledGrammar
from ...costs.curve import default_folder
from ...report import Observer
from ...sampling.processors import SamplingPlan
from ...settings import RuntimeSettings
from ...strategy import Strategy
from ...verifiers.verifier import Verifier
from .criteria import Criteria
from .host_processors import Processors

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ...drafting import OtherVocabulary
    from .engine import Engine


class DraftModels(Protocol):
    """The draft models that a call may use, each given loaded or as a path."""

    def engine_of(self, model: PreTrainedModel | str) -> Engine:
        """The engine of a draft model whose vocabulary is the target's."""

    def vocabulary_of(self, model: PreTrainedModel | str) -> OtherVocabulary | None:
        """See :attr:`decoders.context.Context.vocabulary_of`."""


@dataclass(frozen=True)
class Request:
    """One call, validated. Everything below ``hf`` reads it here; what follows from a field is a property.

    Attributes:
        model: the user's, for strategies.
        tokenizer: for strategies, if there is one.
        assistant_model: for strategies that need one.
        draft_models: the draft models that its strategy may open.
        strategy: proposes.
        resolve: makes a strategy from a registry name and settings, for strategies that are built of others.
        origin: distribution and version of the strategy, for notes on errors.
        verifier: decides what is accepted. Processors on the host go with the coupled rule only.
        runtime: how the loop runs.
        prompts: one 1-D int64 tensor per row, padding removed.
        padded_prompt: ``[B, P]`` as the user passed it.
        new_tokens: most tokens to generate per row.
        stop_tokens: end-of-sequence ids.
        pad_token: follows them.
        plan: what runs on logits inside the step; ``masked`` if a row has a grammar.
        values: the plan's parameters (see :class:`SamplingPlan`).
        seed: of the noise.
        processors: called on the host instead, if the plan cannot express them.
        criteria: asked after every token, on the host.
        grammars: what each row may write, None is anything; empty where no row has one.
        keep_logits: return them per generated token.
        top_logprobs: note the log probability of every token, and of that many likeliest ones; None: of none.
        on_step: called after every step with the new tokens of every row, all tokens of every row, and which rows have ended.
        observers: are told when it starts, of every step, and when it ends.
        begun: when the caller called, in seconds of ``time.perf_counter()``; None where nobody waits for the whole of it.
        salts: one per row: rows use one another's keys and values, and what strategies keep between calls, only where these are
            equal. Empty: "" for all.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    assistant_model: PreTrainedModel | None
    draft_models: DraftModels
    strategy: Strategy
    resolve: Callable[..., Strategy]
    origin: str
    verifier: Verifier
    runtime: RuntimeSettings
    prompts: list[Tensor]
    padded_prompt: Tensor
    new_tokens: int
    stop_tokens: tuple[int, ...]
    pad_token: int
    plan: SamplingPlan
    values: tuple[float, ...]
    seed: int
    processors: Processors | None = None
    criteria: Criteria | None = None
    grammars: Sequence[CompiledGrammar | None] = ()
    keep_logits: bool = False
    top_logprobs: int | None = None
    on_step: Callable[[list[list[int]], list[list[int]], list[bool]], None] | None = None
    observers: tuple[Observer, ...] = ()
    salts: tuple[str, ...] = ()
    begun: float | None = None

    @property
    def keep_scores(self) -> bool:
        """Whether the processed logits of every generated token are returned."""
        return self.plan.keep_scores

    @property
    def cost_folder(self) -> Path:
        """Where measured costs are kept between processes."""
        return self.runtime.cost_cache or default_folder()

    def salt_of(self, row: int) -> str:
        return self.salts[row] if self.salts else ""

    @property
    def memory_salt(self) -> str:
        """The salt of what the strategy keeps between calls: rows of different salts share only what learns nothing of their texts."""
        return "" if self.strategy.rows_apart else self.salt_of(0)
