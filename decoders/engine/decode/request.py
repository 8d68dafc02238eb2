"""A request (a call in the loop's terms) and its output. Several requests may share steps."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...constraints import CompiledGrammar
from ...costs.curve import default_folder
from ...report import ObservedCall, Report, TracedStep, Written
from ...sampling.processors import SamplingPlan
from ...settings import RuntimeSettings
from ...strategy import Draft, Strategy
from ...verifiers.verifier import Verifier
from ..model.given import GivenPrompts
from ..model.own_forward import MultimodalInputs
from ..model.ranks import ALONE, Ranks
from ..model.target import Target
from .asked import Models, Returned, Sampling, Stopping
from .core import StepOutput
from .criteria import CriteriaRun, Outcome, PaddedRows, Processors
from .kind import StepKind, kind_of
from .prefix_cache import KeptText


@dataclass(frozen=True)
class Request:
    """A checked call. All packages below ``hf`` read a call's arguments from this object.

    Attributes:
        models: the models that its strategy may use.
        strategy: proposes drafts.
        resolve: creates a strategy from a registry name and settings, for strategies that are composed of others.
        origin: distribution and version of the strategy, for notes on errors.
        verifier: accepts draft tokens. Processors on the host need the coupled verifier.
        runtime: settings of the loop.
        prompts: a 1-D int64 tensor per row, without padding; -1 at positions without a token id, whose keys and values are `given`.
        padded_prompt: ``[B, P]`` as the user passed it.
        new_tokens: greatest number of tokens to generate per row.
        stopping: the conditions that end a row before its budget is used.
        plan: the operations on logits inside the step; ``masked`` if a row has a grammar.
        sampling: the values of the plan's operations, and the seed.
        processors: processors on the host, if the plan cannot express them.
        grammars: per row, None for rows without a grammar; empty if no row has a grammar.
        returned: results besides tokens, and who is told of each step.
        salts: cache salts per row; empty for "" everywhere. Rows with different salts share neither keys and values nor memories of
            strategies.
        given: beginnings of the prompts that are embeddings, or the caller's cache.
        multimodal: images and sounds of the prompts, or None.
        side: of its texts, if rotary tables depend on the length (:meth:`~decoders.engine.model.target.Target.side_of`).
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
    side: int = 0
    begun: float | None = None

    @property
    def cost_folder(self) -> Path:
        """The folder of measured costs."""
        return self.runtime.cost_cache or default_folder()

    def salt_of(self, row: int) -> str:
        return self.salts[row] if self.salts else ""

    @cached_property
    def kind(self) -> StepKind:
        """The kind of its steps."""
        return kind_of(self)

    @property
    def padding(self) -> list[Tensor]:
        """Per row, transformers' padding before its text."""
        lengths = [len(p) if self.given is None else int((p >= 0).sum()) for p in self.prompts]
        return [row[: max(len(row) - own, 0)] for row, own in zip(self.padded_prompt, lengths, strict=True)]

    @property
    def reach(self) -> Sequence[int]:
        """Per row, the number of first prompt tokens whose keys and values the loop cannot compute from ids."""
        if self.given is not None:
            return self.given.fixed
        return self.multimodal.ends if self.multimodal is not None else (0,) * len(self.prompts)

    def prefix_of(self, row: int) -> KeptText:
        """A row's prompt, for the comparison with kept texts."""
        text, salt, inputs = self.prompts[row].cpu(), self.salt_of(row), self.multimodal
        if self.side:  # keys computed with another rotary table
            salt = f"\0{self.side} {salt}"
        if inputs is None:
            return KeptText(text, salt=salt)
        return KeptText(text, salt=f"{inputs.hash_of(row)} {salt}", least=inputs.ends[row])

    @property
    def memory_salt(self) -> str:
        """The salt of the strategy's memories; "" if rows do not learn from each other, since memories then hold no texts."""
        return "" if self.strategy.rows_apart else self.salt_of(0)


