"""One step of decoding, in the order of the papers. Read this file first: the other files of this package are called from here.

If whole steps are recorded (as CUDA graphs), :func:`step` is recorded (:mod:`~decoders.engine.decode.call`).
"""

from __future__ import annotations

import time
from dataclasses import replace

from ...report.surroundings import Stopwatch, waiting_share
from ...strategy import Draft
from ..model.blocks import NodeBlock
from .batch import Batch
from .core import StepOutput
from .proposer import Proposer
from .verify import Outcome


def step(proposer: Proposer, batch: Batch, clock: Clock | None = None, *, recording: bool = False) -> StepOutput:
    """Runs one step of all rows of `batch`: `proposer` drafts, and each row accepts its own number of draft tokens.

    Args:
        clock: learns when the step begins and when each part of the step ends.
        recording: whether a device records the step. If so, the host reads nothing, and the caller that replays the step
            delivers its tokens.
    """
    clock = clock or UNTIMED
    clock.begun()
    draft = proposer.propose()
    block = batch.block_of(draft)
    clock.proposed()
    block = batch.mask(draft, block)
    clock.masked()
    # The target's pass, the verification of the nodes, and the update of the rows.
    out = batch.core.forward_verify_commit(draft, block, batch.rows)
    # The host reads which tokens were accepted; after that, stopping criteria may cut these tokens.
    outcome = None if recording else batch.read(draft, block, out)
    clock.read(draft, block, outcome)
    if outcome is not None:
        batch.stop(out, outcome)
    clock.stopped()
    batch.settle(out, outcome)
    clock.settled()
    proposer.observe(out, outcome)
    clock.observed()
    if outcome is not None:
        batch.deliver(out, outcome)
    clock.delivered()
    return out


class Clock:
    """Base class of clocks. A step calls the methods at its beginning and at the end of each part; here the methods do nothing."""

    def begun(self) -> None: ...
    def proposed(self) -> None: ...
    def masked(self) -> None: ...
    def read(self, draft: Draft, block: NodeBlock, outcome: Outcome | None) -> None: ...
    def stopped(self) -> None: ...
    def settled(self) -> None: ...
    def observed(self) -> None: ...
    def delivered(self) -> None: ...


UNTIMED = Clock()


class TimedSteps(Clock):
    """Runs the steps of a batch, and adds the seconds of each part of a step, without compilation, to the report.

    From each step it learns, for the next steps: how many threads to use, whether to draft, what nodes cost, and what to compile.

    Attributes:
        piece: the part of the last step's pass, in seconds, that counts as the prefill of a prompt piece (:attr:`Batch.next_piece`).
    """

    piece = 0.0

    def __init__(self, proposer: Proposer) -> None:
        self.proposer, self.batch = proposer, proposer.batch
        self.timings = self.batch.report.timings
        self._threads = self.batch.engine.threads

    def advance(self) -> None:
        if self._threads is not None:
            self._threads.use()
        step(self.proposer, self.batch, self)
        self._learn()

    def begun(self) -> None:
        self._before = replace(self.timings) if self.batch.shared else self.timings
        self._stopwatch = Stopwatch(self.timings)
        self._began = time.perf_counter(), time.thread_time(), self.timings.compile

    def proposed(self) -> None:
        self._drafting = self._stopwatch.next()
        self.timings.propose += self._drafting

    def masked(self) -> None:
        self.timings.mask += self._stopwatch.next()
        self._counts = self.batch.forward_pass.compiled_passes, self.batch.session.replays

    def read(self, draft: Draft, block: NodeBlock, outcome: Outcome | None) -> None:
        assert outcome is not None
        batch, report = self.batch, self.batch.report
        core, nodes = self._stopwatch.next(), block.draft_tokens.shape[1] + 1 + block.text.length
        prompt, read = batch.prompt_left and not report.steps, 0 if block.piece is None else block.piece.tokens.shape[1]
        self._spent = self._seconds()
        self._outcome, self._nodes, self._drafted = outcome, nodes, draft.tokens.shape[1] > 0
        self._context = max(batch.lengths)  # without the tokens of this step
        self._compiled = batch.forward_pass.compiled_passes > self._counts[0]
        self._replayed = batch.session.replays > self._counts[1]
        self._reads_prompt = bool(prompt or read)
        self._core, self.piece = core, core * read / (read + nodes * batch.width)
        report.compiled_steps += self._compiled
        report.replayed_steps += self._replayed
        if prompt:
            report.prefill_steps = 1
            self.timings.prefill += core
        else:
            self.timings.core += core - self.piece
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
        self._observing = self._stopwatch.next()
        self.timings.observe += self._observing

    def delivered(self) -> None:
        self.timings.host += self._stopwatch.next()
        if self.batch.shared:
            spent = self.timings.since(self._before)
            for member, _ in self.batch.members:
                member.report.share(spent, self.batch.report.nodes, self._compiled, self._replayed)

    def _seconds(self) -> tuple[float, float]:
        """Returns the seconds since the step began, without compilation, and this thread's CPU seconds in the same time."""
        began, computed, compiled = self._began
        return time.perf_counter() - began - (self.timings.compile - compiled), time.thread_time() - computed

    def _learn(self) -> None:
        if self._threads is not None:
            self._threads.judge(*self._spent)
            report = self.batch.report
            report.waiting += (waiting_share(*self._spent) - report.waiting) / report.steps
            for member, _ in self.batch.members:
                member.report.waiting, member.report.threads = report.waiting, self._threads.count
        if self._replayed:
            self.proposer.book_replay(self._drafting + self._core)
        if not self._reads_prompt:
            self._learn_costs()
        self.proposer.learn(self._outcome)

    def _learn_costs(self) -> None:
        """Updates the cost models with the last step, whose pass ran no prompt tokens."""
        batch, proposer = self.batch, self.proposer
        if not self._drafted:
            batch.forward_pass.tiers.book_single(self._core, batch.row_count)
        worth, costs = proposer.worth, proposer.costs
        if worth is None and costs is None:
            return
        # A step that is not replayed yet is slower than the later, replayed steps of its size: it would mislead the cost models.
        if batch.session.recordings is not None and not self._replayed:
            return
        agreed = batch.target.ranks.first_number
        seconds = agreed(self._core)
        if worth is not None:
            observing = self._observing if batch.request.strategy.misses_steps else 0.0
            drafting = None if proposer.skipped else agreed(self._drafting + observing)
            worth.observe(seconds, self._outcome.emitted, drafting)
        if costs is not None:
            costs.observe(self._nodes, seconds, self._context, self._compiled)
