"""Facts about devices: whether sizes must be static, and whether Python may read values without waiting."""

from __future__ import annotations

import platform
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache
from pathlib import Path

import torch
from torch import Tensor


def static_shapes(device: torch.device) -> bool:
    """Whether sizes are static on `device`, because steps are recorded per size. Tests replace it to run this path on a CPU."""
    return device.type != "cpu"


_recorded = ContextVar("recorded", default=False)


@contextmanager
def as_recorded() -> Iterator[None]:
    """Runs the engine's code on the CPU as in a recording: it reads no values from tensors."""
    token = _recorded.set(True)
    try:
        yield
    finally:
        _recorded.reset(token)


def recorded() -> bool:
    """Whether this code is being recorded, or runs as in a recording."""
    return _recorded.get()


def host_reads(tensor: Tensor) -> bool:
    """Whether Python may read values of `tensor` without waiting: on a CPU, outside of traced and recorded code."""
    # The context variable comes last: traced code must not read it.
    return not static_shapes(tensor.device) and not torch.compiler.is_dynamo_compiling() and not recorded()


#: Held to record a step or to synchronize a device: CUDA aborts a recording if another thread synchronizes the device.
RECORDING = threading.RLock()


def current(device: torch.device) -> AbstractContextManager:
    """Makes a CUDA `device` the current one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def moved_together(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Moves small `tensors` from the host to `device` with a single copy; returns views of a buffer. Does not wait for a GPU."""
    # Wider dtypes first, so that each tensor is aligned.
    ordered = sorted(range(len(tensors)), key=lambda place: -tensors[place].itemsize)
    # clone, because a view of one element may have any stride, and reshape and contiguous do not change it.
    flat = [tensors[place].clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8) for place in ordered]
    host = torch.empty(sum(map(len, flat)), dtype=torch.uint8, device="cpu", pin_memory=device.type == "cuda")
    there = torch.cat(flat, out=host).to(device, non_blocking=True)
    parts = dict(zip(ordered, there.split([len(part) for part in flat]), strict=True))
    return [parts[place].view(tensor.dtype).view(tensor.shape) for place, tensor in enumerate(tensors)]


def processor_name(device: torch.device) -> str:
    """The name of the GPU, or of the processor."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


@cache
def cpu_name() -> str:
    """The processor's name from /proc/cpuinfo; psutil and ``platform`` do not have it on Linux."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"
