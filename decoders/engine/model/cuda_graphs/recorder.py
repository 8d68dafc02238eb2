"""A device that records, as CUDA graphs do, and brings results to the host."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor


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

    def record(self, body: Callable[[], Any]) -> tuple[Graph, Any]:
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

    def record(self, body: Callable[[], Any]) -> tuple[Graph, Any]:
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


class HostCopies:
    """Pinned memory for small tensors of the device, which are brought there together."""

    def __init__(self, recorder: Recorder, tensors: tuple[Tensor, ...]) -> None:
        self.recorder = recorder
        self.pinned, self.arrived = [recorder.pinned(tensor) for tensor in tensors], recorder.event()

    def launch(self, tensors: tuple[Tensor, ...]) -> None:
        """Has the device bring them as they are then."""
        for own, tensor in zip(self.pinned, tensors, strict=True):
            self.recorder.copy(own, tensor)
        self.arrived.record()

    def lists(self) -> tuple[list, ...]:
        """What was brought last, once it is there: the one place where the host waits for the device."""
        self.arrived.synchronize()
        return tuple([pinned.tolist() for pinned in self.pinned])
