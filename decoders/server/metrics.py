"""The server's metrics, in Prometheus' format."""

from __future__ import annotations

import time
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from ..scheduling.generation import Generation
from .pool import SchedulerPool

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
#: Accepted draft tokens are counted by position in the draft, up to this number of positions.
POSITIONS = 32
_STEPS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class Metrics:
    """The metrics of a server.

    Args:
        pool: the schedulers whose waiting and running requests are counted.
        rows: greatest number of requests that one scheduler decodes at once.
        model: the model's name.
    """

    def __init__(self, pool: SchedulerPool, rows: int, model: str) -> None:
        self.model = model
        registry = self.registry = CollectorRegistry()
        counter, named = partial(Counter, registry=registry), ["strategy"]
        seconds = partial(Histogram, buckets=_SECONDS, registry=registry)
        self.requests = counter("decoders_requests", "Requests by their end", ["endpoint", "outcome"])
        self.prompt_tokens = counter("decoders_prompt_tokens", "Tokens of prompts")
        self.reused_tokens = counter("decoders_reused_prompt_tokens", "Prompt tokens that were reused from the cache")
        self.tokens = counter("decoders_generated_tokens", "New tokens", named)
        self.drafted = counter("decoders_draft_tokens", "Draft tokens that were verified", named)
        self.accepted = counter("decoders_accepted_tokens", "Draft tokens that were accepted", named)
        self.steps = counter("decoders_row_steps", "Steps times the rows in them", named)
        #: Metrics with vLLM's names, which dashboards and AIPerf read.
        self.speculation = {
            name: counter(f"vllm:spec_decode_num_{name}", text, ["model_name"]).labels(model)
            for name, text in {
                "drafts": "Row-steps of requests with drafts",
                "draft_tokens": "Draft tokens that were verified",
                "accepted_tokens": "Draft tokens that were accepted",
            }.items()
        }
        self.positions = counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos", "Accepted draft tokens by their place in a draft",
            ["model_name", "position"],
        )  # fmt: skip
        self.first = seconds("decoders_time_to_first_token_seconds", "Seconds from arrival to the first token")
        self.between = Histogram(
            "decoders_time_between_tokens_seconds", "Seconds of a step, divided by a request's new tokens in the step",
            buckets=_STEPS, registry=registry,
        )  # fmt: skip
        self.queued = seconds("decoders_queue_seconds", "From arrival to a row")
        self.whole = seconds("decoders_request_seconds", "Seconds from arrival to the end")
        gauges = {
            "decoders_queue_length": ("Requests that wait for a row", lambda: pool.waiting),
            "decoders_rows_in_use": ("Requests that are decoded", lambda: pool.running),
            "decoders_rows": ("Rows of all schedulers", lambda: rows * len(pool.strategies)),
            "decoders_schedulers": ("Strategies that have a scheduler", lambda: len(pool.strategies)),
            "decoders_tokens_per_second": ("New tokens per second, of the last ten seconds", self.rate),
        }
        for name, (text, value) in gauges.items():
            Gauge(name, text, registry=registry).set_function(value)
        self._recent: list[tuple[float, int]] = []

    def ended(self, generation: Generation) -> None:
        """Adds the figures of an ended request to the metrics. Called in the decoding thread."""
        now, times = time.monotonic(), generation.times
        self.whole.observe(now - generation.submitted)
        if generation.waited is not None:
            self.queued.observe(generation.waited)
        last, before = generation.submitted, 0
        for moment, count in times:
            if before:
                self.between.observe((moment - last) / (count - before))
            else:
                self.first.observe(moment - last)
            last, before = moment, count
        # `generation.report` would validate the text first, so the report is read from `generation.member`.
        report = generation.member.report if generation.member is not None else None
        if report is None:
            return
        self.prompt_tokens.inc(len(generation.call.request.prompts[0]))
        self.reused_tokens.inc(sum(report.reused))
        # All merged strategies share a label, because clients can merge a few strategies in thousands of orders.
        name = "merged" if "+" in report.strategy else report.strategy
        self.tokens.labels(name).inc(before)
        self.drafted.labels(name).inc(report.drafted)
        self.accepted.labels(name).inc(report.accepted)
        self.steps.labels(name).inc(sum(report.accepted_lengths))
        if report.drafted:
            figures = {
                "drafts": sum(report.accepted_lengths),
                "draft_tokens": report.drafted,
                "accepted_tokens": report.accepted,
            }
            for figure, count in figures.items():
                self.speculation[figure].inc(count)
            for position in range(min(len(report.accepted_lengths) - 1, POSITIONS)):
                self.positions.labels(self.model, position).inc(sum(report.accepted_lengths[position + 1 :]))
        self._recent = [*(each for each in self._recent if each[0] > now - 10), (now, before)][-10_000:]

    def rate(self) -> float:
        """New tokens per second, of requests that ended in the last ten seconds."""
        since = time.monotonic() - 10
        return sum(count for moment, count in list(self._recent) if moment > since) / 10
