"""Tests on a CPU whether a step could be recorded as a CUDA graph.

A tape logs operations once and replays them, as a CUDA graph replays kernels. PyTorch modes (``TorchFunctionMode``,
``TorchDispatchMode``) detect operations that make the host wait for the device, or that use data of the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..engine.model.torch_compat import TorchDispatchMode, schema_of, waiting_operators, weak_memory

aten = torch.ops.aten
#: Functions that make the host wait for the device: they return a value to the host, or a tensor whose size depends on values.
HOST_READS = frozenset(
    {
        "item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__complex__", "__index__", "__array__",
        "__repr__", "__str__", "__format__", "__contains__", "nonzero", "argwhere", "masked_select", "unique",
        "unique_consecutive", "bincount", "equal", "allclose", "is_nonzero",
    }
)  # fmt: skip
#: Functions that create tensors from data of the host.
MAKERS = frozenset({torch.tensor, torch.as_tensor, torch.asarray, torch.from_numpy, Tensor.new_tensor})
HOST_DATA = "it creates a tensor from data of the host, and the copy makes the host wait; create the tensor in start"
#: Operations of torch's dispatcher that make the host wait, like the functions in `HOST_READS`.
WAITING = frozenset(
    {
        *waiting_operators(), aten.is_nonzero, aten.equal, aten.nonzero, aten.masked_select, aten.unique_dim,
        aten.unique_consecutive, aten.bincount,
    }
)  # fmt: skip
INDEXING = frozenset({aten.index, aten.index_put, aten.index_put_})
#: Operations that turn data of the host into a tensor. ``torch.tensor`` and similar functions call these operations.
FROM_HOST = frozenset({aten.lift, aten.lift_fresh})


class HostReadError(AssertionError):
    """A hook of a strategy that claims ``on_device`` made the host wait for a value of the device."""


class RecordingError(AssertionError):
    """An operation cannot be recorded."""


class NoHostReads(TorchFunctionMode):
    """Raises HostReadError for functions that make the host wait for the device."""

    off = False

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        read = None if self.off else host_read(func, args, kwargs)
        if read is not None:
            raise HostReadError(f"{read} waits for the device; set on_device = False or use torch.where / gather")
        return func(*args, **kwargs)


class NoHostData(NoHostReads):
    """A :class:`NoHostReads` that also raises RecordingError for functions that create tensors from data of the host."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if not self.off and (func in MAKERS or any(isinstance(i, list) for i in _index(func, args))):
            raise RecordingError(HOST_DATA)
        return super().__torch_function__(func, types, args, kwargs)


class NoWaiting(TorchDispatchMode):
    """Raises RecordingError for operations that wait for the device, no matter which Python function dispatches them.

    Args:
        host_data: whether operations that create tensors from data of the host are allowed.
    """

    off = False

    def __init__(self, host_data: bool) -> None:
        super().__init__()
        self.host_data = host_data

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if not self.off:
            refuse_waiting(func, args)
            if not self.host_data:
                refuse_host_data(func, args)
        return func(*args, **(kwargs or {}))


def host_read(func: Any, args: tuple, kwargs: dict) -> str | None:
    """Describes, for a message, how a call to a function of PyTorch waits for the device. None if the function does not wait."""
    name = getattr(func, "__name__", "")
    if name in HOST_READS:
        return f"{name}()"
    for index in _index(func, args):
        if isinstance(index, slice) and any(isinstance(b, Tensor) for b in (index.start, index.stop, index.step)):
            return "slicing up to a number that is on the device"
        if name == "__getitem__" and isinstance(index, Tensor) and index.dtype == torch.bool:
            return "indexing with a bool mask"
        if isinstance(index, Tensor) and index.dim() == 0:
            return "indexing with a number that is on the device"
    if name == "to" and "cpu" in [argument for argument in (*args, *kwargs.values()) if isinstance(argument, str)]:
        return "to('cpu')"
    if name == "where" and len(args) == 1 and not kwargs:
        return "where() without values"
    if name == "repeat_interleave" and kwargs.get("output_size") is None and isinstance((*args, None)[1], Tensor):
        return "repeat_interleave() without output_size"
    return None


def refuse_waiting(func: Any, args: tuple) -> None:
    """Raises RecordingError if the operation `func` waits for the device."""
    packet = func.overloadpacket
    if packet in WAITING:
        raise RecordingError(f"{packet.__name__} waits for the device")
    # One value can be written to all positions of a mask without counting the positions.
    counts = packet in INDEXING and not (len(args) > 2 and args[2].numel() == 1)
    if counts and any(isinstance(i, Tensor) and i.dtype == torch.bool for i in args[1]):
        raise RecordingError("indexing with a bool mask waits for the device")


