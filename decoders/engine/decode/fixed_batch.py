"""A call of ``generate``: one request, whose rows come together, are decoded to the end, and go together."""

from __future__ import annotations

from contextlib import ExitStack

import torch

from ...report import Stopwatch
from ...strategy import finishing
from ..model.locks import release_threads
from .agreement import agreed
from .engine import Engine
from .loop import Call
from .recording import CallRecording, recordable
from .request import Decoded, Request
from .request_output import RequestOutput
from .rows import sampling_inputs
from .worth import DraftWorth


def decode(engine: Engine, request: Request) -> Decoded:
    """Runs a call to its end. Calls on one engine run one after the other."""
    # Packed weights, compiled code and kept texts are in the model's own precision, in whatever context the call is made.
    own_precision = torch.autocast(engine.target.device.type, enabled=False)
    try:
        with (
            engine.lock,
            engine.active(),
            own_precision,
            torch.inference_mode(False),
            torch.no_grad(),
            ExitStack() as stack,
        ):
            request = agreed(request, engine.target.ranks)
            return FixedBatch(engine, request, stack).run()  # the stack gives sessions back, whatever happens
    finally:
        release_threads()  # the next call may be another thread's


#: Slots behind the prompts that a call takes at once. It grows with texts that come to more: most end sooner than they may.
SLOTS_AHEAD = 2048


class FixedBatch:
    """A request that has its steps to itself.

    Attributes:
        call: its rows and their steps.
        written: what it has come to.

    Args:
        stack: closes what is opened here.
    """

    def __init__(self, engine: Engine, request: Request, stack: ExitStack) -> None:
        self.engine, self.request, self.stack = engine, request, stack
        self.call = Call(engine, request, stack)
        self.written = RequestOutput(request, self.call.report, engine.target.ranks)
        self.call.members.append((self.written, 0))
        if request.runtime.prune and self.call.batch > 1:  # one row waits for no other
            ends = [len(prompt) + request.new_tokens for prompt in request.prompts]
            self.call.worth = DraftWorth(engine.step_costs, self.call.batch, ends, request.strategy.grade_rates)

    def run(self) -> Decoded:
        """Decodes to the end. An exception on the way gets a note, and ``partial``: what was committed before."""
        try:
            self._run()
        except BaseException as error:
            call = self.call
            error.add_note(
                f"decoders: {call.culprit}, {call.where}, after {call.report.steps} steps; error.partial is what was written."
            )
            error.partial = self._decoded()  # type: ignore[attr-defined]
            self.written.close(error)
            raise
        decoded = self._decoded()
        self.written.close()
        return decoded

    def _decoded(self) -> Decoded:
        self.call.report.stages = [drafter.report() for drafter in self.call.drafters]
        return self.written.decoded()

    def _run(self) -> None:
        call, request, target = self.call, self.request, self.call.target
        timings = call.report.timings
        timings.pack, self.engine.preparing = self.engine.preparing, 0.0
        self.stack.enter_context(call.forward_pass.during(request.runtime.compile, call.report))
        stopwatch = Stopwatch(timings)
        sampling = sampling_inputs(request.values, request.seed, call.width, request.stop_tokens, target.device)
        call.longest = max(call.lengths) + request.new_tokens
        slots = max(
            call.longest if target.static else min(call.longest, max(call.lengths) + SLOTS_AHEAD),
            request.runtime.slots or 0,
        )
        # A strategy that reads prompts reads all of them: equal calls draft alike, and its own cache has no holes.
        reads = request.strategy.reads_prompt
        reuse = request.runtime.reuse and not reads
        opened = self.stack.enter_context(
            self.engine.sessions.open(request.prompts, request.new_tokens, sampling, slots, reuse)
        )
        call.session = opened.session
        call.step = call.make_step()
        call.noise_keys = sampling.keys.clone()
        if not reads:
            leave_last_chunk = not (target.recurrent or target.static) and request.new_tokens > 0
            call.read_prompts(opened.lengths, opened.reusable, leave_last_chunk=leave_last_chunk)
        call.where = "start"
        call.guide = call.new_guide()
        call.fit_blocks()
        call.start()
        with finishing(request.strategy, lambda: call.state):
            if reads:
                call.where = "prefill"
                call.read_prompts(opened.lengths, opened.reusable)
            timings.prefill = stopwatch.next()
            self._decode()

    def _decode(self) -> None:
        """Steps until every row has ended."""
        call = self.call
        advance = CallRecording(call).advance if recordable(call) else call.advance
        while not all(call.finished):
            advance()
        if call.guide is not None:
            call.guide.check()
        call.raise_faults(wait=True)
        call.session.keep([max(length - 1 - call.pending, 0) for length in call.lengths])
        call.report.peak_memory = call.resources.peak_memory
        call.where = "details"
        call.report.details = dict(self.request.strategy.details(call.state))
        call.where = "finish"
