"""On CUDA: a whole step - propose, core, observe - recorded once as a CUDA graph, kept by the session, and replayed with one launch.

A recording reads and writes the tensors that were there when it was made. So its session owns them: rows and cache by itself, and
what a strategy keeps in its state through :class:`StaticInputs`. A later call copies its own values in and replays.

Everything that touches the device goes through a :class:`Recorder`, so that the rest can be tested without one.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ..core import StepOutput
from .static_inputs import StaticInputs

#: Ordinary steps before recording: compile, autotune, allocate. They are real steps, nothing is thrown away.
WARM_UP_STEPS = 3
#: Recordings that a session keeps. Each holds the memory of its intermediate results, in a pool that all share.
MOST_RECORDINGS = 16

#: What the host learns of a step: ``(summary, new)`` of :class:`~decoders.engine.core.StepOutput`, as lists.
Result = tuple[list[list[int]], list[list[int]]]


class Graph(Protocol):
    """What was recorded."""

    def replay(self) -> None: ...


class Event(Protocol):
    """A mark in the order of what the device was told to do."""

    def record(self) -> None: ...
    def synchronize(self) -> None: ...


class Recorder(Protocol):
    """A device that can record. The methods are called within `active`, on one thread at a time."""

    def active(self) -> AbstractContextManager:
        """Makes the device the current one, with its current stream."""

    def record(self, body: Callable[[], StepOutput]) -> tuple[Graph, StepOutput]:
        """Runs `body`'s Python once and none of its kernels; its output's tensors are those that replays write to."""

    def pinned(self, like: Tensor) -> Tensor:
        """Host memory for a copy of `like` that the device writes to by itself."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copies in the order of the device's work; the host does not wait."""

    def event(self) -> Event: ...


