"""What Python may do beside a device: whether sizes are static there, and whether values may be looked at."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache
from pathlib import Path

import torch
from torch import Tensor


def static_shapes(device: torch.device) -> bool:
    """Whether what runs on `device` is recorded, for one size each. The switch between the two paths: tests turn it on a CPU."""
    return device.type != "cpu"


_recorded = ContextVar("recorded", default=False)


@contextmanager
def as_recorded() -> Iterator[None]:
    """Within it the engine's code runs on the CPU as in a recording: it reads nothing from tensors."""
    token = _recorded.set(True)
    try:
        yield
    finally:
        _recorded.reset(token)


def recorded() -> bool:
    """Whether this is being recorded, or runs as in a recording."""
    return _recorded.get()


def host_reads(tensor: Tensor) -> bool:
    """Whether Python may look at values without waiting: on a CPU, outside of traced and recorded code."""
    # Traced code never gets as far as the variable.
    return not static_shapes(tensor.device) and not torch.compiler.is_dynamo_compiling() and not recorded()


def current(device: torch.device) -> AbstractContextManager:
    """Makes `device` the current one, where there are several of its kind."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def processor_name(device: torch.device) -> str:
    """What the device is called: the GPU, or the processor."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


@cache
def cpu_name() -> str:
    """The processor's name; neither psutil nor ``platform`` tells it on Linux."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"
