"""Runs the steps of a batch, and learns from their seconds and tokens how to run the next steps."""

from __future__ import annotations

from ...report.surroundings import waiting_share
from .clock import StepClock, TimedStep
from .proposer import Proposer
from .step import step


class TimedSteps:
    """Runs and times steps. What it learns from a step counts from the next step on: how many threads to use, whether to draft, what
    nodes cost, and what is worth compiling.

    Attributes:
        clock: times the parts of each step.
    """

    def __init__(self, proposer: Proposer) -> None:
        self.proposer, self.batch = proposer, proposer.batch
        self.clock = StepClock(proposer.batch)
        self._threads = proposer.batch.engine.threads

    def advance(self) -> None:
        """Runs the next step."""
        if self._threads is not None:
            self._threads.use()
        step(self.proposer, self.batch, self.clock)
        self._learn()

    def _learn(self) -> None:
        last, batch, proposer = self.clock.last, self.batch, self.proposer
        if self._threads is not None:
            self._threads.judge(last.wall, last.computing)
            report = batch.report
            report.waiting += (waiting_share(last.wall, last.computing) - report.waiting) / report.steps
            for member, _ in batch.members:
                member.report.waiting, member.report.threads = report.waiting, self._threads.count
        if last.replayed:
            proposer.book_replay(last.drafting + last.core)
        if not last.reads_prompt:
            self._learn_costs(last)
        proposer.learn(last.outcome)

    def _learn_costs(self, last: TimedStep) -> None:
        """Updates the cost models by the last step, whose pass ran no prompt tokens."""
        batch, proposer = self.batch, self.proposer
        if not last.drafted:
            batch.forward_pass.tiers.book_single(last.core, batch.row_count)
        worth, costs = proposer.worth, proposer.resources.costs
        if worth is None and costs is None:
            return
        # A step that is not replayed yet is slower than the later, replayed steps of its size: it would mislead the cost models.
        if batch.session.recordings is not None and not last.replayed:
            return
        agreed = batch.target.ranks.first_number
        seconds = agreed(last.core)
        if worth is not None:
            observing = last.observing if batch.request.strategy.misses_steps else 0.0
            drafting = None if proposer.skipped else agreed(last.drafting + observing)
            worth.observe(seconds, last.outcome.emitted, drafting)
        if costs is not None:
            costs.observe(last.nodes, seconds, last.context, last.compiled)