def empty_report(request: Request, target: Target) -> Report:
    """The report of a request before decoding."""
    strategy, verifier = request.strategy, request.verifier
    return Report(
        strategy=strategy.name, settings=strategy.settings_in_force(), exact=strategy.exact and verifier.exact,
        verifier=verifier.name, verifier_settings=verifier.settings_in_force(),
        rows=len(request.prompts), prompt_tokens=[len(prompt) for prompt in request.prompts],
        new_tokens=[0] * len(request.prompts),
        same_bits=target.checks.invariance.holds if target.checks.invariance is not None else None,
        checked=target.checks.day, weights=target.precision.weights or "keep", kv_cache=target.precision.cache or "keep",
    )  # fmt: skip


@dataclass(frozen=True)
class TokenLogprobs:
    """The log-probability of a token by the model's own logits, before temperature, filters, penalties and grammar.

    Attributes:
        token: its id.
        logprob: natural logarithm of its probability.
        top: the likeliest tokens and their log probabilities, best first.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class RequestOutput:
    """The output of a request so far. No other object on the host keeps the tokens.

    Attributes:
        report: its figures; if it does not share steps, the figures of the whole batch.
        generated: token ids per row, stop token included.
        lengths: tokens per row, prompt included.
        finished: whether each row has ended.
        drafters: per row and token, the strategy that drafted it; "" for the target's own.
        logprobs, logits, scores: per row and token, if requested.
        padded_rows: the rows in transformers' layout.
        criteria: stopping criteria on the host, or None.
        error: an exception of a callback, which ends this request and no other.
    """

    def __init__(self, request: Request, report: Report, ranks: Ranks = ALONE) -> None:
        self.request, self.report = request, report
        rows = len(request.prompts)
        self.lengths = [len(prompt) for prompt in request.prompts]
        self.generated: list[list[int]] = [[] for _ in range(rows)]
        self.logits: list[list[Tensor]] = [[] for _ in range(rows)]
        self.scores: list[list[Tensor]] = [[] for _ in range(rows)]
        self.drafters: list[list[str]] = [[] for _ in range(rows)]
        traced: list[list[TracedStep]] = [[] for _ in range(rows)]
        report.written = Written(request.prompts, self.generated, self.drafters, traced, request.models.tokenizer)
        self.logprobs: list[list[TokenLogprobs]] = [[] for _ in range(rows)]
        self.finished = [request.new_tokens == 0] * rows
        self.padded_rows = PaddedRows(request.padded_prompt, self.generated, request.stopping.pad_token)
        self.criteria: CriteriaRun | None = None
        if request.stopping.criteria is not None:
            kept = self.scores if request.plan.keep_scores else None
            self.criteria = CriteriaRun(request.stopping.criteria, self.padded_rows, kept, ranks)
        self.error: Exception | None = None
        self._closed = False
        self._observed = ObservedCall(
            request.models.model, request.strategy.name, list(self.lengths), request.new_tokens, request.plan.sample
        )
        self._tell_observers("start")

    @property
    def rows(self) -> int:
        return len(self.lengths)

    @property
    def ended(self) -> bool:
        return all(self.finished)

    @cached_property
    def _prompts(self) -> list[list[int]]:
        return [prompt.tolist() for prompt in self.request.prompts]

    def tokens_from(self, row: int, first: int) -> list[int]:
        """The prompt and generated tokens of a row, from index `first` on. Reads the prompt from the device at most once."""
        prompt = len(self.request.prompts[row])
        if first >= prompt:
            return self.generated[row][first - prompt :]
        return self._prompts[row][first:] + self.generated[row]

    def text(self, row: int) -> Tensor:
        """The prompt and generated tokens of a row, 1-D int64."""
        prompt = self.request.prompts[row]
        return torch.cat([prompt, torch.tensor(self.generated[row], dtype=torch.int64, device=prompt.device)])

    def book(self, outcome: Outcome, out: StepOutput | None, first: int) -> list[list[int]]:
        """Adds a step to the output, and returns the new tokens of every row.

        Args:
            outcome: of this request's rows.
            out: of all rows; needed for logits and scores only.
            first: this request's first row in the batch.
        """
        request, report = self.request, self.report
        report.steps += 1
        report.accepted += sum(map(min, outcome.accepted, outcome.emitted))  # criteria may have cut the row
        report.drafted += sum(outcome.drafted)
        new = outcome.written
        for row, tokens in enumerate(new):
            if self.finished[row]:
                continue
            count = len(tokens)
            if count:
                histogram = report.accepted_lengths
                histogram.extend([0] * (count - len(histogram)))
                histogram[count - 1] += 1
            if out is not None and request.returned.logits:
                self.logits[row] += out.logits[first + row, out.path[first + row, :count]].unbind(0)
            if out is not None and out.scores is not None:
                self.scores[row] += out.scores[first + row, out.path[first + row, :count]].unbind(0)
            if out is not None and request.returned.top_logprobs is not None:
                logits = out.logits[first + row, out.path[first + row, :count]]
                self.logprobs[row] += logprobs_of(tokens, logits, request.returned.top_logprobs)
            accepted = min(outcome.accepted[row], count)
            drafters = outcome.drafters[row] if outcome.drafters else [request.strategy.name] * accepted
            self.drafters[row] += [*drafters[:accepted], *[""] * (count - accepted)]
            self.generated[row] += tokens
            self.lengths[row] += count
            report.new_tokens[row] += count
        self.finished = [bool(ended) for ended in outcome.ended]
        return new

    def trace(
        self, draft: Draft, tokens: list[list[int]], paths: list[list[int]], outcome: Outcome, first: int
    ) -> None:  # fmt: skip
        """Adds the tree of a step to the report.

        Args:
            tokens, paths, outcome: of all rows: verified draft tokens, accepted nodes, and the outcome before stopping criteria.
            first: this request's first row in the batch.
        """
        count = draft.tokens.shape[1]
        assert self.report.written is not None
        for row in range(first, first + self.rows):
            if self.finished[row - first]:
                continue
            last = self.generated[row - first] or self.request.prompts[row - first].tolist()
            accepted = min(outcome.accepted[row], outcome.emitted[row])
            own = outcome.new[row][accepted] if outcome.emitted[row] > accepted else None
            names = draft.drafters[row] if draft.drafters is not None else [self.request.strategy.name] * count
            path = [0, *paths[row][1 : accepted + 1]]
            traced = TracedStep([last[-1], *tokens[row]], list(draft.parents[row]), path, own, ["", *names])
            self.report.written.steps[row - first].append(traced)

    def tell(self, new: list[list[int]]) -> None:
        """Passes the new tokens of a step to observers and streamer."""
        self._tell_observers("step", lambda: ([list(row) for row in new],))  # a copy for each observer
        if self.request.returned.on_step is not None:
            self.request.returned.on_step(new, self.generated, self.finished)

    def close(self, error: BaseException | None = None) -> None:
        """Calls the observers' `end` once. error: the error that ended the request, if any."""
        if not self._closed:
            self._closed = True
            self._tell_observers("end", lambda: (self.report, error or self.error))

    def _tell_observers(self, method: str, told: Callable[[], tuple[Any, ...]] = tuple) -> None:
        """Calls a method of every observer; its exceptions become warnings."""
        for observer in self.request.returned.observers:
            try:
                getattr(observer, method)(self._observed, *told())
            except Exception as error:
                warnings.warn(
                    f"decoders: {method} of observer {observer.name!r} raised {error!r}; the call goes on", RuntimeWarning,
                    stacklevel=3,
                )  # fmt: skip


def logprobs_of(tokens: list[int], logits: Tensor, top: int) -> list[TokenLogprobs]:
    """The log-probabilities of `tokens` and of the `top` likeliest tokens, under logits ``[T, V]``."""
    every = logits.float().log_softmax(-1)
    own = every.gather(1, torch.tensor(tokens, device=every.device)[:, None])[:, 0].tolist()
    best = every.topk(min(top, every.shape[-1]), dim=-1)
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [
        TokenLogprobs(token, logprob, tuple(zip(ids, values, strict=True)))
        for token, logprob, (ids, values) in zip(tokens, own, pairs, strict=True)
    ]
