"""Recordings (CUDA graphs): a session (rows with their cache) records repeated work once, and then replays it with one launch.

A whole step (propose, pass, verify, commit, observe) is recorded if nothing in it needs the host (:mod:`~decoders.engine.decode.call`).
Otherwise only the parts that run a model are recorded (:meth:`Recordings.run`): the core (pass, verify, commit), passes of draft
models, chunks of a prompt.

A replay reads and writes the tensors that the work was recorded with. The session owns the rows and the cache; :class:`StaticInputs`
holds all other tensors of a recording. A later call copies its values into these tensors and replays. All uses of the device go through
a :class:`Recorder`; tests use another recorder.
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

from ...common import devices, host_reads
from .static_inputs import StaticInputs, copied, find_tensors
from .torch_compat import end_failed_capture


class Graph(Protocol):
    """A recorded graph."""

    def replay(self) -> None: ...


class Event(Protocol):
    """A CUDA event."""

    def record(self) -> None: ...
    def synchronize(self) -> None: ...


#: The recorder that records on each stream.
_recording_on: weakref.WeakValueDictionary[torch.cuda.Stream, Recorder] = weakref.WeakValueDictionary()


class Recorder:
    """Records CUDA graphs on a device, which need not be the current device. Call its methods within :meth:`active`, from one thread
    at a time. Tests record on the CPU (``tests/tape_recorder.py``).
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: torch.cuda.Stream | None = None
        self._pool: Any = None
        self._in_pool: weakref.WeakSet[Graph] = weakref.WeakSet()

    def active(self) -> AbstractContextManager:
        """A context in which the recorder's device is the current device."""
        return torch.cuda.device(self.device)

    def record(self, body: Callable[[], Any]) -> tuple[Graph, Any]:
        """Records `body`: its Python code runs once, but no kernel runs. Returns the graph, and the output that replays write to."""
        # This variable keeps a graph alive: torch refuses to record into a pool that has memory (cuBLAS's workspace) but no graph.
        living = next(iter(self._in_pool), None)
        if living is None or self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
            self._in_pool.clear()
        # Graphs that share memory must be recorded on the same stream, because torch keeps a cuBLAS workspace per stream.
        stream = self._stream = self._own_stream() if self._stream is None else self._stream
        pool = self._pool
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self.device)
        # Every thread has its own cuBLAS handle. This call creates the handle now, because a recording cannot create it.
        torch.cuda.current_blas_handle()
        stream.wait_stream(current)
        # "thread_local" lets other threads allocate and wait for streams during the recording.
        mode = "thread_local"
        try:
            with devices.RECORDING, torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode=mode):
                output = body()
        except BaseException:
            self._stream = self._pool = None  # a failed recording leaves stream and pool unusable
            end_failed_capture(self.device, pool)
            raise
        finally:
            torch.cuda.set_stream(current)  # torch does not restore the stream if recording fails
        self._in_pool.add(graph)
        return graph, output

    def _own_stream(self) -> torch.cuda.Stream:
        """A stream that no other recorder records on, if there is such a stream. torch has 32 streams, which it returns in turn.

        All graphs recorded on a stream share a cuBLAS workspace, even graphs in different pools. torch 2.13 frees this workspace as
        soon as any of these graphs is freed. A graph in another recorder's pool would then write to memory that may be in other use.
        """
        for _ in range(32):
            stream = torch.cuda.Stream(self.device)
            if _recording_on.setdefault(stream, self) is self:
                break
        return stream

    def pinned(self, like: Tensor) -> Tensor:
        """A pinned host buffer for copies of `like`."""
        return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=True)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Queues a copy of `source` to `target` on the device. The host does not wait for it."""
        target.copy_(source, non_blocking=True)

    def event(self) -> Event:
        return torch.cuda.Event()


def recorder_of(device: torch.device) -> Recorder | None:
    """A recorder for `device`; None if `device` is not a CUDA device."""
    return Recorder(device) if device.type == "cuda" else None


class HostCopies:
    """Pinned host buffers, to which small tensors are copied together from the device."""

    def __init__(self, recorder: Recorder, tensors: tuple[Tensor, ...]) -> None:
        self.recorder = recorder
        self.pinned, self.arrived = [recorder.pinned(tensor) for tensor in tensors], recorder.event()

    def launch(self, tensors: tuple[Tensor, ...]) -> None:
        """Queues the copies of `tensors` on the device."""
        for own, tensor in zip(self.pinned, tensors, strict=True):
            self.recorder.copy(own, tensor)
        self.arrived.record()

    def lists(self) -> tuple[list, ...]:
        """The values of the last copied tensors, as lists. Waits for the device."""
        self.arrived.synchronize()
        return tuple([pinned.tolist() for pinned in self.pinned])


#: Number of unrecorded steps before a step is recorded. In these steps kernels are tuned and memory is allocated.
WARM_UP_STEPS = 3
#: A part of a step runs this many times unrecorded, with the same key and shapes, before it is recorded.
PLAIN_RUNS = 2
#: Greatest number of recordings of a session. All recordings share a memory pool for intermediate results.
MOST_RECORDINGS = 48
#: Greatest number of bytes in the inputs and outputs of a session's recordings. Most of these are logits of blocks with many nodes.
MOST_BYTES = 1 << 30

#: A step's result for the host: ``(summary, new)`` of :class:`~decoders.engine.decode.core.StepOutput`, as lists.
Result = tuple[list[list[int]], list[list[int]]]

_as_parts = ContextVar("as_parts", default=False)


@contextmanager
def as_parts() -> Iterator[None]:
    """Within this context, :meth:`Recordings.run` records nothing, because the calling code is itself being recorded."""
    token = _as_parts.set(True)
    try:
        yield
    finally:
        _as_parts.reset(token)


@dataclass(frozen=True)
class RecordedCapacity:
    """The sizes that a recorded step supports: rows of a batch, nodes of a block, and slots of a row that are used before the block."""

    rows: int
    nodes: int
    slots: int

    def holds(self, needed: RecordedCapacity) -> bool:
        """Whether a call with the sizes `needed` can use the recording."""
        return self.rows == needed.rows and self.nodes >= needed.nodes and self.slots >= needed.slots


class Recording:
    """A recording of `body`.

    Attributes:
        body: the recorded function, which is kept because it holds the objects that own the tensors of replays.
        capacity: the sizes that the recording supports; None if the recording's key contains the sizes.
        inputs: the tensors that replays read and write, besides the session's rows and cache.
        output: the result of `body`; every replay writes to its tensors.
        replays: number of replays.
        nbytes: bytes of the inputs and the output.
    """

    def __init__(
        self, recorder: Recorder, body: Callable[[], Any], inputs: StaticInputs, capacity: RecordedCapacity | None = None
    ) -> None:  # fmt: skip
        self.recorder, self.body, self.capacity, self.inputs, self.replays = recorder, body, capacity, inputs, 0
        with as_parts(), host_reads.as_recorded() as self._kept:
            self._graph, self.output = recorder.record(body)
        tensors, _ = find_tensors((inputs.tensors, self.output))
        buffers = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors.values()}
        self.nbytes = sum(buffer.nbytes() for buffer in buffers.values())

    def replay(self) -> None:
        with self.recorder.active():
            self._graph.replay()
        self.replays += 1

    def steps(self, more: Callable[[], bool] = lambda: True) -> Iterator[Result]:
        """Replays a recorded step again and again. Yields each step's result while the next step runs, so that the device never idles.

        The caller stops when all rows have ended. One more step may still be running at that time. This step does no harm: ended rows
        get no tokens, and the device runs later work on the same tensors only after this step.

        more: called before every launch. After `more` has returned False, only the results of launched steps are yielded.
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
    """A failed recording. Later requests try to record again, because the cause may be temporary, such as a lack of memory.

    Attributes:
        reason: the error's text.
        tries: number of failures.
        refused: number of requests since the last failure.
    """

    reason: str
    tries: int = 0
    refused: int = 0

    def waits(self) -> bool:
        """Whether it is too early to try again. The number of requests before the next try doubles, so that failures cost little."""
        self.refused += 1
        return self.refused < 1 << self.tries


