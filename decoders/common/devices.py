"""The capabilities of each kind of device, and transfers of small tensors to a device."""

from __future__ import annotations

import platform
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError

#: Kinds of devices that this package has run on. The functions below say what these and other kinds ("mps", "xpu") can do.
TRIED = ("cpu", "cuda")


def compiles(device: torch.device) -> bool:
    """Whether this package uses ``torch.compile`` for `device`."""
    return device.type in TRIED


def pins(device: torch.device) -> bool:
    """Whether pinned memory is copied to `device` asynchronously. On Metal, such a copy may contain what the host writes later."""
    return device.type == "cuda"


def has_64_bits(device: torch.device) -> bool:
    """Whether `device` computes in 64 bits as CPUs do.

    Metal has no float64. Metal's scatter operators reduce int64 in 32 bits, and some versions sort int64 wrongly or not stably. Many of
    Intel's GPUs have no float64.
    """
    return device.type in TRIED


def in_64_bits(tensor: Tensor) -> Tensor:
    """Returns `tensor`, or a copy on the host if its device does not compute in 64 bits. The copy waits for the device."""
    return tensor if has_64_bits(tensor.device) else tensor.cpu()


def narrowed(tensor: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Converts the float32 `tensor` to a 16-bit `dtype`; returns None if the conversion would round a value."""
    narrow = tensor.to(dtype)
    return narrow if torch.equal(narrow.float(), tensor) else None


def accelerator(device: torch.device) -> Any:
    """``torch.cuda`` or ``torch.xpu``, which have the same functions for streams and memory; None for other devices."""
    return {"cuda": torch.cuda, "xpu": torch.xpu}.get(device.type)


def refuse_meta(name: str, value: Any) -> None:
    """Raises InputError if `value` is a tensor on the meta device."""
    if isinstance(value, Tensor) and value.is_meta:
        raise InputError(
            f"{name} is on the meta device, where tensors have no values: make it on the model's device or the CPU"
        )


def present() -> dict[str, str]:
    """Maps each kind of device on this machine to the name of the first device; for ``cpu`` the value is the instruction set."""
    found = {"cpu": torch.backends.cpu.get_cpu_capability()}
    for kind in ("cuda", "xpu"):
        if (module := accelerator(torch.device(kind))).is_available():
            found[kind] = module.get_device_name()
    return found | ({"mps": cpu_name()} if torch.backends.mps.is_available() else {})


#: A thread holds this lock while it records a step or synchronizes a device: CUDA aborts a recording if another thread synchronizes.
RECORDING = threading.RLock()


def current(device: torch.device) -> AbstractContextManager:
    """A context in which `device` is the current CUDA or XPU device. It has no effect for other devices."""
    module = accelerator(device)
    return nullcontext() if module is None else module.device(device)


def moved_together(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copies small `tensors` from the host to `device` in one transfer, which is asynchronous on CUDA. The results share one buffer."""
    # Wider dtypes first, so that each tensor is aligned.
    ordered = sorted(range(len(tensors)), key=lambda place: -tensors[place].itemsize)
    # A view of one element may have any stride. reshape and contiguous() would keep the stride; clone does not.
    flat = [tensors[place].clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8) for place in ordered]
    host = torch.empty(sum(map(len, flat)), dtype=torch.uint8, device="cpu", pin_memory=pins(device))
    there = torch.cat(flat, out=host).to(device, non_blocking=pins(device))
    parts = dict(zip(ordered, there.split([len(part) for part in flat]), strict=True))
    return [parts[place].view(tensor.dtype).view(tensor.shape) for place, tensor in enumerate(tensors)]


def processor_name(device: torch.device) -> str:
    """The name of `device` if it is a GPU, else of the CPU."""
    module = accelerator(device)
    return module.get_device_name(device) if module is not None else cpu_name()


@cache
def cpu_name() -> str:
    """The processor's name from /proc/cpuinfo; psutil and ``platform`` do not have it on Linux."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"
