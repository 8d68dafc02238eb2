"""Tensors that say they are on a device and compute on the CPU: what mixes them with the host's is found without one, and so is what
devices other than CUDA refuse or get wrong."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from decoders.engine.decode import call

#: The device that is pretended now.
HERE = [torch.device("cuda:0")]
#: Functions that take tensors of both devices.
MOVES = frozenset({"to", "copy_", "__setitem__"})
#: Attributes that a tensor's device decides.
ATTRIBUTES = ("device", "is_cuda", "is_mps", "is_xpu", "is_cpu", "grad", "grad_fn")
#: Kinds of devices on which nothing has run, which are taken to do no more than both do: Metal has no 64-bit floating point and no
#: 64-bit atomics, its sorts are not stable in every version, and its copies read pinned or changing memory wrongly; Intel's cards
#: for desktops have no 64-bit floating point.
UNTRIED = ("mps", "xpu")
SORTS = frozenset({"sort", "argsort", "msort", "unique", "unique_consecutive", "kthvalue", "mode", "topk"})
WIDE = (torch.int64, torch.uint64)


class MixedDevicesError(AssertionError):
    """A function was given tensors of the device and of the host, which devices refuse."""


class RefusedError(AssertionError):
    """A function that not every device of this kind computes, or not rightly."""


class OnDevice(Tensor):
    """A tensor of the device. Its values are in `values`, on the CPU."""

    values: Tensor

    @staticmethod
    def __new__(cls, values: Tensor) -> OnDevice:
        own = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, values.shape, values.stride(), values.storage_offset(), dtype=values.dtype, device=HERE[0]
        )
        own.values = values
        return own

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        raise AssertionError(f"{func} was called outside of pretended()")


class _Functions(TorchFunctionMode):
    """Runs functions on the values, and says whether their results are the device's."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), dict(kwargs or {})
        if name == "_has_compatible_shallow_copy_type":  # modules that are moved get other parameters
            return False
        leaves = _leaves((args, kwargs))
        own = [each for each in leaves if isinstance(each, OnDevice)]
        devices = [torch.device(each) for each in leaves if _is_device(each)]
        untried = HERE[0].type in UNTRIED
        if untried and (name == "pin_memory" or kwargs.get("pin_memory") or kwargs.get("non_blocking")):
            raise RefusedError(f"{name} with pinned memory, or without waiting")
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if name == "pin_memory":
            return args[0]
        if name in ("_parse_to", "__set__") or (not own and HERE[0].type not in [device.type for device in devices]):
            return func(*args, **kwargs)
        if name == "__get__" and (attribute := getattr(func.__self__, "__name__", "")) in ATTRIBUTES:
            return {"device": HERE[0], "grad": None, "grad_fn": None}.get(attribute, attribute == f"is_{HERE[0].type}")
        if name == "numpy":
            raise TypeError(f"can't convert {HERE[0]} device type tensor to numpy")
        if name == "requires_grad_":
            return args[0]
        host = [each for each in leaves if isinstance(each, Tensor) and not isinstance(each, OnDevice) and each.dim()]
        if host and own and name not in MOVES:
            sizes = [(*each.shape, each.device.type) for each in leaves if isinstance(each, Tensor)]
            raise MixedDevicesError(f"{name} of {sizes}")
        if untried:
            _refuse(name, args, kwargs)
        if name == "histc":  # of integers on CUDA only
            return OnDevice(torch.histc(args[0].values.float(), **kwargs).to(args[0].values.dtype))
        with torch._C.DisableTorchFunction():
            result = func(*_map(_values, args), **_map(_values, kwargs))
        if name in ("copy_", "__setitem__"):
            return args[0]
        if name == "cpu" or ((name == "to" or kwargs.get("device") is not None) and self._to_host(name, args, devices)):
            # What is moved is a copy, as it would be on two devices.
            return result.clone() if any(result is each.values for each in own) else result
        if untried and any(isinstance(each, Tensor) and each.dtype == torch.float64 for each in _leaves(result)):
            raise RefusedError(f"{name} in float64")
        known = {id(each.values): each for each in own}
        return _map(lambda each: known[id(each)] if id(each) in known else _wrapped(each), result)

    @staticmethod
    def _to_host(name: str, args: tuple, devices: list[torch.device]) -> bool:
        if devices:
            return devices[0].type == "cpu"
        others = [each for each in args[1:] if isinstance(each, Tensor)]  # as another tensor, or only to another dtype
        return name == "to" and not isinstance((others or args)[0], OnDevice)


