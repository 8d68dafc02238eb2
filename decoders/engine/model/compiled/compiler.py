"""Compiled functions of strategies, each with a code object of its own."""

from __future__ import annotations

import itertools
import time
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ....sampling.processors import SamplingPlan
from .. import torch_compat
from ..cuda_graphs.static_inputs import SameObject

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


class CompiledFunction:
    """A strategy's tensor function, compiled with dynamic sizes; `on_compile` is told the seconds of calls that made a graph.

    Where the compiler fails, after too many shapes for instance, a warning says why, once, and the function runs as it is: for
    arguments of that kind from then on, and for all if it never could be compiled.
    """

    def __init__(self, function: Callable) -> None:
        self.function, self._warned, self._worked = function, False, False
        self.compiled = torch.compile(private(function), fullgraph=True, dynamic=True)
        self.on_compile: Callable[[float], None] = lambda seconds: None
        self._known: set[tuple] = set()
        self._failed: set[tuple] = set()

    def __call__(self, *args: Any) -> Any:
        started, before = time.perf_counter(), compilations()
        kind = tuple([a.shape if type(a) is Tensor else _kind(a) for a in args])
        if kind in self._failed or (self._failed and not self._worked):
            return self.function(*args)
        if kind in self._known:
            result = self._run(kind, args)
        else:
            self._known.add(kind)
            # Sizes that happen to be equal, four rows and four children, are not the same size. (Entering this takes
            # longer than many a function, so not in every call.)
            with torch_compat.sizes_of_their_own():
                result = self._run(kind, args)
        if compilations() > before:
            self.on_compile(time.perf_counter() - started)
        return result

    def static_parts(self) -> SameObject:
        """Calls share it: see :func:`~decoders.engine.model.cuda_graphs.static_inputs.find_tensors`."""
        return SameObject(self)

    def _run(self, kind: tuple, args: tuple) -> Any:
        try:
            result = self.compiled(*args)
            self._worked = True
            return result
        except (*torch_compat.COMPILER_ERRORS, AssertionError) as error:
            result = self.function(*args)  # an error of the function's own is raised here, as what it is
            self._failed.add(kind)
            if not self._warned:
                name = getattr(self.function, "__name__", repr(self.function))
                warnings.warn(f"{name} could not be compiled, running it eagerly instead: {error}", stacklevel=3)
                self._warned = True
            return result


def _kind(argument: Any) -> Any:
    """What an argument may tell graphs apart by: the shape of a tensor, the value of plain Python, the type of all else."""
    if isinstance(argument, Tensor):
        return argument.shape
    return argument if isinstance(argument, bool | int | float | str | tuple | SamplingPlan | None) else type(argument)


def compilations() -> int:
    """Graphs that Dynamo has compiled in this process so far."""
    return torch_compat.graphs_compiled()
