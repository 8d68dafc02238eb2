"""Compiles the CUDA kernels in parallel before a model's first pass. One after the other, they would take more than ten seconds.

First, trial passes over fake tensors, which have no memory, show which operators a model uses. Then each operator's launching code runs
with "meta" tensors: Triton compiles the kernels, but does not run them. Triton keeps compiled kernels on disk for later processes.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from ....tree import Topology
from ..torch_compat import FakeTensorMode, TorchDispatchMode
from . import LAUNCHERS

_log = logging.getLogger("decoders")


class Noted(TorchDispatchMode):
    """Records calls of this package's operators, one call per combination of sizes, strides and dtypes of the arguments.

    Attributes:
        calls: by combination, the operator's name and its arguments, with tensors on the "meta" device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[Hashable, tuple[str, list[Any]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        namespace, _, name = func.name().partition("::")
        if namespace == "decoders" and name in LAUNCHERS:
            given = [_without_memory(value) for value in args]
            self.calls.setdefault((name, *map(_kind, given)), (name, given))
        return func(*args, **(kwargs or {}))


def _without_memory(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_without_memory(each) for each in value]
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _kind(value: Any) -> Hashable:
    if isinstance(value, list):
        return tuple([_kind(each) for each in value])
    return (value.shape, value.stride(), value.dtype) if isinstance(value, Tensor) else value


def calls_within(passes: Callable[[], Any]) -> list[tuple[str, list[Any]]]:
    """Runs `passes`, which must not store tensors, on fake tensors. Returns calls of our operators: their names and arguments."""
    noted, fakes = Noted(), logging.getLogger(FakeTensorMode.__module__)
    uncached = Topology._tensors.__wrapped__  # its cache would keep fake tensors for later calls
    # `noted` is entered last, so it sees a call before FakeTensorMode makes the result.
    with (
        mock.patch.object(Topology, "_tensors", uncached),
        mock.patch.object(fakes, "disabled", True),
        FakeTensorMode(allow_non_fake_inputs=True),
        noted,
    ):
        try:
            passes()
        except Exception as error:  # for example, a module reads values, which fake tensors lack
            _log.info("some kernels are compiled as they are launched: %s: %s", type(error).__name__, error)
    return list(noted.calls.values())


@contextmanager
def compiling_only() -> Iterator[None]:
    """A context in which the kernels that this thread launches are compiled but not run."""
    from triton.runtime.jit import JITFunction

    launch, ours = JITFunction.run, threading.get_ident()

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **given: Any) -> Any:
        return launch(self, *args, grid=grid, warmup=warmup or threading.get_ident() == ours, **given)

    with mock.patch.object(JITFunction, "run", run):
        yield


#: Held while functions of Triton and torch are replaced for the whole process.
_alone = threading.Lock()


def compile_kernels(passes: Callable[[], Any]) -> int:
    """Compiles the kernels that `passes` launches, in parallel. Returns the number of calls of operators; 0 after an error."""
    try:
        from triton import AsyncCompileMode

        with _alone:
            calls = calls_within(passes)
            threads = ThreadPoolExecutor(min(os.cpu_count() or 1, 16), "compile kernels")
            with threads, compiling_only(), AsyncCompileMode(threads, ignore_errors=True):
                for name, given in calls:
                    LAUNCHERS[name](*given)
    except Exception as error:
        _log.info("kernels are compiled as they are launched: %s: %s", type(error).__name__, error)
        return 0
    return len(calls)
