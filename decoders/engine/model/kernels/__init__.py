"""Kernels of this package: attention and products of few rows, in Triton for CUDA, in C++ for CPUs."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

#: Greatest number of matrices of a product. On CUDA each has whole largest blocks of outputs, so that a block belongs to one matrix.
MOST_MATRICES, LARGEST_BLOCK = 3, 64


class Norm(NamedTuple):
    """A root-mean-square norm: its weight ``[H]`` and :class:`~decoders.engine.model.weights.same_bits.Formula`. No norm if weight is
    None."""

    weight: Tensor | None = None
    epsilon: float = 0.0
    one_added: bool = False
    rounded_first: bool = False


@functools.cache
def interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels on any device, for tests without a GPU."""
    return os.environ.get("TRITON_INTERPRET") == "1" and _installed()


@functools.cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def runs_kernels(device: torch.device) -> bool:
    """Whether Triton kernels run on `device`: on CUDA if Triton is installed (CUDA builds of torch on Linux include it)."""
    return _installed() and (device.type == "cuda" or interpreted())


#: Name of an operator → function that launches its kernels.
LAUNCHERS: dict[str, Callable[..., Any]] = {}
_library = torch.library.Library("decoders", "FRAGMENT")


def operator(schema: str, function: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """Registers `function`, which launches CUDA kernels, as an operator of torch.

    The operator is opaque to compilers: they call it, and CUDA graphs record its kernels. Otherwise they would compile a graph for each
    size with another launch.

    Args:
        schema: its name in ``torch.ops.decoders``, arguments and result. Arguments that it writes come last.
        fake: returns a result without values.
    """
    name = schema.partition("(")[0]
    LAUNCHERS[name] = function
    _library.define(schema)
    _library.impl(name, _on_own_device(function), "CUDA")
    if interpreted():
        computes = not schema.endswith("-> ()")  # what has no result copies numbers of any type
        _library.impl(name, _without_bfloat16(function, schema.count("!")) if computes else function, "CPU")
    torch.library.register_fake(f"decoders::{name}", fake, lib=_library)
    return cast(Callable[..., Any], getattr(torch.ops.decoders, name).default)


def _on_own_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with its first argument's device as the current device, because Triton launches there."""

    def guarded(first: Tensor, *more: Any) -> Any:
        with torch.cuda.device(first.device):
            return function(first, *more)

    return guarded


def _without_bfloat16(function: Callable[..., Any], written: int) -> Callable[..., Any]:
    """`function` in float32 instead of bfloat16, which Triton's interpreter multiplies as integers.

    written: number of last arguments that `function` writes.
    """

    def widened(*arguments: Any) -> Any:
        tensors = [
            t for value in arguments for t in (value if isinstance(value, list) else [value]) if isinstance(t, Tensor)
        ]
        narrow = any(tensor.dtype == torch.bfloat16 for tensor in tensors)
        given = [wide(value) for value in arguments]
        result = function(*given)
        for own, copy in zip(arguments[len(arguments) - written :], given[len(given) - written :], strict=True):
            if own is not copy:
                own.copy_(copy)
        if not narrow:
            return result
        return tuple(part.bfloat16() for part in result) if isinstance(result, tuple) else result.bfloat16()

    def wide(value: Any) -> Any:
        if isinstance(value, list):
            return [wide(each) for each in value]
        return value.float() if isinstance(value, Tensor) and value.dtype == torch.bfloat16 else value

    return widened
