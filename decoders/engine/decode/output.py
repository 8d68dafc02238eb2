"""The output of a request so far: its tokens and its report, and the observers and streamer that receive them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ...report import ObservedCall, Report, TracedStep, Written
from ...strategy import Draft
from ..model.ranks import ALONE, Ranks
from .core import StepOutput
from .criteria import CriteriaRun, PaddedRows
from .request import Request
from .verify import Outcome


@dataclass(frozen=True)
class TokenLogprobs:
    """The log-probability of a token from the model's own logits, before temperature, filters, penalties and grammar.

    Attributes:
        token: the token's id.
        logprob: natural logarithm of the token's probability.
        top: ids and log-probabilities of the likeliest tokens at the token's position, best first.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class RequestOutput:
    """The output of a request so far. It holds the only list of the request's tokens on the host.

    Attributes:
        report: the report on the request; for a request that does not share steps, it is also the batch's report.
        generated: generated token ids per row, stop token included.
        lengths: number of tokens per row, prompt included.
        finished: whether each row has ended.
        drafters: per row and generated token, the name of the strategy that drafted the token; "" for a token that was not drafted.
        logprobs, logits, scores: per row and generated token; empty lists unless they are requested.
        padded_rows: the rows in transformers' layout.
        criteria: the stopping criteria that run on the host; None if there are none.
        error: an exception of a callback or a grammar in a shared batch; it ends only this request.
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
        self.error: BaseException | None = None
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
        """The tokens of a row, prompt included, from index `first` on. The prompts are read from the device at most once."""
        prompt = len(self.request.prompts[row])
        if first >= prompt:
            return self.generated[row][first - prompt :]
        return self._prompts[row][first:] + self.generated[row]

    def text(self, row: int) -> Tensor:
        """The prompt and generated tokens of a row, 1-D int64."""
        prompt = self.request.prompts[row]
        return torch.cat([prompt, torch.tensor(self.generated[row], dtype=torch.int64, device=prompt.device)])

    def book(self, outcome: Outcome, out: StepOutput | None, first: int) -> list[list[int]]:
        """Adds a step's results to the output, and returns the new tokens of every row.

        Args:
            outcome: the step's outcome for this request's rows.
            out: the step's output for all rows of the batch, used for logits, scores and logprobs; None after a replay of a whole step.
            first: index of this request's first row in the batch.
        """
        request, report = self.request, self.report
        report.steps += 1
        report.accepted += sum(map(min, outcome.accepted, outcome.emitted))  # criteria may have cut accepted tokens
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
        """Adds the draft tree of a step to the report.

        Args:
            tokens, paths, outcome: for all rows of the batch: verified draft tokens, accepted nodes, and the outcome that stopping
                criteria have not cut yet.
            first: index of this request's first row in the batch.
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
        """Passes the new tokens of a step to the observers and the streamer."""
        self._tell_observers("step", lambda: ([list(row) for row in new],))  # a copy for each observer
        if self.request.returned.on_step is not None:
            self.request.returned.on_step(new, self.generated, self.finished)

    def close(self, error: BaseException | None = None) -> None:
        """Calls the observers' ``end``; later calls do nothing. error: the exception that ended the request, if any."""
        if not self._closed:
            self._closed = True
            self._tell_observers("end", lambda: (self.report, error or self.error))

    def _tell_observers(self, method: str, arguments: Callable[[], tuple[Any, ...]] = tuple) -> None:
        """Calls `method` of every observer with the call and the results of `arguments`. Exceptions of observers become warnings."""
        for observer in self.request.returned.observers:
            try:
                getattr(observer, method)(self._observed, *arguments())
            except Exception as error:
                warnings.warn(
                    f"decoders: {method} of observer {observer.name!r} raised {error!r}; the call goes on", RuntimeWarning,
                    stacklevel=3,
                )  # fmt: skip


def logprobs_of(tokens: list[int], logits: Tensor, top: int) -> list[TokenLogprobs]:
    """Log-probabilities of ``T`` generated `tokens` and of the `top` likeliest tokens at each position, from `logits` ``[T, V]``."""
    every = logits.float().log_softmax(-1)
    own = every.gather(1, torch.tensor(tokens, device=every.device)[:, None])[:, 0].tolist()
    best = every.topk(min(top, every.shape[-1]), dim=-1)
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [
        TokenLogprobs(token, logprob, tuple(zip(ids, values, strict=True)))
        for token, logprob, (ids, values) in zip(tokens, own, pairs, strict=True)
    ]
