"""The observers of a batch's steps: clocks, cost accounts, stopping criteria, reports and streams."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from ...errors import InputError
from ...report import Stopwatch, TracedStep
from ...strategy import Draft
from ..model.blocks import NodeBlock
from ..model.invariance import branch_length
from .batch import Batch
from .core import StepOutput
from .criteria import Outcome
from .request import RequestOutput
from .step import Watch
from .verify import NOTHING_LEFT


class StepWatch(Watch):
    """Watches one step of a batch; created when the step begins."""

    def __init__(self, batch: Batch) -> None:
        self.batch, self.report = batch, batch.report
        self.timings = batch.report.timings
        self._before = replace(self.timings) if batch.shared else self.timings
        self._stopwatch, self._compile_seconds = Stopwatch(self.timings), self.timings.compile
        self._drafting = 0.0
        self._passes = self._replays = 0
        self._compiled = self._replayed = False
        self._threads = batch.engine.threads
        if self._threads is not None:
            self._threads.begin_step()
        batch.where = "propose"

    def proposed(self) -> None:
        self.batch.where = "forward pass and verification"
        self._drafting = self._stopwatch.next()
        self.timings.propose += self._drafting

    def masked(self) -> None:
        self.timings.mask += self._stopwatch.next()
        self._passes, self._replays = self.batch.engine.compiled_passes, self.batch.session.replays

    def committed(self, draft: Draft, block: NodeBlock, out: StepOutput) -> Outcome:
        batch, report = self.batch, self.report
        batch.raise_faults(wait=False)
        self._compiled = batch.engine.compiled_passes > self._passes
        self._replayed = batch.session.replays > self._replays
        report.compiled_steps += self._compiled
        report.replayed_steps += self._replayed
        # The one place where the host waits for the device.
        traced = [(member, first) for member, first in batch.members if member.request.runtime.trace]
        summary, new, paths = out.read(batch.session.lists, paths=draft.drafters is not None or bool(traced))
        outcome = Outcome.of(summary, new, batch.row_count)
        check_drawn(batch, outcome)
        self._follow_drafters(draft, block, paths, outcome, traced)
        core = self._stopwatch.next()
        if self._threads is not None:
            wall, computing = self._threads.end_step()
            report.waits(wall - (self.timings.compile - self._compile_seconds), computing)
            report.threads = self._threads.count
        if self._replayed:
            batch.book_replay(self._drafting + core)
        if batch.prompt_left and not report.steps:
            report.prefill_steps = 1
            self.timings.prefill += core  # not a measure of what nodes cost
        else:
            self._learn_cost(core, draft, block, outcome)
        if batch.worth is not None:
            batch.worth.follow([tokens[:count] for tokens, count in zip(outcome.new, outcome.emitted, strict=True)])
        if not report.steps:
            report.time_to_first_token = self.timings.call
        for member, first in batch.members:
            if member.criteria is not None:
                batch.where = "stopping criteria"
                with callback_of(batch, member):
                    part, end = outcome.part(first, member.rows), first + member.rows
                    member.criteria.apply(
                        part, out.of_rows(first, end), batch.rows.of_rows(first, end), member.finished
                    )
                    outcome.put(first, part)
        self.timings.host += self._stopwatch.next()
        return outcome

    def settled(self) -> None:
        spent = self._stopwatch.next()
        if self.batch.target.recurrent:
            self.timings.core += spent
        else:
            self.timings.mask += spent
        self.batch.where = "observe"

    def observed(self, out: StepOutput, outcome: Outcome | None) -> None:
        batch, timings = self.batch, self.timings
        observing = self._stopwatch.next()
        timings.observe += observing
        if batch.request.strategy.misses_steps and not batch.skipped:
            batch.learning_seconds = observing
        assert outcome is not None
        book(batch, outcome, out)
        if batch.target.multiple > 1:
            batch.pending = batch.rerun(branch_length(out.path, outcome.emitted))
        timings.host += self._stopwatch.next()
        if batch.shared:
            spent = timings.since(self._before)
            for member, _ in batch.members:
                member.report.share(spent, self.report.nodes, self._compiled, self._replayed)
                member.report.waiting = self.report.waiting

    def _follow_drafters(
        self, draft: Draft, block: NodeBlock, paths: list[list[int]], outcome: Outcome, traced: list[tuple[RequestOutput, int]]
    ) -> None:  # fmt: skip
        """Records which strategy drafted each accepted token, where several have, and the whole tree for the `traced` requests."""
        if draft.drafters is not None:
            outcome.drafters = [
                [draft.drafters[row][node - 1] for node in paths[row][1 : count + 1]]
                for row, count in enumerate(outcome.accepted)
            ]
        if not traced:
            return
        parents, count = draft.parents, draft.tokens.shape[1] + 1
        tokens = block.draft_tokens[:, : count - 1].tolist()  # without what grammars forbid
        for member, first in traced:
            for row in range(first, first + member.rows):
                if member.finished[row - first]:
                    continue
                last = member.generated[row - first] or member.request.prompts[row - first].tolist()
                accepted = min(outcome.accepted[row], outcome.emitted[row])
                own = outcome.new[row][accepted] if outcome.emitted[row] > accepted else None
                names = draft.drafters[row] if draft.drafters is not None else [self.report.strategy] * (count - 1)
                path = [0, *paths[row][1 : accepted + 1]]
                traced_step = TracedStep([last[-1], *tokens[row]], list(parents[row]), path, own, ["", *names])
                assert member.report.written is not None
                member.report.written.steps[row - first].append(traced_step)

    def _learn_cost(self, core: float, draft: Draft, block: NodeBlock, outcome: Outcome) -> None:
        """Books the `core` seconds of the step, and shows them to the cost models."""
        batch, timings = self.batch, self.timings
        nodes = block.draft_tokens.shape[1] + 1 + block.text.length
        if block.piece is not None:  # not a measure of what nodes cost
            read = block.piece.tokens.shape[1]
            batch.piece_seconds = core * read / (read + nodes * batch.width)
            timings.core += core - batch.piece_seconds
            return
        timings.core += core
        if not draft.tokens.shape[1]:
            batch.forward_pass.book_single(core, batch.row_count)
        worth, costs = batch.worth, batch.resources.costs
        if worth is None and costs is None:
            return
        # Later steps of this size are replayed, and faster.
        if batch.session.recordings is not None and not self._replayed:
            return
        agreed = batch.target.ranks.first_number
        seconds = agreed(core)
        if worth is not None:
            drafting = None if batch.skipped else agreed(self._drafting + batch.learning_seconds)
            worth.observe(seconds, outcome.emitted, drafting)
        if costs is not None:
            costs.observe(nodes, seconds, max(batch.lengths), self._compiled)


def book(batch: Batch, outcome: Outcome, out: StepOutput | None) -> None:
    """Adds a step to the outputs of the requests, and calls their streamers and observers. out: needed for logits and scores only."""
    batch.where = "streamer"
    if batch.shared:
        batch.report.steps += 1  # otherwise its only request counts them
    for member, first in batch.members:
        new = member.book(outcome.part(first, member.rows), out, first)
        with callback_of(batch, member):
            member.tell(new)


def check_drawn(batch: Batch, outcome: Outcome) -> None:
    """Raises InputError where there was nothing to draw."""
    for member, first in batch.members if batch.request.plan.reads_text else ():
        with callback_of(batch, member):
            for row, tokens in enumerate(outcome.part(first, member.rows).written):
                if NOTHING_LEFT in tokens:
                    count = member.lengths[row] + tokens.index(NOTHING_LEFT)
                    names = ", ".join(dict.fromkeys(batch.request.plan.operations))
                    raise InputError(
                        f"nothing can be drawn behind {count} tokens: the logits processors left no token ({names})"
                    )


@contextmanager
def callback_of(batch: Batch, member: RequestOutput) -> Iterator[None]:
    """Where requests share steps, an exception of a callback ends only the request that the callback belongs to."""
    try:
        yield
    except Exception as error:
        if not batch.shared:
            raise
        error.add_note(f"decoders: {batch.where} of one request, after {member.report.steps} steps")
        member.error = member.error or error