class CudaRecorder:
    """CUDA graphs on one device, which need not be the current one."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: torch.cuda.Stream | None = None
        self._pool: Any = None

    def active(self) -> AbstractContextManager:
        return torch.cuda.device(self.device)

    def record(self, body: Callable[[], StepOutput]) -> tuple[Graph, StepOutput]:
        # Graphs that share memory must have been recorded on one stream.
        self._stream = self._stream or torch.cuda.Stream(self.device)
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        # With "thread_local", other threads may go on allocating and waiting meanwhile.
        mode = "thread_local"
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode=mode):
                output = body()
        except BaseException:
            self._stream = self._pool = None  # whatever state they are in, nobody records there again
            raise
        finally:
            torch.cuda.set_stream(current)  # if recording fails, torch leaves the other stream current
        return graph, output

    def pinned(self, like: Tensor) -> Tensor:
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def event(self) -> Event:
        return torch.cuda.Event()


def recorder_of(device: torch.device) -> Recorder | None:
    """What records steps on `device`; None where nothing can be recorded."""
    return CudaRecorder(device) if device.type == "cuda" else None


@dataclass(frozen=True)
class RecordedCapacity:
    """What a recording was made for. It writes one block behind its slots, no more.

    Attributes:
        rows: of the batch.
        nodes: of a block.
        slots: that a row may fill.
    """

    rows: int
    nodes: int
    slots: int

    def holds(self, needed: RecordedCapacity) -> bool:
        """Whether a call with so many rows, in blocks of so many nodes, that reaches so many slots fits."""
        return self.rows == needed.rows and self.nodes >= needed.nodes and self.slots >= needed.slots


@dataclass
class _PinnedBuffer:
    """Host memory for one step's results.

    Attributes:
        summary: as in :class:`~decoders.engine.core.StepOutput`.
        new: as there.
        arrived: says that both are here.
    """

    summary: Tensor
    new: Tensor
    arrived: Event


class RecordedStep:
    """One recording: replays it and hands out each step's results one step late, so that the device never waits for the host.

    Attributes:
        capacity: what it was made for.
        inputs: the tensors it reads and writes besides the session's.
        replays: launches so far.
    """

    def __init__(
        self, recorder: Recorder, body: Callable[[], StepOutput], capacity: RecordedCapacity, inputs: StaticInputs
    ) -> None:
        self.recorder, self.capacity, self.inputs, self.replays = recorder, capacity, inputs, 0
        self._graph, self.output = recorder.record(body)
        self._buffers = [self._buffer(), self._buffer()]

    def _buffer(self) -> _PinnedBuffer:
        recorder, output = self.recorder, self.output
        return _PinnedBuffer(recorder.pinned(output.summary), recorder.pinned(output.new), recorder.event())

    def steps(self, count: int | None = None) -> Iterator[Result]:
        """The results of step after step; forever, or of `count` steps.

        Without a count the next step is always under way already: stop when all rows have ended. Finished rows idle in it, so it
        changes nothing, and what a later call does to the same tensors comes after it on the device.
        """
        launched = delivered = 0
        while count is None or delivered < count:
            while launched - delivered < 2 and (count is None or launched < count):
                self._launch(self._buffers[launched % 2])
                launched += 1
            buffer = self._buffers[delivered % 2]
            with self.recorder.active():
                buffer.arrived.synchronize()
            result = buffer.summary.tolist(), buffer.new.tolist()
            delivered += 1
            yield result

    def _launch(self, buffer: _PinnedBuffer) -> None:
        recorder = self.recorder
        with recorder.active():
            self._graph.replay()
            recorder.copy(buffer.summary, self.output.summary)
            recorder.copy(buffer.new, self.output.new)
            buffer.arrived.record()
        self.replays += 1


class Recordings:
    """The recorded steps of one session, by what they depend on; the least recently used go first.

    A key says everything that is part of the recording and is no tensor: strategy and settings, plan, verifier, buckets.
    With weights or attention changed there is a new engine, with new sessions.

    Attributes:
        recorded: how often a call had to record.
        reused: how often it could do without.
    """

    def __init__(self, recorder: Recorder, most: int = MOST_RECORDINGS) -> None:
        self.recorder, self.most = recorder, most
        self.recorded = self.reused = 0
        self._steps: OrderedDict[Hashable, RecordedStep] = OrderedDict()
        self._failed: set[Hashable] = set()
        self._warned = False

    def __len__(self) -> int:
        return len(self._steps)

    def reuse(self, key: Hashable, needed: RecordedCapacity, inputs: Any) -> RecordedStep | None:
        """The step recorded for `key`, with the values of `inputs` copied in; None if there is none that fits.

        After this the recording's own tensors are the call's state: those in `inputs` are not updated any more.

        Args:
            needed: what the call needs; its nodes may be 0, since the strategy proposes as many as when it was recorded.
            inputs: what the call brings: the strategy's state, the guide, the keys of its noise.
        """
        step = self._steps.get(key)
        if step is None or not step.capacity.holds(needed):
            return None
        with self.recorder.active():
            if not step.inputs.load(inputs, self.recorder.copy):
                return None
        self._steps.move_to_end(key)
        self.reused += 1
        return step

    def record(
        self, key: Hashable, capacity: RecordedCapacity, inputs: Any, body: Callable[[], StepOutput]
    ) -> RecordedStep | None:
        """Records `body` in the place of what was there for `key`; None if that fails, now or before: go on without.

        Args:
            capacity: of the tensors that `body` works on.
            inputs: as in :meth:`reuse`; kept, with all its tensors. A caller that has made steps since the call began hands over
                the :class:`StaticInputs` that it made then, for a later call will be compared as it begins. If steps have moved
                some of these tensors, the recording serves this call only.
            body: runs one step on static tensors; no syncs, the same shapes every time.
        """
        if key in self._failed:
            return None
        self._steps.pop(key, None)  # its memory is free for the new one
        try:
            with self.recorder.active():
                own = inputs if isinstance(inputs, StaticInputs) else StaticInputs(inputs)
                step = RecordedStep(self.recorder, body, capacity, own)
        except Exception as error:
            self._failed.add(key)
            if not self._warned:
                self._warned = True
                warnings.warn(
                    f"a step could not be recorded, steps run one by one instead: {_cause(error)}", stacklevel=2
                )
            return None
        self.recorded += 1
        if not own.settled:
            return step
        self._steps[key] = step
        while len(self._steps) > self.most:
            self._steps.popitem(last=False)
        return step

    def clear(self) -> None:
        """Drops all recordings, and what is known to fail."""
        self._steps.clear()
        self._failed.clear()


def _cause(error: BaseException) -> BaseException:
    """The first error: what CUDA says when the recording is then ended hides it."""
    while error.__context__ is not None:
        error = error.__context__
    return error
