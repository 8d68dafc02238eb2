"""How the loop is compiled: one private graph per model and sampling plan, nothing per strategy or call."""

from __future__ import annotations

import itertools
import time
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

from .sampling import SamplingPlan
from .static_inputs import Same

_serial = itertools.count()


def private(function: Callable) -> Callable:
    """A copy of `function` (or bound method) with a code object of its own.

    Dynamo keeps compiled graphs per code object. Two models that shared one would see each other's graphs and use up
    each other's recompilation limit.
    """
    plain = function.__func__ if isinstance(function, types.MethodType) else function
    code = plain.__code__.replace(co_name=f"{plain.__name__}_{next(_serial)}")
    copy = types.FunctionType(code, plain.__globals__, code.co_name, plain.__defaults__, plain.__closure__)
    copy.__kwdefaults__ = plain.__kwdefaults__
    return types.MethodType(copy, function.__self__) if isinstance(function, types.MethodType) else copy


def frozen_weights() -> AbstractContextManager:
    """Settings of the CPU for what is compiled inside: weights frozen and prepacked, projections of one input joined, kernels
    called from C++. As an option of ``torch.compile`` freezing has no effect, hence a context.
    """
    return torch._inductor.config.patch({"freezing": True, "cpp.enable_concat_linear": True, "cpp_wrapper": True})


@contextmanager
def separate_loops() -> Iterator[None]:
    """Keeps inductor from nesting the loops of several kernels in one over their common rows.

    Such nests hold what one loop hands to the next in a buffer of their own, and where masks or 64-bit noise take part
    gcc 12 makes code of them that overwrites its stack (torch 2.13). There is no setting for it.
    """
    from torch._inductor.codegen.cpp import CppScheduling

    if not hasattr(CppScheduling, "_get_outer_loop_fusion_depth"):
        yield
        return
    with mock.patch.object(CppScheduling, "_get_outer_loop_fusion_depth", return_value=0):
        yield


class CompiledFunction:
    """A strategy's tensor function, compiled with dynamic sizes; `on_compile` is told the seconds of calls that made a graph.

    Where the compiler fails, after too many shapes for instance, a warning says why, once, and the function runs as it is.
    """

    def __init__(self, function: Callable) -> None:
        self.function, self._warned = function, False
        self.compiled = torch.compile(private(function), fullgraph=True, dynamic=True)
        self.on_compile: Callable[[float], None] = lambda seconds: None
        self._known: set[tuple] = set()

    def __call__(self, *args: Any) -> Any:
        started, before = time.perf_counter(), compilations()
        kind = tuple([a.shape if type(a) is Tensor else _kind(a) for a in args])
        if kind in self._known:
            result = self._run(*args)
        else:
            self._known.add(kind)
            # Sizes that happen to be equal, four rows and four children, are not the same size. (Entering this takes
            # longer than many a function, so not in every call.)
            with torch.fx.experimental._config.patch(use_duck_shape=False):
                result = self._run(*args)
        if compilations() > before:
            self.on_compile(time.perf_counter() - started)
        return result

    def static_parts(self) -> Same:
        """Calls share it: see :func:`~decoders.engine.static_inputs.find_tensors`."""
        return Same(self)

    def _run(self, *args: Any) -> Any:
        try:
            return self.compiled(*args)
        except (TorchDynamoException, FailOnRecompileLimitHit, AssertionError) as error:
            if not self._warned:
                name = getattr(self.function, "__name__", repr(self.function))
                warnings.warn(f"{name} could not be compiled, running it eagerly instead: {error}", stacklevel=3)
                self._warned = True
            return self.function(*args)


def _kind(argument: Any) -> Any:
    """What an argument may tell graphs apart by: the shape of a tensor, the value of plain Python, the type of all else."""
    if isinstance(argument, Tensor):
        return argument.shape
    return argument if isinstance(argument, bool | int | float | str | tuple | SamplingPlan | None) else type(argument)


def mark_dynamic(tensors: list[tuple[Tensor, tuple[int, ...]]]) -> None:
    """Declares sizes that vary between calls, so that one graph serves them all."""
    for tensor, dims in tensors:
        for dim in dims:
            torch._dynamo.mark_dynamic(tensor, dim)


def compilations() -> int:
    """Graphs that Dynamo has compiled in this process so far."""
    return torch._dynamo.utils.counters["stats"].get("unique_graphs", 0)
