"""A call of ``generate``: the rows of one request begin together, and steps run until all of them have ended.

If the device records steps (CUDA graphs) and nothing in a step needs the host, a whole step is recorded once and then replayed.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Hashable, Sequence
from contextlib import ExitStack
from dataclasses import replace

import torch

from ...errors import UnsupportedError, amount
from ...report.surroundings import Stopwatch
from ..model.ranks import Ranks
from ..model.recordings import WARM_UP_STEPS, RecordedCapacity, Recording, as_parts
from ..model.static_inputs import StaticInputs
from ..model.threads import release_threads
from ..model.torch_compat import within_modes
from .batch import Batch
from .drafters.counts import DraftCounts
from .drafters.drafter import ModelDrafter
from .engine import Engine
from .kind import inputs_of
from .output import RequestOutput
from .prompt_reader import PromptReader
from .proposer import Proposer
from .request import Request
from .rows import shapes_of
from .sampling import sampling_of
from .step import TimedSteps, step
from .verify import Outcome

#: At first a call reserves only this many slots after its prompts, because few texts reach ``max_new_tokens``. Longer texts add slots.
SLOTS_AHEAD = 2048


def decode(engine: Engine, request: Request) -> RequestOutput:
    """Decodes a request until all rows have ended, and returns the output. Calls on one engine run one after the other.

    An exception raised while decoding gets a note, and an attribute ``partial`` with the output so far.
    """
    called = time.perf_counter()
    try:
        with engine.decoding(request.rope_table), ExitStack() as stack:  # releases sessions, also after errors
            waited = time.perf_counter() - called
            request = agreed(request, engine.target.ranks)
            batch = Batch(engine, request)
            proposer = Proposer(batch, stack)
            timings, stopwatch = batch.report.timings, Stopwatch(batch.report.timings)
            timings.wait = waited
            if request.begun is not None:
                timings.pack, timings.kernels, timings.check = engine.prepared_since(request.begun)
                timings.prepare = called - request.begun - timings.ready
            output = RequestOutput(request, batch.report, engine.target.ranks)
            try:
                begin(proposer, output, stack, stopwatch)
                steps = TimedSteps(proposer)
                recording = StepRecording(proposer, steps) if recordable(proposer) else None
                booked, stopwatch = timings.steps + timings.prefill, Stopwatch(timings)
                while not output.ended:
                    (steps if recording is None or batch.root is not None else recording).advance()
                timings.host += stopwatch.next() - (timings.steps + timings.prefill - booked)  # time between the steps
                end(proposer)
            except BaseException as error:
                proposer.finish(error)
                error.add_note(
                    f"decoders: {batch.culprit}, {batch.where}, after {amount(batch.report.steps, 'step')}; "
                    "error.partial is what was written."
                )
                error.partial = output  # type: ignore[attr-defined]
                if isinstance(error, torch.OutOfMemoryError):
                    error.add_note(f"decoders: {engine.sessions.make_room()}")
                close(proposer, output, error)
                raise
            close(proposer, output)
            return output
    finally:
        release_threads()  # another thread may make the next call


def begin(proposer: Proposer, output: RequestOutput, stack: ExitStack, stopwatch: Stopwatch) -> None:
    """Opens a session for the request's rows, prefills the prompts, and starts the strategy."""
    batch = proposer.batch
    engine, request, target = batch.engine, batch.request, batch.target
    strategy, timings = request.strategy, batch.report.timings
    batch.members.append((output, 0))
    longest = max(batch.lengths) + request.new_tokens
    stack.enter_context(batch.forward_pass.tiers.during(request.runtime.compile, batch.report))
    sampling = sampling_of([request], batch.width, target.device)
    slots = max(
        longest if target.static else min(longest, max(batch.lengths) + SLOTS_AHEAD), request.runtime.slots or 0
    )
    # A strategy that reads prompts must get whole prompts, so that the strategy's cache has no holes, and equal calls draft alike.
    reads = strategy.reads_prompt
    reuse = request.runtime.reuse and not reads and request.given is None
    inputs, prefixes = request.multimodal, [request.prefix_of(row) for row in range(len(request.prompts))]
    batch.session, reusable, lengths = stack.enter_context(
        engine.sessions.open(
            request.prompts, request.new_tokens, sampling, slots, reuse, prefixes=prefixes,
            shifts=inputs.shifts if inputs is not None else (),
        )
    )  # fmt: skip
    if batch.session.recordings is not None:
        batch.session.recordings.unrecorded = ""
    if request.given is not None:
        request.given.put(target, batch.rows.buffers)
        reusable = request.given.reach + reusable[len(request.prompts) :]
    target.ranks.check("the texts of earlier calls that they keep", reusable)
    timings.start = stopwatch.next()
    prompts = PromptReader(proposer)
    if not reads:
        leave_last_chunk = not (target.recurrent or target.static) and request.new_tokens > 0
        prompts.read(lengths, reusable, leave_last_chunk=leave_last_chunk)
    timings.prefill = stopwatch.next()
    proposer.arrange(batch.request, list(batch.members), [-1] * batch.width)
    timings.start += stopwatch.next()
    if reads:
        prompts.read(lengths, reusable)
    timings.prefill += stopwatch.next()


