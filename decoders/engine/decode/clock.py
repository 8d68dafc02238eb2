"""The clock of a batch: it times the parts of each step (propose, mask, core, …) for the report and for the cost models."""

from __future__ import annotations

import time
from dataclasses import replace

from ...report.surroundings import waiting_share
from ...strategy import Draft
from ..model.blocks import NodeBlock
from .proposer import Proposer
from .step import Clock, Stopwatch
from .verify import Outcome


class StepClock(Clock):
    """Times the steps of a batch.

    Attributes:
        piece_seconds: seconds that the last prompt piece (:attr:`Batch.next_piece`) took: its share, by tokens, of the step's core.
    """

    def __init__(self, proposer: Proposer) -> None:
        self.batch = batch = proposer.batch
        self.proposer, self.report = proposer, batch.report
        self.timings = batch.report.timings
        self.piece_seconds = 0.0
        self._threads = batch.engine.threads
        self._observing = 0.0  # seconds of the last `observe`, if the strategy does not observe steps without a draft

    def begun(self) -> None:
        self._before = replace(self.timings) if self.batch.shared else self.timings
        self._stopwatch, self._compile_seconds = Stopwatch(self.timings), self.timings.compile
        self._compiled = self._replayed = False
        if self._threads is not None and self._threads.most > 1:
            self._threads.use()
        self._began = time.perf_counter(), time.thread_time()

    def proposed(self) -> None:
        self._drafting = self._stopwatch.next()
        self.timings.propose += self._drafting

    def masked(self) -> None:
        self.timings.mask += self._stopwatch.next()
        self._passes, self._replays = self.batch.forward_pass.compiled_passes, self.batch.session.replays

    def read(self, draft: Draft, block: NodeBlock, outcome: Outcome | None) -> None:
        batch, report = self.batch, self.report
        assert outcome is not None
        self._compiled = batch.forward_pass.compiled_passes > self._passes
        self._replayed = batch.session.replays > self._replays
        report.compiled_steps += self._compiled
        report.replayed_steps += self._replayed
        core = self._stopwatch.next()
        if self._threads is not None:
            seconds = self._seconds()
            if self._threads.most > 1:
                self._threads.judge(*seconds)
            report.waiting += (waiting_share(*seconds) - report.waiting) / (report.steps + 1)
            report.threads = self._threads.count
        if self._replayed:
            self.proposer.book_replay(self._drafting + core)
        if batch.prompt_left and not report.steps:
            report.prefill_steps = 1
            self.timings.prefill += core  # the pass also ran prompt tokens: the seconds do not show what nodes cost
        else:
            self._learn_cost(core, draft, block, outcome)
        if not report.steps:
            report.time_to_first_token = self.timings.call

    def stopped(self) -> None:
        self.timings.host += self._stopwatch.next()

    def settled(self) -> None:
        spent = self._stopwatch.next()
        if self.batch.target.recurrent:
            self.timings.core += spent
        else:
            self.timings.mask += spent

    def observed(self) -> None:
        observing = self._stopwatch.next()
        self.timings.observe += observing
        if self.batch.request.strategy.misses_steps and not self.proposer.skipped:
            self._observing = observing

    def delivered(self) -> None:
        self.timings.host += self._stopwatch.next()
        if self.batch.shared:
            spent = self.timings.since(self._before)
            for member, _ in self.batch.members:
                member.report.share(spent, self.report.nodes, self._compiled, self._replayed)
                member.report.waiting = self.report.waiting

    def _seconds(self) -> tuple[float, float]:
        """Returns the seconds since the step began, without compilation, and this thread's CPU seconds in the same time."""
        wall, computing = (
            now - began for now, began in zip((time.perf_counter(), time.thread_time()), self._began, strict=True)
        )
        return wall - (self.timings.compile - self._compile_seconds), computing

    def _learn_cost(self, core: float, draft: Draft, block: NodeBlock, outcome: Outcome) -> None:
        """Adds the step's `core` seconds to the report, without a prompt piece's share. Cost models only learn if there is no piece."""
        batch, timings = self.batch, self.timings
        nodes = block.draft_tokens.shape[1] + 1 + block.text.length
        if block.piece is not None:  # the pass also ran a prompt piece: the seconds do not show what nodes cost
            read = block.piece.tokens.shape[1]
            self.piece_seconds = core * read / (read + nodes * batch.width)
            timings.core += core - self.piece_seconds
            return
        timings.core += core
        if not draft.tokens.shape[1]:
            batch.forward_pass.tiers.book_single(core, batch.row_count)
        worth, costs = self.proposer.worth, self.proposer.resources.costs
        if worth is None and costs is None:
            return
        # A step that is not replayed yet is slower than the later, replayed steps of its size: it would mislead the cost models.
        if batch.session.recordings is not None and not self._replayed:
            return
        agreed = batch.target.ranks.first_number
        seconds = agreed(core)
        if worth is not None:
            drafting = None if self.proposer.skipped else agreed(self._drafting + self._observing)
            worth.observe(seconds, outcome.emitted, drafting)
        if costs is not None:
            costs.observe(nodes, seconds, max(batch.lengths), self._compiled)
