"""A recorder for the CPU, for tests of the code around a recording."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from decoders.engine.model.recordings import Recorder
from decoders.testing.tape import NoHostData, Tape


class TapeRecorder(Recorder):
    """A recorder that records with :class:`Tape` and counts its calls, for tests of the code around a recording.

    Args:
        late: whether all work is delayed until the host waits for it, as on a slow device.

    Attributes:
        recorded: number of recordings.
        replayed: number of replays.
        waited: number of times that the host has waited.
    """

    def __init__(self, late: bool = False) -> None:
        super().__init__(torch.device("cpu"))
        self.late, self.recorded, self.replayed, self.waited = late, 0, 0, 0
        self._pending: list[Callable[[], Any]] = []
        self._active = 0

    @contextmanager
    def active(self) -> Iterator[None]:
        self._active += 1
        try:
            yield
        finally:
            self._active -= 1

    def record(self, body: Callable[[], Any]) -> tuple[Any, Any]:
        self.settle()  # recording must begin with an idle device
        tape = Tape()
        with (
            NoHostData(),
            tape,
        ):  # some reads of the device dispatch no operation, so that the tape alone would miss them
            output = body()
        self.recorded += 1
        return _Graph(self, tape), output

    def pinned(self, like: Tensor) -> Tensor:
        assert self._active, "pinned memory belongs to a device"
        return torch.zeros_like(like, device="cpu")

    def copy(self, target: Tensor, source: Tensor) -> None:
        self._do(lambda: target.copy_(source))

    def event(self) -> Any:
        return _Event(self)

    def settle(self) -> None:
        """Runs all pending work."""
        pending, self._pending = self._pending, []
        for operation in pending:
            operation()

    def _do(self, operation: Callable[[], Any]) -> None:
        assert self._active, "the device is not the current one"
        self._pending.append(operation)
        if not self.late:
            self.settle()


class _Graph:
    def __init__(self, recorder: TapeRecorder, tape: Tape) -> None:
        self.recorder, self.tape = recorder, tape

    def replay(self) -> None:
        self.recorder.replayed += 1
        self.recorder._do(self.tape.replay)


class _Event:
    def __init__(self, recorder: TapeRecorder) -> None:
        self.recorder, self._passed = recorder, True

    def record(self) -> None:
        self._passed = False
        self.recorder._do(self._pass)

    def _pass(self) -> None:
        self._passed = True

    def synchronize(self) -> None:
        """Runs all pending work up to this event."""
        self.recorder.waited += 1
        while not self._passed:
            self.recorder._pending.pop(0)()