def _refuse(name: str, args: tuple, kwargs: dict) -> None:
    """Raises RefusedError for what an untried device may not compute rightly."""
    of = args[0] if args else None
    dtype = of.values.dtype if isinstance(of, OnDevice) else None
    if name in SORTS and (dtype in WIDE or kwargs.get("stable")):
        raise RefusedError(f"{name} of {dtype}")
    if name.startswith("scatter_reduce") and dtype is not None and not dtype.is_floating_point:
        raise RefusedError(f"{name} of {dtype}")
    if name.startswith("scatter_add") and dtype in WIDE and int(args[3].values.abs().sum()) >= 1 << 31:
        raise RefusedError(f"{name} of {dtype}, which is summed in 32 bits")
    if name in ("histc", "bincount"):
        raise RefusedError(name)


def _is_device(value: Any) -> bool:
    return isinstance(value, torch.device) or (isinstance(value, str) and value in ("cpu", "cuda", *UNTRIED))


def _leaves(value: Any) -> list[Any]:
    """What a nest of tuples, lists and dictionaries holds. torch's own functions for that took most of a pretended call."""
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (tuple, list)):
        return [value]
    return [leaf for each in value for leaf in (_leaves(each) if isinstance(each, (tuple, list, dict)) else (each,))]


def _map(function: Callable[[Any], Any], value: Any) -> Any:
    """The same nest of the function's results."""
    kind = type(value)
    if kind is dict:
        return {name: _map(function, each) for name, each in value.items()}
    if not isinstance(value, (tuple, list)) or kind is torch.Size:
        return function(value)
    mapped = [_map(function, each) for each in value]
    return kind(*mapped) if hasattr(kind, "_fields") else kind(mapped)


def _values(value: Any) -> Any:
    if isinstance(value, OnDevice):
        return value.values
    return torch.device("cpu") if _is_device(value) else value


def _wrapped(value: Any) -> Any:
    return OnDevice(value) if isinstance(value, Tensor) and not isinstance(value, OnDevice) else value


class _Anything:
    """A stream or an event of a device that is never behind."""

    cuda_stream = 0

    def __getattr__(self, name: str) -> Any:
        return lambda *given, **options: self

    def __enter__(self) -> _Anything:
        return self

    def __exit__(self, *error: Any) -> None: ...


def _no_context(*given: Any) -> Any:
    return contextlib.nullcontext()


def pretended_cuda() -> contextlib.AbstractContextManager[None]:
    return pretended("cuda")


@contextlib.contextmanager
def pretended(kind: str) -> Iterator[None]:
    """Inside, in every thread, tensors can be moved to a device of that kind, and CUDA's functions are there if it is "cuda"."""
    anything, nothing = (lambda *given, **options: _Anything()), (lambda *given, **options: 0)
    memory = {"memory_allocated": nothing, "max_memory_allocated": nothing, "reset_peak_memory_stats": nothing}
    streams = {"current_stream": anything, "Stream": anything, "Event": anything, "stream": _no_context}
    device = {
        "device": _no_context,
        "current_device": nothing,
        "synchronize": nothing,
        "get_device_name": lambda *given: "a GPU",
    }
    more = {"get_device_capability": lambda *given: (9, 0), "mem_get_info": lambda *given: (1 << 34, 1 << 34)}
    more["is_current_stream_capturing"] = lambda: False
    run, place = threading.Thread.run, Tensor.set_

    def placed(tensor: Tensor, *given: Any) -> Tensor:  # of a storage, which no function mode sees
        return OnDevice(place(tensor.values, *given)) if isinstance(tensor, OnDevice) else place(tensor, *given)

    def inside(thread: threading.Thread) -> None:
        with _Functions():
            run(thread)

    with contextlib.ExitStack() as stack:
        before, HERE[0] = HERE[0], torch.device(kind, 0)
        stack.callback(HERE.__setitem__, 0, before)
        if kind == "cuda":
            stack.enter_context(mock.patch.multiple(torch.cuda, **memory, **streams, **device, **more))
        elif kind == "xpu":
            stack.enter_context(mock.patch.multiple(torch.xpu, **memory, **streams, **device))
        stack.enter_context(mock.patch.object(threading.Thread, "run", inside))
        stack.enter_context(mock.patch.object(Tensor, "set_", placed))
        # A call within somebody's mode compiles nothing. This mode stands for a device, which may compile.
        stack.enter_context(mock.patch.object(call, "within_modes", return_value=False))
        overwrite = torch.__future__.get_overwrite_module_params_on_conversion()
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        stack.callback(torch.__future__.set_overwrite_module_params_on_conversion, overwrite)
        stack.enter_context(_Functions())
        stack.enter_context(torch.no_grad())
        yield


def moved(model: Any) -> Any:
    """`model` on the device."""
    for module in model.modules():
        for name, own in module._parameters.items():
            if own is not None:
                module._parameters[name] = nn.Parameter(OnDevice(own.data), requires_grad=False)
        for name, own in module._buffers.items():
            if own is not None:
                module._buffers[name] = OnDevice(own)
    return model
