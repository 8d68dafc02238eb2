"""The clock of a batch: it times the parts of each step (propose, mask, core, …)."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from ...strategy import Draft
from ..model.blocks import NodeBlock
from .batch import Batch
from .step import Clock, Stopwatch
from .verify import Outcome


@dataclass
class TimedStep:
    """What a clock has noted about a step. All seconds are without compilation.

    Attributes:
        outcome: the step's results.
        nodes: number of nodes per row of the padded block.
        drafted: whether the draft had tokens.
        context: number of tokens of the longest row before the step.
        compiled: whether the pass ran compiled.
        replayed: whether a recording of a part of the step was replayed.
        reads_prompt: whether the pass also ran prompt tokens, so that `core` does not show what the nodes cost.
        wall: seconds from the step's begin until the host had read the results.
        computing: CPU seconds of this thread in the same time.
        core: seconds of the forward pass, verification and commit, until the host had read the results.
        piece: the share of a prompt piece (:attr:`Batch.next_piece`) in `core`, by number of tokens; 0 without a piece.
        drafting: seconds of the strategy's `propose`.
        observing: seconds of the strategy's `observe`.
    """

    outcome: Outcome
    nodes: int
    drafted: bool
    context: int
    compiled: bool
    replayed: bool
    reads_prompt: bool
    wall: float
    computing: float
    core: float
    piece: float
    drafting: float
    observing: float = 0.0


class StepClock(Clock):
    """Times the parts of a batch's steps, and adds their seconds to the report.

    Attributes:
        last: the last step.
    """

    last: TimedStep

    def __init__(self, batch: Batch) -> None:
        self.batch, self.report = batch, batch.report
        self.timings = batch.report.timings

    def begun(self) -> None:
        self._before = replace(self.timings) if self.batch.shared else self.timings
        self._stopwatch, self._compile_seconds = Stopwatch(self.timings), self.timings.compile
        self._began = time.perf_counter(), time.thread_time()

    def proposed(self) -> None:
        self._drafting = self._stopwatch.next()
        self.timings.propose += self._drafting

    def masked(self) -> None:
        self.timings.mask += self._stopwatch.next()
        self._passes, self._replays = self.batch.forward_pass.compiled_passes, self.batch.session.replays

    def read(self, draft: Draft, block: NodeBlock, outcome: Outcome | None) -> None:
        assert outcome is not None
        batch, report = self.batch, self.report
        core, nodes = self._stopwatch.next(), block.draft_tokens.shape[1] + 1 + block.text.length
        prompt, read = batch.prompt_left and not report.steps, 0 if block.piece is None else block.piece.tokens.shape[1]
        wall, computing = self._seconds()
        self.last = step = TimedStep(
            outcome=outcome,
            nodes=nodes,
            drafted=draft.tokens.shape[1] > 0,
            context=max(batch.lengths),
            compiled=batch.forward_pass.compiled_passes > self._passes,
            replayed=batch.session.replays > self._replays,
            reads_prompt=bool(prompt or read),
            wall=wall,
            computing=computing,
            core=core,
            piece=core * read / (read + nodes * batch.width),
            drafting=self._drafting,
        )
        report.compiled_steps += step.compiled
        report.replayed_steps += step.replayed
        if prompt:
            report.prefill_steps = 1
            self.timings.prefill += core
        else:
            self.timings.core += core - step.piece
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
        self.last.observing = self._stopwatch.next()
        self.timings.observe += self.last.observing

    def delivered(self) -> None:
        self.timings.host += self._stopwatch.next()
        if self.batch.shared:
            spent, step = self.timings.since(self._before), self.last
            for member, _ in self.batch.members:
                member.report.share(spent, self.report.nodes, step.compiled, step.replayed)

    def _seconds(self) -> tuple[float, float]:
        """Returns the seconds since the step began, without compilation, and this thread's CPU seconds in the same time."""
        wall, computing = (
            now - began for now, began in zip((time.perf_counter(), time.thread_time()), self._began, strict=True)
        )
        return wall - (self.timings.compile - self._compile_seconds), computing
