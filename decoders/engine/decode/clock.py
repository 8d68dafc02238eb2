"""The clock of a batch's steps: times their phases for the report, and teaches the cost models what they took."""

from __future__ import annotations

from dataclasses import replace

from ...report import Stopwatch
from ...strategy import Draft
from ..model.blocks import NodeBlock
from .criteria import Outcome
from .proposer import Proposer
from .step import Clock


class StepClock(Clock):
    """Times the steps of a batch.

    Attributes:
        piece_seconds: the last step's share of time for a piece of another row's prompt.
    """

    def __init__(self, proposer: Proposer) -> None:
        self.batch = batch = proposer.batch
        self.proposer, self.report = proposer, batch.report
        self.timings = batch.report.timings
        self.piece_seconds = 0.0
        self._threads = batch.engine.threads
        self._observing = 0.0  # seconds of the strategy's last `observe`, where they count as part of drafting

    def begun(self) -> None:
        self._before = replace(self.timings) if self.batch.shared else self.timings
        self._stopwatch, self._compile_seconds = Stopwatch(self.timings), self.timings.compile
        self._compiled = self._replayed = False
        if self._threads is not None:
            self._threads.begin_step()

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
            wall, computing = self._threads.end_step()
            report.waits(wall - (self.timings.compile - self._compile_seconds), computing)
            report.threads = self._threads.count
        if self._replayed:
            self.proposer.book_replay(self._drafting + core)
        if batch.prompt_left and not report.steps:
            report.prefill_steps = 1
            self.timings.prefill += core  # not a measure of the cost of nodes
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

    def _learn_cost(self, core: float, draft: Draft, block: NodeBlock, outcome: Outcome) -> None:
        """Books the `core` seconds of the step, and shows them to the cost models."""
        batch, timings = self.batch, self.timings
        nodes = block.draft_tokens.shape[1] + 1 + block.text.length
        if block.piece is not None:  # not a measure of the cost of nodes
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
        # Later steps of this size are replayed, and faster.
        if batch.session.recordings is not None and not self._replayed:
            return
        agreed = batch.target.ranks.first_number
        seconds = agreed(core)
        if worth is not None:
            drafting = None if self.proposer.skipped else agreed(self._drafting + self._observing)
            worth.observe(seconds, outcome.emitted, drafting)
        if costs is not None:
            costs.observe(nodes, seconds, max(batch.lengths), self._compiled)
