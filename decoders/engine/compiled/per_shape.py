"""A function compiled once for each shape, where sizes are static: on CUDA."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Hashable
from typing import Any

import torch

from ..torch_compat import COMPILER_ERRORS, compiled_whole
from .compiler import private

#: Shapes that one function is compiled for; buckets keep well below it.
MOST_SHAPES = 512


def compile_static(function: Callable) -> Callable:
    """`function` as one graph for the sizes of its first call. Guards on modules are dropped: the engine compares the weights."""
    return compiled_whole(function, dynamic=False, options={})


class PerShape:
    """`function`, compiled for each key that it is called with.

    Every key has a code object of its own: Dynamo counts graphs per code object and raises from the ninth on, and looks
    through all of them in every call. Where compiling fails, a warning says why, once, and `fallback` runs for that key.

    Args:
        function: what is compiled.
        compile: makes a compiled function of a plain one.
        fallback: does the same uncompiled; `function` itself by default.
        most: keys beyond so many are not compiled.

    Attributes:
        on_compile: told the seconds of every first call of a key.
        runs: calls that ran compiled.
    """

    def __init__(
        self, function: Callable, compile: Callable[[Callable], Callable] = compile_static,
        fallback: Callable | None = None, most: int = MOST_SHAPES,
    ) -> None:  # fmt: skip
        self.function, self.compile, self.fallback, self.most = function, compile, fallback or function, most
        self.on_compile: Callable[[float], None] = lambda seconds: None
        self._compiled: dict[Hashable, Callable | None] = {}
        self._warned = False
        self.runs = 0

    def __len__(self) -> int:
        """Keys seen so far, those that could not be compiled included."""
        return len(self._compiled)

    def __call__(self, key: Hashable, *args: Any) -> Any:
        """Runs the function of `key`, which must tell apart everything in `args` that the compiled code depends on."""
        if key not in self._compiled:
            if len(self._compiled) >= self.most:
                self._warn(f"it has been called with {self.most} different shapes")
                return self.fallback(*args)
            return self._first(key, args)
        compiled = self._compiled[key]
        if compiled is None:
            return self.fallback(*args)
        try:
            result = compiled(*args)
            self.runs += 1
            return result
        except COMPILER_ERRORS as error:  # raised before anything has run
            self._compiled[key] = None
            self._warn(error)
            return self.fallback(*args)

    def _first(self, key: Hashable, args: tuple) -> Any:
        started = time.perf_counter()
        try:
            compiled = self.compile(private(self.function))
            result = compiled(*args)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # lowering, Triton and the C++ compiler raise whatever they like
            self._compiled[key] = None
            self._warn(error)
            return self.fallback(*args)
        self._compiled[key] = compiled
        self.runs += 1
        self.on_compile(time.perf_counter() - started)
        return result

    def _warn(self, reason: object) -> None:
        if not self._warned:
            name = getattr(self.function, "__name__", repr(self.function))
            what = (
                next(iter(str(reason).splitlines()), "") or type(reason).__name__
            )  # inductor appends all of its input
            warnings.warn(f"{name} could not be compiled, running it uncompiled instead: {what}", stacklevel=4)
            self._warned = True
