"""A function of tensors in two tiers, as the forward pass is (:mod:`.tiers`): a strategy's, or the draw of a sampling plan."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from ....common import devices
from ....sampling.processors import SamplingPlan
from ..cuda_graphs.static_inputs import SameObject, copied
from .background import BackgroundCompile, worth_compiling
from .compiler import CompiledFunction

#: Seconds that compiling one is expected to take on two cores.
FUNCTION_SECONDS = 5.0
#: Kinds of arguments that one function is compiled for: Dynamo's own limit.
MOST_KINDS = 8


class TieredFunction:
    """Runs `function` as it is, and compiles it in the background once it has taken as long as that would.

    Each kind of arguments (:func:`kind_of`) is compiled by itself, so that nobody waits where one row becomes several.

    Args:
        due: whether to compile in any case, since what the function is a part of is compiled.
    """

    def __init__(self, function: Callable, compiled: CompiledFunction, due: Callable[[], bool] = lambda: False) -> None:
        self.function, self.compiled, self._due = function, compiled, due
        self._seconds = 0.0
        self._jobs: dict[Hashable, BackgroundCompile] = {}

    def __call__(self, *args: Any) -> Any:
        kind = kind_of(args)
        return self.compiled(*args) if self.is_ready(kind) else self.uncompiled(kind, *args)

    def uncompiled(self, kind: Hashable, *args: Any) -> Any:
        """Runs the function as it is, on arguments of a `kind`; begins to compile for them when that is due."""
        started = time.perf_counter()
        result = self.function(*args)
        self._seconds += time.perf_counter() - started
        due = self._due() or worth_compiling(self._seconds, FUNCTION_SECONDS)
        if due and kind not in self._jobs and len(self._jobs) < MOST_KINDS and not devices.recorded():
            self._begin(kind, args)
        return result

    def now(self, kind: Hashable, args: tuple, book: Callable[[float], None]) -> Any:
        """Compiles for arguments of a `kind` before it runs, and books the seconds."""
        if kind not in self._jobs and len(self._jobs) < MOST_KINDS and not devices.recorded():
            started = time.perf_counter()
            self._begin(kind, args).wait()
            book(time.perf_counter() - started)
        return self(*args)

    def _begin(self, kind: Hashable, args: tuple) -> BackgroundCompile:
        copies = copied(args)  # what the function writes to is the call's
        name = getattr(self.function, "__name__", "a function")
        self._jobs[kind] = BackgroundCompile(name, lambda: self.compiled(*copies))
        return self._jobs[kind]

    def is_ready(self, kind: Hashable) -> bool:
        """Whether it has been compiled for arguments of a `kind`."""
        job = self._jobs.get(kind)
        return job is not None and job.poll()

    @property
    def ready(self) -> frozenset[Hashable]:
        """The kinds of arguments that it has been compiled for."""
        return frozenset(kind for kind in self._jobs if self.is_ready(kind))

    def static_parts(self) -> SameObject:
        """Calls share it: see :func:`~decoders.engine.model.cuda_graphs.static_inputs.find_tensors`."""
        return SameObject(self)


def kind_of(value: Any) -> Hashable:
    """What graphs with dynamic sizes are told apart by: which sizes are one, types of tensors, and plain values but numbers."""
    if isinstance(value, Tensor):
        return value.dtype, tuple([size == 1 for size in value.shape])
    if isinstance(value, bool | str | SamplingPlan | None):
        return value
    if isinstance(value, list | tuple):
        return tuple([kind_of(item) for item in value])
    if is_dataclass(value):
        return type(value), *[kind_of(getattr(value, part.name)) for part in fields(value)]
    return type(value).__qualname__
