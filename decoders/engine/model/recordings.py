"""CUDA graphs: repeated work is recorded once, kept by the session, and replayed with one launch.

Whole steps - propose, core, observe - are recorded if nothing in them needs the host (:mod:`~decoders.engine.decode.call`). Otherwise
only parts that run a model are: the core of a step, passes of draft models, chunks of a prompt (:meth:`Recordings.run`).

A recording reads and writes the tensors that it was made with. So its session owns them: rows and cache itself, everything else by
:class:`StaticInputs`. A later call copies its own values in and replays.

Everything that uses the device goes through a :class:`Recorder`, so that the rest can be tested without one.
"""

from __future__ import annotations

import warnings
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ...common import devices
from .static_inputs import StaticInputs, copied, find_tensors
from .torch_compat import end_failed_capture


class Graph(Protocol):
    """A recorded graph."""

    def replay(self) -> None: ...


class Event(Protocol):
    """A mark in the order of the device's work."""

    def record(self) -> None: ...
    def synchronize(self) -> None: ...


class Recorder:
    """Records CUDA graphs on one device, which need not be the current one. Tests record on the CPU
    (:class:`~decoders.testing.tape.TapeRecorder`). The methods are called within `active`, on one thread at a time.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: torch.cuda.Stream | None = None
        self._pool: Any = None
        self._in_pool: weakref.WeakSet[Graph] = weakref.WeakSet()

    def active(self) -> AbstractContextManager:
        """Makes the device the current one, with its current stream."""
        return torch.cuda.device(self.device)

    def record(self, body: Callable[[], Any]) -> tuple[Graph, Any]:
        """Runs the Python of `body` once and none of its kernels; returns the graph, and the output that replays write to."""
        # Held meanwhile, since a pool without graphs cannot be recorded into: what else lives in it, such as cuBLAS's workspace of its
        # stream, keeps memory there, and torch refuses its handle.
        living = next(iter(self._in_pool), None)
        if living is None or self._pool is None:
            # Graphs that share memory must be recorded on one stream.
            self._stream, self._pool = torch.cuda.Stream(self.device), torch.cuda.graph_pool_handle()
            self._in_pool.clear()
        stream, pool = self._stream, self._pool
        assert stream is not None
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self.device)
        stream.wait_stream(current)
        # With "thread_local" other threads may allocate meanwhile, and wait for streams.
        mode = "thread_local"
        try:
            with devices.RECORDING, torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode=mode):
                output = body()
        except BaseException:
            self._stream = self._pool = None  # not used again after a failure
            end_failed_capture(self.device, pool)
            raise
        finally:
            torch.cuda.set_stream(current)  # torch does not restore it if recording fails
        self._in_pool.add(graph)
        return graph, output

    def pinned(self, like: Tensor) -> Tensor:
        """A pinned buffer on the host for copies of `like`."""
        return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=True)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Queues a copy on the device; the host does not wait."""
        target.copy_(source, non_blocking=True)

    def event(self) -> Event:
        return torch.cuda.Event()


def recorder_of(device: torch.device) -> Recorder | None:
    """A recorder for `device`; None where nothing can be recorded."""
    return Recorder(device) if device.type == "cuda" else None


class HostCopies:
    """Pinned buffers for small tensors of the device, which are copied together."""

    def __init__(self, recorder: Recorder, tensors: tuple[Tensor, ...]) -> None:
        self.recorder = recorder
        self.pinned, self.arrived = [recorder.pinned(tensor) for tensor in tensors], recorder.event()

    def launch(self, tensors: tuple[Tensor, ...]) -> None:
        """Queues a copy of their values on the device."""
        for own, tensor in zip(self.pinned, tensors, strict=True):
            self.recorder.copy(own, tensor)
        self.arrived.record()

    def lists(self) -> tuple[list, ...]:
        """The values of the last copy; waits for the device."""
        self.arrived.synchronize()
        return tuple([pinned.tolist() for pinned in self.pinned])


#: Steps that run before one is recorded, to autotune and allocate; their results are used.
WARM_UP_STEPS = 3
#: The same for parts of a step: runs with arguments of one kind.
PLAIN_RUNS = 2
#: Most recordings that a session keeps. Memory of intermediate results is in a pool that all share.
MOST_RECORDINGS = 48
#: Most bytes of their results, which are mainly logits of many nodes.
MOST_BYTES = 1 << 30

#: A step's result for the host: ``(summary, new)`` of :class:`~decoders.engine.decode.core.StepOutput`, as lists.
Result = tuple[list[list[int]], list[list[int]]]