def end(proposer: Proposer) -> None:
    """Ends a call: raises faults noted on the device, keeps the rows' texts for later calls, and fills the report."""
    batch = proposer.batch
    if batch.guide is not None:
        batch.guide.check()
    batch.raise_faults(wait=True)
    if batch.request.given is None:  # otherwise slots hold the caller's keys and values: no later call may reuse them
        prompts = [batch.request.prefix_of(row) for row in range(len(batch.request.prompts))]
        batch.session.keep([max(length - 1 - batch.pending, 0) for length in batch.lengths], prompts)
    batch.report.peak_memory = proposer.peak_memory
    batch.report.recorded_memory = batch.engine.sessions.recorded_nbytes
    batch.report.unrecorded = batch.session.unrecorded
    batch.report.details = proposer.details()
    proposer.finish()


def close(proposer: Proposer, output: RequestOutput, error: BaseException | None = None) -> None:
    """Completes the report, and calls the observers' ``end``."""
    report = proposer.batch.report
    report.stages = [drafter.report() for drafter in proposer.drafters]
    report.finished(output.request.begun)
    output.close(error)


def agreed(request: Request, ranks: Ranks) -> Request:
    """Checks that all processes that share a model got the same request.

    Returns `request`, or a copy without compilation if several processes share the model or the call is within a torch mode
    (TorchDispatchMode, TorchFunctionMode).

    Raises:
        RanksError: the processes were given different requests.
        UnsupportedError: the request has ``compile=True`` and cannot be compiled.
    """
    if ranks.several:
        reason = f"{ranks.size} processes share this model, and what they share runs uncompiled"
    elif within_modes():
        reason = "the call is within a TorchDispatchMode or TorchFunctionMode, such as FlopCounterMode, which sees no compiled code"
    else:
        return request
    if request.runtime.compile is True:
        raise UnsupportedError(f"compile=True: {reason}. Leave compile='auto'")
    ranks.check("what generate is asked for", request.kind, *inputs_of(request))
    return replace(request, runtime=request.runtime.model_copy(update={"compile": False}))


def recordable(proposer: Proposer) -> bool:
    """Whether a whole step of `proposer` can be recorded: the device records CUDA graphs, and no part of the step needs the host."""
    batch, request = proposer.batch, proposer.batch.request
    return (
        batch.session.recordings is not None and request.strategy.on_device
        and (batch.guide is None or batch.guide.on_device)
        and all(drafter.on_device for drafter in proposer.drafters)
        and all(module.on_device for module in proposer.modules)
        and not request.kind.host
    )  # fmt: skip


def counts_of(drafters: Sequence[ModelDrafter]) -> list[DraftCounts]:
    """The :class:`DraftCounts` of `drafters`, and of the models that draft for these drafters."""
    return [each.counts for drafter in drafters for each in drafter.chain]


