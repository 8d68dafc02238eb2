"""A device on the CPU that records: operations are noted once and run again, as a CUDA graph's kernels are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..engine.model.torch_compat import TorchDispatchMode, schema_of
from .syncs import NoHostData, refuse_host_data, refuse_waiting


class Tape(TorchDispatchMode):
    """Notes the operations that run inside, each of which :meth:`replay` runs again on the same tensors.

    Python is not run again, whatever was read from the host stays as it was, and results land where they did the first time.
    On leaving, what was written to is put back: recording by itself changes nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self._operations: list[tuple[Callable, tuple, dict, list[Tensor]]] = []
        self._before: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        refuse_waiting(func, args)
        refuse_host_data(func, args)
        written = list(_masks_of(func, args, kwargs))
        self._before += [(tensor, tensor.clone()) for tensor in written]
        result = func(*args, **kwargs)
        outputs = [] if written else _new_tensors(result, (*args, *kwargs.values()))
        if written or outputs:  # a view needs no second look
            self._operations.append((func, args, kwargs, outputs))
        return result

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        # Passes of a model may have run in it, and what they made can be written to in it alone.
        with torch.inference_mode():
            for tensor, before in reversed(self._before):
                tensor.copy_(before)
        self._before.clear()

    def replay(self) -> None:
        with torch.inference_mode():
            for func, args, kwargs, outputs in self._operations:
                result = func(*args, **kwargs)
                if outputs:
                    for output, new in zip(outputs, _new_tensors(result, (*args, *kwargs.values())), strict=True):
                        output.copy_(new)


def _masks_of(func: Any, args: tuple, kwargs: dict) -> Iterator[Tensor]:
    for index, argument in enumerate(schema_of(func).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            yield from (t for t in _flat(value) if isinstance(t, Tensor))


def _new_tensors(result: Any, given: Sequence[Any]) -> list[Tensor]:
    """The tensors of `result` that are no views of what was given: in inference mode ``reshape`` and its like, which may be either,
    are operations like any other.
    """
    places = {t.untyped_storage().data_ptr() for value in given for t in _flat(value) if isinstance(t, Tensor)}
    return [t for t in _flat(result) if isinstance(t, Tensor) and t.untyped_storage().data_ptr() not in places]


def _flat(value: Any) -> list:
    return list(value) if isinstance(value, list | tuple) else [value]


class TapeRecorder:
    """A :class:`~decoders.engine.model.recordings.Recorder` that counts, for tests of everything around a recording.

    Args:
        late: let nothing happen until somebody waits for it, as if the device were slow.

    Attributes:
        recorded: how often something was recorded.
        replayed: how often a recording was replayed.
        waited: how often the host has waited.
    """

    def __init__(self, late: bool = False) -> None:
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
        self.settle()  # recording begins when the device has come to rest
        tape = Tape()
        with NoHostData(), tape:  # some reads never get as far as an operation
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
        """Runs all that is under way."""
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
        """Runs what was to be done before this event, and nothing after it."""
        self.recorder.waited += 1
        while not self._passed:
            self.recorder._pending.pop(0)()
