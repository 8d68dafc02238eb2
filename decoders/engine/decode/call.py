"""A call of ``generate``: the rows of one request begin together, and steps are made until all of them have ended."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import replace

from ...errors import UnsupportedError
from ...report import Stopwatch
from ..model.ranks import Ranks
from ..model.threads import release_threads
from .batch import Batch
from .engine import Engine
from .recording import StepRecording, recordable
from .request import Request, RequestOutput
from .rows import sampling_inputs
from .step import step
from .watch import StepWatch

#: Slots behind the prompts that a call takes at once. Longer texts get more: most texts end before they must.
SLOTS_AHEAD = 2048


def decode(engine: Engine, request: Request) -> RequestOutput:
    """Runs a call to its end. Calls on one engine run one after the other.

    An exception on the way gets a note, and ``partial``: what was committed before.
    """
    called = time.perf_counter()
    try:
        with engine.decoding(), ExitStack() as stack:  # the stack gives sessions back, whatever happens
            waited = time.perf_counter() - called
            request = agreed(request, engine.target.ranks)
            batch = Batch(engine, request, stack)
            timings, stopwatch = batch.report.timings, Stopwatch(batch.report.timings)
            timings.pack, timings.check, engine.packing, engine.checking = engine.packing, engine.checking, 0.0, 0.0
            timings.wait = waited
            if request.begun is not None:
                timings.prepare = called - request.begun - timings.pack - timings.check
            output = RequestOutput(request, batch.report, engine.target.ranks)
            try:
                begin(batch, output, stack, stopwatch)
                recording = StepRecording(batch) if recordable(batch) else None
                named, stopwatch = timings.steps + timings.prefill, Stopwatch(timings)
                while not output.ended:
                    if recording is None:
                        step(batch, StepWatch(batch))
                    else:
                        recording.advance()
                timings.host += stopwatch.next() - (timings.steps + timings.prefill - named)  # between the steps
                end(batch)
            except BaseException as error:
                batch.finish(error)
                error.add_note(
                    f"decoders: {batch.culprit}, {batch.where}, after {batch.report.steps} steps; error.partial is what was written."
                )
                error.partial = output  # type: ignore[attr-defined]
                close(batch, output, error)
                raise
            close(batch, output)
            return output
    finally:
        release_threads()  # the next call may be another thread's


def begin(batch: Batch, output: RequestOutput, stack: ExitStack, stopwatch: Stopwatch) -> None:
    """Gives the request rows, reads its prompts, and starts its strategy."""
    engine, request, target = batch.engine, batch.request, batch.target
    strategy, timings = request.strategy, batch.report.timings
    batch.members.append((output, 0))
    longest = max(batch.lengths) + request.new_tokens
    stack.enter_context(batch.forward_pass.during(request.runtime.compile, batch.report))
    sampling = sampling_inputs(request.values, request.seed, batch.width, request.stop_tokens, target.device)
    slots = max(
        longest if target.static else min(longest, max(batch.lengths) + SLOTS_AHEAD), request.runtime.slots or 0
    )
    # A strategy that reads prompts reads all of them: equal calls draft alike, and its own cache has no holes.
    reads = strategy.reads_prompt
    reuse = request.runtime.reuse and not reads
    opened = stack.enter_context(engine.sessions.open(request.prompts, request.new_tokens, sampling, slots, reuse))
    batch.session = opened.session
    timings.start = stopwatch.next()
    if not reads:
        leave_last_chunk = not (target.recurrent or target.static) and request.new_tokens > 0
        batch.read_prompts(opened.lengths, opened.reusable, leave_last_chunk=leave_last_chunk)
    timings.prefill = stopwatch.next()
    batch.arrange(request, list(batch.members), [-1] * batch.width)
    timings.start += stopwatch.next()
    if reads:
        batch.where = "prefill"
        batch.read_prompts(opened.lengths, opened.reusable)
    timings.prefill += stopwatch.next()


def end(batch: Batch) -> None:
    """All rows have ended: what only the device knows is looked at, and what outlives the call is kept."""
    if batch.guide is not None:
        batch.guide.check()
    batch.raise_faults(wait=True)
    batch.session.keep([max(length - 1 - batch.pending, 0) for length in batch.lengths])
    batch.report.peak_memory = batch.resources.peak_memory
    batch.where = "details"
    batch.report.details = dict(batch.request.strategy.details(batch.state))
    batch.where = "finish"
    batch.finish()


def close(batch: Batch, output: RequestOutput, error: BaseException | None = None) -> None:
    """Completes the report, and tells observers that the call is over."""
    batch.report.stages = [drafter.report() for drafter in batch.drafters]
    batch.report.finished(output.request.begun)
    output.close(error)


def agreed(request: Request, ranks: Ranks) -> Request:
    """`request` as all processes that share the model decode it.

    Raises:
        RanksError: they were asked for different things. UnsupportedError: for compiled passes.
    """
    if not ranks.several:
        return request
    runtime = request.runtime
    if runtime.compile is True:
        raise UnsupportedError(
            f"compile=True: {ranks.size} processes share this model, and what they share runs uncompiled. Leave compile='auto'"
        )
    ranks.check(
        "what generate is asked for", *request.prompts, request.new_tokens, request.stop_tokens, request.seed, request.values,
        request.plan.sample, request.strategy.name, request.strategy.settings, runtime.compile, runtime.reuse, runtime.memory,
        runtime.prune, runtime.prefill_chunk, runtime.slots, request.keep_logits, request.keep_scores, request.criteria is None,
        request.processors is None, [grammar is None for grammar in request.grammars],
        [request.verifier.name, request.verifier.settings_in_force()] if request.verifier is not None else None,
    )  # fmt: skip
    return replace(request, runtime=runtime.model_copy(update={"compile": False}))