class StepRecording:
    """Runs the steps of a batch. The first steps run unrecorded; later steps replay a recorded step.

    When further parts of the step have been compiled, the step is recorded again. A part that rounds differently when compiled does not
    switch to compiled code within a call, because tokens could change.

    Args:
        proposer: a :func:`recordable` proposer, whose batch has run no step yet.
        steps: runs the steps that are not replayed.
    """

    def __init__(self, proposer: Proposer, steps: TimedSteps) -> None:
        batch = proposer.batch
        assert batch.session.recordings is not None
        self.batch, self.proposer, self.steps = batch, proposer, steps
        self.recordings = batch.session.recordings
        self.inputs = StaticInputs(
            dict(
                state=proposer.state,
                guide=batch.guide,
                drafters=proposer.drafters,
                keys=batch.noise_keys,
                sampling=batch.rows.sampling,
            )
        )
        self._depends_on = (
            batch.request.kind, batch.target.layers, shapes_of(batch.rows.sampling), type(batch.guide),
            tuple(id(drafter.session) for drafter in proposer.drafters),
        )  # fmt: skip
        self._seen: set[Hashable] = set()
        self._plain: Counter[Hashable] = Counter()
        self._failed = False

    def advance(self) -> None:
        """Replays a recording for as many steps as possible, if one fits; else runs the next step."""
        key = self._key
        recorded = self._earlier(key) or self._new(key)
        if recorded is not None:
            self._replay(recorded, key)
        elif self._failed:
            self.steps.advance()
        else:
            self._plain[key] += 1
            with as_parts():
                self.steps.advance()

    def _earlier(self, key: tuple) -> Recording | None:
        """Returns an earlier call's recording after copying this call's state to the recording's tensors.

        Returns None if no recording fits, or if `key` was looked up before.
        """
        if key in self._seen:
            return None
        self._seen.add(key)
        return self.recordings.reuse(key, RecordedCapacity(self.batch.width, 0, self.batch.longest), self.inputs.root)

    def _new(self, key: tuple) -> Recording | None:
        """Records the step for this and later calls. Returns None if too few steps with `key` have run, if recording fails, or if a
        part of the step is compiled during the recording.
        """
        if self._plain[key] < WARM_UP_STEPS:
            return None
        batch, proposer, nodes = self.batch, self.proposer, self.batch.report.nodes
        room = min([batch.rows.slots - nodes, *(drafter.room for drafter in proposer.drafters)])
        counts = counts_of(proposer.drafters)
        for each in counts:
            each.recording()
        recorded, capacity = None, RecordedCapacity(batch.width, nodes, room)
        try:
            recorded = self.recordings.record(key, capacity, self.inputs, lambda: step(proposer, batch, recording=True))
            self._failed = recorded is None
            if self._key != key:  # a part of the step was compiled during the recording
                self.recordings.drop(key)
                recorded = None
        finally:
            for each in counts:
                each.recorded(recorded is not None)
        return recorded

    @property
    def _key(self) -> tuple:
        """Everything that a recorded step depends on besides the values in its tensors; for example, which parts are compiled."""
        return *self._depends_on, self.proposer.tiers

    def _replay(self, recorded: Recording, key: tuple) -> None:
        """Replays steps until all rows have ended or another part is compiled. The whole time is added to ``timings.core``."""
        assert recorded.capacity is not None
        batch, report = self.batch, self.batch.report
        begun, first = time.perf_counter(), report.steps
        compiled, last = key[-1][0].compiled, begun
        try:
            for summary, new in recorded.steps(lambda: self._key == key):
                outcome = Outcome.of(summary, new, batch.row_count)
                batch.check_drawn(outcome)
                batch.deliver(None, outcome)
                now = time.perf_counter()
                if not first and report.steps == 1:
                    report.time_to_first_token = report.timings.call + now - begun
                self.proposer.book_replay(now - last)
                last = now
                if all(batch.finished):
                    break
        finally:  # also if a callback has raised: the strategy's `finish` needs the state, and observers get the report
            steps = report.steps - first
            report.replayed_steps += steps
            report.compiled_steps += steps * compiled
            batch.forward_pass.compiled_passes += steps * compiled
            report.nodes = max(report.nodes, recorded.capacity.nodes)
            if recorded.inputs is not self.inputs:
                with self.recordings.recorder.active():
                    recorded.inputs.give_back(self.inputs.root, self.recordings.recorder.copy)
            counted = counts_of(recorded.inputs.root["drafters"])
            for own, recorded_counts in zip(counts_of(self.proposer.drafters), counted, strict=True):
                own.replayed(recorded_counts, steps)
            report.timings.core += time.perf_counter() - begun