class Recordings:
    """The recordings of a session, by key. If there are too many, the least recently used are dropped first.

    A key contains everything that a recording depends on besides tensors: strategy and settings, sampling plan, verifier, buckets,
    compiled parts. It need not contain weights and attention: if they change, a new engine with new sessions is created.

    Attributes:
        recorded: number of successful recordings.
        reused: number of calls that used an earlier recording.
        replays: number of replays by :meth:`run`.
        unrecorded: why the last requested recording failed; an empty string if none has failed in the current call.
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
        """Bytes of all recordings, without the pool for intermediate results."""
        return sum(recording.nbytes for recording in self._kept.values())

    def run(self, key: Callable[[], Hashable], function: Callable[..., Any], given: tuple) -> Any:
        """Returns ``function(*given)``. The first calls run the function; then it is recorded, and later calls replay the recording.

        The next replay overwrites the result.

        Args:
            key: returns everything that the function depends on besides `given`, including the addresses of tensors that the function
                changes in place. It is called again after recording, because more code may have been compiled during the recording.
            given: tensors, also in tuples and dataclasses. A replay copies them to the recording's tensors.
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
        """Copies the tensors in `inputs` to the tensors of the step recorded for `key`. Returns the recording; None if none fits.

        Afterwards the recording's tensors hold the call's state, and the tensors in `inputs` are not updated.

        Args:
            needed: sizes of the call. `nodes` may be 0 (any number) if the strategy then proposes the recording's number of nodes.
            inputs: the call's objects: the strategy's state, the grammar guide, the noise keys.
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
        """Records `body` for `key` in place of an older recording. Returns None if recording fails, or if it failed too recently.

        Args:
            capacity: the sizes that `body` supports.
            inputs: as in :meth:`reuse`. The recording keeps all tensors in `inputs`. After the call's first step, pass the
                :class:`StaticInputs` that was created before this step: :meth:`reuse` compares it with the inputs at the beginning of
                later calls. If the call's steps have replaced tensors since, only this call can use the recording.
            body: always works on the same tensors, with the same shapes, and never waits for the device.
        """
        failure = self._failed.get(key)
        if failure is not None and failure.waits():
            self.unrecorded = failure.reason
            return None
        self._kept.pop(key, None)  # this frees memory for the new recording
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
                    f"a step could not be captured as a CUDA graph; until it can, steps run without one, slower: {self.unrecorded}",
                    stacklevel=2,
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
        """The values of small tensors as lists, with one sync for all tensors."""
        looks = tuple([(tensor.shape, tensor.dtype) for tensor in tensors])
        with self.recorder.active():
            if looks not in self._copies:
                self._copies[looks] = HostCopies(self.recorder, tensors)
            self._copies[looks].launch(tensors)
            return self._copies[looks].lists()

    def drop(self, key: Hashable) -> None:
        self._kept.pop(key, None)

    def clear(self) -> None:
        """Drops all recordings, and forgets all failures."""
        self._kept.clear()
        self._runs.clear()
        self._failed.clear()


def _cause(error: BaseException) -> BaseException:
    """The first exception of a failed recording. Later exceptions of CUDA would hide it."""
    while error.__context__ is not None:
        error = error.__context__
    return error
