"""A request (what a call asks for, in the loop's terms) and its output. Several requests may share steps."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    pass


@dataclass(frozen=True)
class Request:
    """One call, validated. Everything below ``hf`` reads a call's arguments here.

    Attributes:
        models: the models that its strategy may use.
        strategy: proposes.
        resolve: makes a strategy from a registry name and settings, for strategies that are built of others.
        origin: distribution and version of the strategy, for notes on errors.
        verifier: decides what is accepted. Processors on the host go with the coupled rule only.
        runtime: how the loop runs.
        prompts: one 1-D int64 tensor per row, padding removed.
            -1 stands for a token without an id, whose keys and values are `given`.
        padded_prompt: ``[B, P]`` as the user passed it.
        new_tokens: most tokens to generate per row.
        stopping: what ends a row before that.
        plan: what runs on logits inside the step; ``masked`` if a row has a grammar.
        sampling: the plan's parameters, and the seed.
        processors: called on the host instead, if the plan cannot express them.
        grammars: what each row may write, None is anything; empty where no row has one.
        returned: what it gives besides tokens, and who is told of its steps.
        salts: cache salts, one per row, empty for "" everywhere. Keys and values, and memories of strategies, are shared only
            between rows of equal salts.
        given: the beginnings of the prompts where these are embeddings, or a cache that the caller has computed.
        multimodal: images and sounds of the prompts; None if there are none.
        side: of its texts, where rotary tables depend on the length (:meth:`~decoders.engine.model.target.Target.side_of`).
        begun: ``time.perf_counter()`` when ``generate`` was called; None in a scheduler, which does not time preparation.
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
        """Where measured costs are kept between processes."""
        return self.runtime.cost_cache or default_folder()

    def salt_of(self, row: int) -> str:
        return self.salts[row] if self.salts else ""

    @cached_property
    def kind(self) -> StepKind:
        """What its steps depend on."""
        return kind_of(self)

    @property
    def padding(self) -> list[Tensor]:
        """Per row, what transformers shows in front of its text."""
        lengths = [len(p) if self.given is None else int((p >= 0).sum()) for p in self.prompts]
        return [row[: max(len(row) - own, 0)] for row, own in zip(self.padded_prompt, lengths, strict=True)]

    @property
    def reach(self) -> Sequence[int]:
        """Per row, how many tokens of the prompt have keys and values that the loop cannot compute from their ids."""
        if self.given is not None:
            return self.given.fixed
        return self.multimodal.ends if self.multimodal is not None else (0,) * len(self.prompts)

    def prefix_of(self, row: int) -> KeptText:
        """A row's prompt, to be compared with kept texts."""
        text, salt, inputs = self.prompts[row].cpu(), self.salt_of(row), self.multimodal
        if self.side:  # keys of the other table
            salt = f"\0{self.side} {salt}"
        if inputs is None:
            return KeptText(text, salt=salt)
        return KeptText(text, salt=f"{inputs.hash_of(row)} {salt}", least=inputs.ends[row])

    @property
    def memory_salt(self) -> str:
        """The salt of the strategy's memories; "" where rows do not learn from each other, since memories then hold no texts."""
        return "" if self.strategy.rows_apart else self.salt_of(0)


def empty_report(request: Request, target: Target) -> Report:
    """The report on a request before anything has been decoded."""
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
    """How likely a token was by the model's own logits: before temperature, filters, penalties and grammar.

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
        request: what was asked for.
        report: its figures; where it shares no steps those of the whole batch.
        generated: token ids per row, stop token included.
        lengths: tokens per row, prompt included.
        finished: per row.
        drafters: per row and token, the strategy that drafted it; "" for the target's own.
        logprobs: per row and token, if asked for.
        logits: per row and token, if asked for.
        scores: per row and token, if asked for.
        padded_rows: the rows as transformers would show them.
        criteria: asked on the host, None if there are none.
        error: an exception of one of its callbacks that ends this request and no other.
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
        """Prompt and generated tokens of a row, from one on. The prompt is read from the device once, if at all."""
        prompt = len(self.request.prompts[row])
        if first >= prompt:
            return self.generated[row][first - prompt :]
        return self._prompts[row][first:] + self.generated[row]

    def text(self, row: int) -> Tensor:
        """Prompt and generated tokens of a row, 1-D int64."""
        prompt = self.request.prompts[row]
        return torch.cat([prompt, torch.tensor(self.generated[row], dtype=torch.int64, device=prompt.device)])

    def book(self, outcome: Outcome, out: StepOutput | None, first: int) -> list[list[int]]:
        """Adds a step to the output, and returns the new tokens of every row.

        Args:
            outcome: of this request's rows.
            out: of all rows; needed for logits and scores only.
            first: the first of this request's rows among them.
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
        """Keeps the whole tree of a step in the report.

        Args:
            tokens: of all rows, the draft tokens as they were verified.
            paths: of all rows, the accepted nodes.
            outcome: of all rows, before stopping criteria.
            first: the first of this request's rows among them.
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
        """Tells observers and streamer what a step has written."""
        self._tell_observers("step", lambda: ([list(row) for row in new],))  # each observer has lists of its own
        if self.request.returned.on_step is not None:
            self.request.returned.on_step(new, self.generated, self.finished)

    def close(self, error: BaseException | None = None) -> None:
        """Calls the observers' `end`, the first time only; `error` is what ended the request, if anything did."""
        if not self._closed:
            self._closed = True
            self._tell_observers("end", lambda: (self.report, error or self.error))

    def _tell_observers(self, method: str, told: Callable[[], tuple[Any, ...]] = tuple) -> None:
        """Calls a method of every observer; what it raises is a warning."""
        for observer in self.request.returned.observers:
            try:
                getattr(observer, method)(self._observed, *told())
            except Exception as error:
                warnings.warn(
                    f"decoders: {method} of observer {observer.name!r} raised {error!r}; the call goes on", RuntimeWarning,
                    stacklevel=3,
                )  # fmt: skip


def logprobs_of(tokens: list[int], logits: Tensor, top: int) -> list[TokenLogprobs]:
    """The log probabilities of `tokens` and of the `top` likeliest ones, under logits ``[T, V]``."""
    every = logits.float().log_softmax(-1)
    own = every.gather(1, torch.tensor(tokens, device=every.device)[:, None])[:, 0].tolist()
    best = every.topk(min(top, every.shape[-1]), dim=-1)
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [
        TokenLogprobs(token, logprob, tuple(zip(ids, values, strict=True)))
        for token, logprob, (ids, values) in zip(tokens, own, pairs, strict=True)
    ]