_as_parts = ContextVar("as_parts", default=False)


@contextmanager
def as_parts() -> Iterator[None]:
    """Switches replays of parts off, because the code inside is part of a larger recording, or will be."""
    token = _as_parts.set(True)
    try:
        yield
    finally:
        _as_parts.reset(token)


@dataclass(frozen=True)
class RecordedCapacity:
    """The sizes that a recorded step can be used for. It writes one block behind its slots.

    Attributes:
        rows: of the batch.
        nodes: of a block.
        slots: that a row may fill.
    """

    rows: int
    nodes: int
    slots: int

    def holds(self, needed: RecordedCapacity) -> bool:
        """Whether a call that needs so many rows, nodes per block and slots fits."""
        return self.rows == needed.rows and self.nodes >= needed.nodes and self.slots >= needed.slots


class Recording:
    """A recording of `body`.

    Attributes:
        body: kept alive with the objects that the recording works on.
        capacity: sizes that it can be used for; None if these are part of its key.
        inputs: the tensors it reads and writes besides the session's.
        output: the result of `body`; every replay writes to its tensors.
        replays: launches so far.
        nbytes: memory of its inputs and output.
    """

    def __init__(
        self, recorder: Recorder, body: Callable[[], Any], inputs: StaticInputs, capacity: RecordedCapacity | None = None
    ) -> None:  # fmt: skip
        self.recorder, self.body, self.capacity, self.inputs, self.replays = recorder, body, capacity, inputs, 0
        with as_parts(), devices.as_recorded():
            self._graph, self.output = recorder.record(body)
        tensors, _ = find_tensors((inputs.tensors, self.output))
        buffers = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors.values()}
        self.nbytes = sum(buffer.nbytes() for buffer in buffers.values())

    def replay(self) -> None:
        with self.recorder.active():
            self._graph.replay()
        self.replays += 1

    def steps(self, more: Callable[[], bool] = lambda: True) -> Iterator[Result]:
        """Replays step after step, if `body` is a step. Yields each result while the next step runs, so that the device never waits.

        Stop when all rows have ended. The step that is running then changes nothing, because finished rows idle, and later work on the
        same tensors comes after it on the device.

        Args:
            more: called before every launch; once it returns False, the result of the running step is the last one.
        """
        output = self.output
        tensors = (output.summary, output.new) if output.for_host is None else (output.for_host,)
        with self.recorder.active():
            copies = [HostCopies(self.recorder, tensors) for _ in range(2)]
        launched = delivered = 0
        going = True
        while True:
            while going and launched - delivered < 2:
                going = more()
                if going:
                    self.replay()
                    with self.recorder.active():
                        copies[launched % 2].launch(tensors)
                    launched += 1
            if launched == delivered:
                return
            with self.recorder.active():
                lists = copies[delivered % 2].lists()
            summary, new = lists if output.for_host is None else output.unpacked(lists[0])[:2]
            delivered += 1
            yield summary, new


@dataclass
class _Failure:
    """Of a recording. It may have been the moment's: memory was short, another thread waited for the device.

    Attributes:
        reason: for people.
        tries: that have failed.
        refused: how often it was asked for since.
    """

    reason: str
    tries: int = 0
    refused: int = 0

    def waits(self) -> bool:
        """Whether it is not tried again yet: each time after twice as many steps without it, so that failures cost little."""
        self.refused += 1
        return self.refused < 1 << self.tries


