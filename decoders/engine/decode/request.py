"""A call in the loop's terms, and what it gives back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from ...constraints import CompiledGrammar
from ...report import Observer, Report
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


@dataclass(frozen=True)
class Request:
    """One call, with everything of transformers' resolved.

    Attributes:
        strategy: proposes.
        model: the user's, for strategies.
        prompts: one 1-D int64 tensor per row, padding removed.
        padded_prompt: ``[B, P]`` as the user passed it.
        new_tokens: most tokens to generate per row.
        runtime: how the loop runs.
        stop_tokens: end-of-sequence ids.
        pad_token: follows them.
        plan: what runs on logits inside the step.
        values: the plan's parameters (see :class:`SamplingPlan`).
        seed: of the noise.
        processors: called on the host instead, if the plan cannot express them.
        criteria: asked after every token, on the host.
        on_step: told the new tokens of every row and which rows have ended, after every step.
        keep_logits: return them per generated token.
        keep_scores: the same, processed.
        top_logprobs: note the log probability of every token, and of that many likeliest ones; None: of none.
        verifier: decides what is accepted, None is the coupled rule; it cannot be had with host processors.
        grammars: what each row may write, None is anything; with any, the plan is ``masked``.
        origin: distribution and version of the strategy, for notes on errors.
        tokenizer: for strategies, if there is one.
        assistant_model: for strategies that need one.
        engine_of: the engine of a draft model: a loaded one, or a path; checks that its vocabulary is the target's.
        vocabulary_of: see :attr:`decoders.strategy.Context.vocabulary_of`.
        resolve: makes a strategy from a registry name and settings.
        observers: are told how it goes.
        cost_folder: keeps measured costs between processes; None keeps them in memory.
        salts: one per row: rows use one another's keys and values, and what strategies keep between calls, only where these are
            equal; nothing is "" for all.
    """

    strategy: Strategy
    model: PreTrainedModel
    prompts: list[Tensor]
    padded_prompt: Tensor
    new_tokens: int
    runtime: RuntimeSettings
    stop_tokens: tuple[int, ...] = ()
    pad_token: int = 0
    plan: SamplingPlan = SamplingPlan()
    values: tuple[float, ...] = ()
    seed: int = 0
    processors: Processors | None = None
    criteria: Criteria | None = None
    on_step: Callable[[list[list[int]], list[bool]], None] | None = None
    keep_logits: bool = False
    keep_scores: bool = False
    top_logprobs: int | None = None
    verifier: Verifier | None = None
    grammars: Sequence[CompiledGrammar | None] = ()
    origin: str = ""
    tokenizer: PreTrainedTokenizerBase | None = None
    assistant_model: PreTrainedModel | None = None
    engine_of: Callable[[PreTrainedModel | str], Engine] | None = None
    vocabulary_of: Callable[[PreTrainedModel | str], OtherVocabulary | None] | None = None
    resolve: Callable[..., Strategy] | None = None
    observers: tuple[Observer, ...] = ()
    cost_folder: Path | None = None
    salts: tuple[str, ...] = ()

    def salt_of(self, row: int) -> str:
        """The salt of a row."""
        return self.salts[row] if self.salts else ""

    @property
    def memory_salt(self) -> str:
        """That of what the strategy keeps between calls. Rows of different salts share one that learns nothing from their texts."""
        return "" if self.strategy.rows_apart else self.salt_of(0)


@dataclass
class Decoded:
    """What a call has written.

    Attributes:
        tokens: generated ids per row, stop token included.
        report: what it took.
        logits: raw, per row and token, if asked for.
        scores: processed, per row and token, if asked for.
    """

    tokens: list[list[int]]
    report: Report
    logits: list[list[Tensor]]
    scores: list[list[Tensor]]
