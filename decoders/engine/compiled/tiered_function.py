"""A tensor function of a strategy in two tiers, as the forward pass is (:mod:`.tiers`)."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

from torch import Tensor

from .background import BackgroundCompile, worth_compiling
from .compiler import CompiledFunction

#: Seconds that compiling one is expected to take on two cores.
FUNCTION_SECONDS = 5.0


class TieredFunction:
    """A strategy's tensor function: run as it is, and compiled in the background once it has taken as long as that would."""

    def __init__(self, function: Callable, compiled: CompiledFunction) -> None:
        self.function, self.compiled = function, compiled
        self._seconds = 0.0
        self._job: BackgroundCompile | None = None

    def __call__(self, *args: Any) -> Any:
        if self._job is not None:
            return (self.compiled if self._job.poll() else self.function)(*args)
        started = time.perf_counter()
        result = self.function(*args)
        self._seconds += time.perf_counter() - started
        if worth_compiling(self._seconds, FUNCTION_SECONDS):
            copies = copied(args)  # what the function writes to is the call's
            self._job = BackgroundCompile(
                getattr(self.function, "__name__", "a function"), lambda: self.compiled(*copies)
            )
        return result


def copied(value: Any) -> Any:
    """`value` with a copy of every tensor in it."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return type(value)(copied(item) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: copied(getattr(value, f.name)) for f in fields(value) if f.init})
    return value
