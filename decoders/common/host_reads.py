"""Tells where Python may read a tensor's values: not where it would wait for the device, and not while a step is recorded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def static_shapes(device: torch.device) -> bool:
    """Whether sizes are rounded up to few static sizes on `device`, as CUDA graphs need. Tests replace this function on a CPU."""
    return device.type != "cpu"


_recorded: ContextVar[list[object] | None] = ContextVar("recorded", default=None)


@contextmanager
def as_recorded() -> Iterator[list[object]]:
    """Within this context, the engine's code runs as in a recorded CUDA graph: Python reads no values from tensors, even on a CPU.

    Yields the list to which :func:`kept` adds values; a recording must hold it.
    """
    values: list[object] = []
    token = _recorded.set(values)
    try:
        yield values
    finally:
        _recorded.reset(token)


def kept(value: T) -> T:
    """`value`, which a cache may drop. A recording holds it, because replays read the memory of its tensors."""
    if (values := _recorded.get()) is not None:
        values.append(value)
    return value


def recorded() -> bool:
    """Whether the code runs within :func:`as_recorded`. Every recording runs within this context."""
    return _recorded.get() is not None


def host_reads(tensor: Tensor) -> bool:
    """Whether Python may read values of `tensor`, without a sync: on a CPU, outside of traced and recorded code."""
    # The context variable comes last: traced code must not read it.
    return not static_shapes(tensor.device) and not torch.compiler.is_dynamo_compiling() and not recorded()
