"""Tells where Python may read a tensor's values: not where it would wait for the device, and not while a step is recorded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor


def static_shapes(device: torch.device) -> bool:
    """Whether sizes are rounded up to few static sizes on `device`, as CUDA graphs need. Tests replace this function on a CPU."""
    return device.type != "cpu"


_recorded = ContextVar("recorded", default=False)


@contextmanager
def as_recorded() -> Iterator[None]:
    """Within this context, the engine's code runs as in a recorded CUDA graph: Python reads no values from tensors, even on a CPU."""
    token = _recorded.set(True)
    try:
        yield
    finally:
        _recorded.reset(token)


def recorded() -> bool:
    """Whether the code runs within :func:`as_recorded`. Every recording runs within this context."""
    return _recorded.get()


def host_reads(tensor: Tensor) -> bool:
    """Whether Python may read values of `tensor`, without a sync: on a CPU, outside of traced and recorded code."""
    # The context variable comes last: traced code must not read it.
    return not static_shapes(tensor.device) and not torch.compiler.is_dynamo_compiling() and not recorded()
