"""Tells whether Python may read a tensor's values: on a CPU, outside of traced code and of recorded CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def static_shapes(device: torch.device) -> bool:
    """Whether tensors on `device` get one of few static sizes, as CUDA graphs need. Tests on a CPU replace this function."""
    return device.type != "cpu"


_recorded: ContextVar[list[object] | None] = ContextVar("recorded", default=None)


@contextmanager
def as_recorded() -> Iterator[list[object]]:
    """Within this context, the engine's code runs as in a recorded CUDA graph: Python reads no values from tensors, even on a CPU.

    Yields the list to which :func:`kept` adds values. A recording must keep this list, so that the values stay in memory.
    """
    values: list[object] = []
    token = _recorded.set(values)
    try:
        yield values
    finally:
        _recorded.reset(token)


def kept(value: T) -> T:
    """Returns `value`, and adds it to the list of :func:`as_recorded`, if any, because replays read the tensors of `value` later."""
    if (values := _recorded.get()) is not None:
        values.append(value)
    return value


def recorded() -> bool:
    """Whether the code runs within :func:`as_recorded`. Every recording runs within this context."""
    return _recorded.get() is not None


def host_reads(tensor: Tensor) -> bool:
    """Whether Python may read values of `tensor` without a sync: on a CPU, outside of traced and recorded code."""
    # The context variable comes last: traced code must not read it.
    return not static_shapes(tensor.device) and not torch.compiler.is_dynamo_compiling() and not recorded()