def refuse_host_data(func: Any, args: tuple) -> None:
    """Raises RecordingError if the operation `func` creates a tensor from data of the host."""
    # A single number is an argument of the kernel, so no copy is needed.
    if func.overloadpacket in FROM_HOST and args[0].dim():
        raise RecordingError(HOST_DATA)


def _index(func: Any, args: tuple) -> Iterator[Any]:
    """Yields the parts of the index, such as ``i, j`` in ``x[i, j]``, if `func` reads or writes by index. Otherwise yields nothing."""
    if getattr(func, "__name__", "") in ("__getitem__", "__setitem__"):
        yield from args[1] if isinstance(args[1], tuple) else args[1:2]


class Tape(TorchDispatchMode):
    """Logs the operations that run while it is active. :meth:`replay` runs them again on the same tensors.

    In a replay no Python code of the hook runs. Values of the host stay as they were in the recording, and results are written to the
    recorded tensors. When recording ends, all tensors that were written are restored, so that recording alone does not change them.

    Like a graph, the tape keeps only the memory alive that its operations allocated. :meth:`replay` raises RecordingError if other
    memory that the operations use was freed.
    """

    def __init__(self) -> None:
        super().__init__()
        self._operations: list[tuple[Callable, tuple, dict, list[tuple[int, Tensor]]]] = []
        self._before: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        refuse_waiting(func, args)
        refuse_host_data(func, args)
        written = list(_masks_of(func, args, kwargs))
        self._before += [(tensor, tensor.clone()) for tensor in written]
        result = func(*args, **kwargs)
        outputs = _new_tensors(result, (*args, *kwargs.values()))
        if written or outputs:  # views need not be replayed
            self._operations.append((func, args, kwargs, outputs))
        return result

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        # The forward pass of a model may have created inference tensors, which can be written only in inference mode.
        with torch.inference_mode():
            for tensor, before in reversed(self._before):
                tensor.copy_(before)
        self._before.clear()
        own = {output.untyped_storage().data_ptr() for *_, outputs in self._operations for _, output in outputs}

        def placed(value: Any) -> Any:
            # A tensor without dimensions may come from a Python number, which a graph stores, so the tape keeps it alive.
            outside = isinstance(value, Tensor) and value.dim() and value.numel()
            return _Place(value) if outside and value.untyped_storage().data_ptr() not in own else value

        self._operations = [
            (func, _mapped(placed, args), _mapped(placed, kwargs), outputs)
            for func, args, kwargs, outputs in self._operations
        ]

    def replay(self) -> None:
        with torch.inference_mode():
            for func, args, kwargs, outputs in self._operations:
                results = _flat(func(*_mapped(_tensor, args), **_mapped(_tensor, kwargs)))
                for index, output in outputs:
                    output.copy_(results[index])


class _Place:
    """Refers to a tensor without keeping the tensor's memory alive."""

    def __init__(self, tensor: Tensor) -> None:
        self._memory, self._empty = weak_memory(tensor), tensor.new_empty(0)
        self._layout = tensor.storage_offset(), tensor.shape, tensor.stride()

    def tensor(self) -> Tensor:
        memory = self._memory()
        if memory is None:
            raise RecordingError("replay uses memory that was freed after the recording: keep its tensor in the state")
        return self._empty.detach().set_(memory, *self._layout)


def _tensor(value: Any) -> Any:
    return value.tensor() if isinstance(value, _Place) else value


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """`value` with `function` applied to its entries, also in lists, tuples and dicts within it."""
    if isinstance(value, list | tuple):
        return type(value)(_mapped(function, entry) for entry in value)
    if isinstance(value, dict):
        return {name: _mapped(function, entry) for name, entry in value.items()}
    return function(value)


def _masks_of(func: Any, args: tuple, kwargs: dict) -> Iterator[Tensor]:
    for index, argument in enumerate(schema_of(func).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            yield from (t for t in _flat(value) if isinstance(t, Tensor))


def _new_tensors(result: Any, given: Sequence[Any]) -> list[tuple[int, Tensor]]:
    """The tensors of `result` that are not views of `given`, each with its index. Results of ``reshape``, for example, may be views."""
    places = {t.untyped_storage().data_ptr() for value in given for t in _flat(value) if isinstance(t, Tensor)}
    return [
        (index, t)
        for index, t in enumerate(_flat(result))
        if isinstance(t, Tensor) and t.untyped_storage().data_ptr() not in places
    ]


def _flat(value: Any) -> list:
    return [own for entry in value for own in _flat(entry)] if isinstance(value, list | tuple) else [value]
