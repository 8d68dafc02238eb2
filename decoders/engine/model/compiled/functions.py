"""Tensor functions that run uncompiled at first, and compiled once compiling is worth its time."""

from __future__ import annotations

import itertools
import time
import types
import warnings
from collections.abc import Callable, Hashable
from dataclasses import fields, is_dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ....common import host_reads
from ....sampling.processors import SamplingPlan
from .. import torch_compat
from ..static_inputs import SameObject, copied
from .background import BackgroundCompile, worth_compiling

_serial = itertools.count()


def private(function: Callable) -> Callable:
    """A copy of `function` (or of a bound method) with its own code object.

    Dynamo keeps compiled graphs per code object. With a shared code object, two models would check each other's guards and share a
    recompilation limit.
    """
    plain = function.__func__ if isinstance(function, types.MethodType) else function
    code = plain.__code__.replace(co_name=f"{plain.__name__}_{next(_serial)}")
    copy = types.FunctionType(code, plain.__globals__, code.co_name, plain.__defaults__, plain.__closure__)
    copy.__kwdefaults__ = plain.__kwdefaults__
    return types.MethodType(copy, function.__self__) if isinstance(function, types.MethodType) else copy


class CompiledFunction:
    """A tensor function, compiled with dynamic sizes. After a call that compiled code, `on_compile` is called with the call's seconds.

    If the compiler fails, for instance after too many shapes, one warning is given. From then on, calls whose arguments have the shapes
    and plain values of a failed call run uncompiled. If compiling has never succeeded, all calls run uncompiled.
    """

    def __init__(self, function: Callable) -> None:
        self.function, self._warned, self._worked = function, False, False
        self.on_compile: Callable[[float], None] = lambda seconds: None
        self._known: set[tuple] = set()
        self._failed: set[tuple] = set()

    @cached_property
    def compiled(self) -> Callable[..., Any]:
        # Not in __init__, because torch.compile imports modules for half a second, and many functions are never compiled.
        torch_compat.spare_compiler_warnings()
        options: dict[str, Any] = {"guard_filter_fn": torch_compat.skip_state_guard, "cpp.dynamic_threads": True}
        return torch.compile(private(self.function), fullgraph=True, dynamic=True, options=options)

    def __call__(self, *args: Any) -> Any:
        started, before = time.perf_counter(), torch_compat.graphs_compiled()
        kind = tuple([a.shape if type(a) is Tensor else _kind(a) for a in args])
        if kind in self._failed or (self._failed and not self._worked):
            return self.function(*args)
        if kind in self._known:
            result = self._run(kind, args)
        else:
            self._known.add(kind)
            # In this context, Dynamo tells apart sizes that happen to be equal. Only calls of new kinds enter it, because entering
            # takes time.
            with torch_compat.sizes_of_their_own():
                result = self._run(kind, args)
        if torch_compat.graphs_compiled() > before:
            self.on_compile(time.perf_counter() - started)
        return result

    def static_parts(self) -> SameObject:
        """Makes :func:`~decoders.engine.model.static_inputs.find_tensors` compare this object by identity instead of searching it."""
        return SameObject(self)

    def _run(self, kind: tuple, args: tuple) -> Any:
        try:
            with torch_compat.without_default_device():
                result = self.compiled(*args)
            self._worked = True
            return result
        except (*torch_compat.COMPILER_ERRORS, AssertionError) as error:
            result = self.function(*args)  # this raises if the function itself is at fault
            self._failed.add(kind)
            if not self._warned:
                name = getattr(self.function, "__name__", repr(self.function))
                warnings.warn(
                    f"{name} could not be compiled and runs uncompiled, which is slower: {error}", stacklevel=3
                )
                self._warned = True
            return result


def _kind(argument: Any) -> Any:
    """A key for the graph that an argument needs: a tensor's shape, a plain value, or the type of another object."""
    if isinstance(argument, Tensor):
        return argument.shape
    return argument if isinstance(argument, bool | int | float | str | tuple | SamplingPlan | None) else type(argument)


#: Seconds that compiling a function is expected to take on two cores.
FUNCTION_SECONDS = 5.0
#: Greatest number of kinds of arguments (:func:`kind_of`) that one function is compiled for. It is Dynamo's own limit.
MOST_KINDS = 8


class TieredFunction:
    """Runs `function` uncompiled, and compiles it in the background once its calls have taken as long as compiling would.

    Each kind of arguments (:func:`kind_of`) is compiled separately, so that a second row does not make a call wait for the compiler.

    Args:
        due: returns True if `function` is to be compiled earlier, because the step that calls it is compiled.
    """

    def __init__(self, function: Callable, compiled: CompiledFunction, due: Callable[[], bool] = lambda: False) -> None:
        self.function, self.compiled, self._due = function, compiled, due
        self._seconds = 0.0
        self._jobs: dict[Hashable, BackgroundCompile] = {}

    def __call__(self, *args: Any) -> Any:
        kind = kind_of(args)
        return self.compiled(*args) if self.is_ready(kind) else self.uncompiled(kind, *args)

    def uncompiled(self, kind: Hashable, *args: Any) -> Any:
        """Runs the function uncompiled on arguments of `kind`, and may begin to compile it for this kind."""
        started = time.perf_counter()
        result = self.function(*args)
        self._seconds += time.perf_counter() - started
        due = self._due() or worth_compiling(self._seconds, FUNCTION_SECONDS)
        if due and kind not in self._jobs and len(self._jobs) < MOST_KINDS and not host_reads.recorded():
            self._begin(kind, args)
        return result

    def now(self, kind: Hashable, args: tuple, book: Callable[[float], None]) -> Any:
        """Returns ``function(*args)``. If no compilation for `kind` has begun, compiles first, and passes the seconds to `book`."""
        if kind not in self._jobs and len(self._jobs) < MOST_KINDS and not host_reads.recorded():
            started = time.perf_counter()
            self._begin(kind, args).wait()
            book(time.perf_counter() - started)
        return self(*args)

    def _begin(self, kind: Hashable, args: tuple) -> BackgroundCompile:
        copies = copied(args)  # the function may write to its arguments
        name = getattr(self.function, "__name__", "a function")
        self._jobs[kind] = BackgroundCompile(name, lambda: self.compiled(*copies))
        return self._jobs[kind]

    def is_ready(self, kind: Hashable) -> bool:
        """Whether the function is compiled for arguments of `kind`."""
        job = self._jobs.get(kind)
        return job is not None and job.poll()

    @property
    def ready(self) -> frozenset[Hashable]:
        """The kinds of arguments that the function is compiled for."""
        return frozenset(kind for kind in self._jobs if self.is_ready(kind))

    def static_parts(self) -> SameObject:
        """Makes :func:`~decoders.engine.model.static_inputs.find_tensors` compare this object by identity instead of searching it."""
        return SameObject(self)


def kind_of(value: Any) -> Hashable:
    """A key for the graph that `value` needs if sizes are dynamic: dtypes, which sizes are 0 or 1, and plain values except numbers."""
    if isinstance(value, Tensor):
        return value.dtype, tuple([min(size, 2) for size in value.shape])
    if isinstance(value, bool | str | SamplingPlan | None):
        return value
    if isinstance(value, list | tuple):
        return tuple([kind_of(item) for item in value])
    if is_dataclass(value):
        return type(value), *[kind_of(getattr(value, part.name)) for part in fields(value)]
    return type(value).__qualname__