class Recordings:
    """The recordings made with the tensors of one session, by key; the least recently used are dropped first.

    A key has everything that a recording depends on besides tensors: strategy and settings, plan, verifier, buckets, and which parts
    are compiled. Other weights or another attention mean a new engine with new sessions.

    Attributes:
        recorded: number of recordings made.
        reused: number of calls that used an earlier one.
        replays: launches by :meth:`run`.
        unrecorded: why the last one that was asked for could not be made, since a caller has emptied it.
    """

    def __init__(self, recorder: Recorder, most: int = MOST_RECORDINGS) -> None:
        self.recorder, self.most = recorder, most
        self.recorded = self.reused = self.replays = 0
        self._kept: OrderedDict[Hashable, Recording] = OrderedDict()
        self._runs: Counter[Hashable] = Counter()
        self._copies: dict[tuple, HostCopies] = {}
        self._failed: dict[Hashable, _Failure] = {}
        self._warned = False
        self.unrecorded = ""

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def nbytes(self) -> int:
        """Memory of all recordings, without the pool of intermediate results."""
        return sum(recording.nbytes for recording in self._kept.values())

    def run(self, key: Callable[[], Hashable], function: Callable[..., Any], given: tuple) -> Any:
        """``function(*given)``: run the first few times, then recorded, then replayed.

        The next replay overwrites the result.

        Args:
            key: returns everything that the function depends on besides the shapes of `given`, also the addresses of tensors that it
                works on in place. Called again after recording, because more may have been compiled meanwhile.
            given: tensors, also in tuples and dataclasses; they are copied to the recording's own.
        """
        if _as_parts.get():
            return function(*given)
        tensors, others = find_tensors(given)
        begun = key()
        looks = tuple([(path, tensor.shape, tensor.dtype) for path, tensor in tensors.items()])
        full = begun, looks, tuple(others.items())
        recording = self._kept.get(full)
        if recording is None:
            self._runs[full] += 1
            if self._runs[full] > PLAIN_RUNS:
                own = copied(given)
                recording = self.record(full, None, StaticInputs(own), lambda: function(*own))
            if recording is None:
                return function(*given)
            if key() != begun:
                self.drop(full)
                return function(*given)
        else:
            with self.recorder.active():
                recording.inputs.take(tensors, self.recorder.copy)
            self._kept.move_to_end(full)
        recording.replay()
        self.replays += 1
        return recording.output

    def reuse(self, key: Hashable, needed: RecordedCapacity, inputs: Any) -> Recording | None:
        """The step recorded for `key`, with the values of `inputs` copied in; None if none fits.

        From then on the recording's own tensors are the call's state: those in `inputs` are not updated any more.

        Args:
            needed: sizes of the call; its nodes may be 0, because the strategy proposes as many as when it was recorded.
            inputs: the call's own objects: the strategy's state, the guide, the noise keys.
        """
        step = self._kept.get(key)
        if step is None or step.capacity is None or not step.capacity.holds(needed):
            return None
        with self.recorder.active():
            if not step.inputs.load(inputs, self.recorder.copy):
                return None
        self._kept.move_to_end(key)
        self.reused += 1
        return step

    def record(
        self, key: Hashable, capacity: RecordedCapacity | None, inputs: Any, body: Callable[[], Any]
    ) -> Recording | None:
        """Records `body` for `key`, replacing an older recording; None if that fails, or has failed and is not tried again yet.

        Args:
            capacity: of the tensors that `body` works on.
            inputs: as in :meth:`reuse`; kept, with all its tensors. After steps of the call pass the :class:`StaticInputs` from its
                beginning, because later calls are compared at their beginning. If steps have replaced some of these tensors, the
                recording serves this call only.
            body: uses static tensors, without syncs, with the same shapes every time.
        """
        failure = self._failed.get(key)
        if failure is not None and failure.waits():
            self.unrecorded = failure.reason
            return None
        self._kept.pop(key, None)  # frees its memory for the new one
        try:
            with self.recorder.active():
                own = inputs if isinstance(inputs, StaticInputs) else StaticInputs(inputs)
                step = Recording(self.recorder, body, own, capacity)
        except Exception as error:
            self.unrecorded = str(_cause(error)) or type(error).__name__
            self._failed[key] = _Failure(self.unrecorded, 1 + (failure.tries if failure is not None else 0))
            if not self._warned:
                self._warned = True
                warnings.warn(
                    f"a step could not be recorded, steps run one by one until it can: {self.unrecorded}", stacklevel=2
                )
            return None
        self._failed.pop(key, None)
        self.recorded += 1
        if not own.settled:
            return step
        self._kept[key] = step
        while len(self._kept) > self.most or (self.nbytes > MOST_BYTES and len(self._kept) > 1):
            self._kept.popitem(last=False)
        return step

    def lists(self, *tensors: Tensor) -> tuple[list, ...]:
        """The values of small tensors, with one sync for all."""
        looks = tuple([(tensor.shape, tensor.dtype) for tensor in tensors])
        with self.recorder.active():
            if looks not in self._copies:
                self._copies[looks] = HostCopies(self.recorder, tensors)
            self._copies[looks].launch(tensors)
            return self._copies[looks].lists()

    def drop(self, key: Hashable) -> None:
        """Drops the recording for `key`."""
        self._kept.pop(key, None)

    def clear(self) -> None:
        """Drops all recordings, and what is known of failed ones."""
        self._kept.clear()
        self._runs.clear()
        self._failed.clear()


def _cause(error: BaseException) -> BaseException:
    """The first error, which CUDA's error at the end of a failed recording hides."""
    while error.__context__ is not None:
        error = error.__context__
    return error
