"""Our kernels: attention and products of few rows, for CUDA in Triton, for CPUs in C++."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

#: Most matrices of one product. On CUDA the outputs of each are a multiple of the largest block, so that a block is of one matrix.
MOST_MATRICES, LARGEST_BLOCK = 3, 64


class Norm(NamedTuple):
    """A root-mean-square norm: its weight ``[H]`` and :class:`~decoders.engine.model.weights.same_bits.Formula`; weight None: none."""

    weight: Tensor | None = None
    epsilon: float = 0.0
    one_added: bool = False
    rounded_first: bool = False


@functools.cache
def interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels, on tensors of any device. Tests without a GPU use it."""
    return os.environ.get("TRITON_INTERPRET") == "1" and _installed()


@functools.cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def runs_kernels(device: torch.device) -> bool:
    """Whether kernels run on `device`: on CUDA if Triton is installed, which is part of CUDA builds of torch on Linux."""
    return _installed() and (device.type == "cuda" or interpreted())


#: The functions that launch kernels, by the names of their operators.
LAUNCHERS: dict[str, Callable[..., Any]] = {}
_library = torch.library.Library("decoders", "FRAGMENT")


def operator(schema: str, function: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which launches kernels for CUDA, as an operator of torch.

    The operator is opaque to compilers: they call it, and CUDA graphs record its kernels. Otherwise they would make a graph for each
    size for which a kernel is launched differently.

    Args:
        schema: its name in ``torch.ops.decoders``, arguments and result. Arguments that it writes to are the last ones.
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
    """`function` with the device of its first argument as the current one, on which Triton launches."""

    def guarded(first: Tensor, *more: Any) -> Any:
        with torch.cuda.device(first.device):
            return function(first, *more)

    return guarded


def _without_bfloat16(function: Callable[..., Any], written: int) -> Callable[..., Any]:
    """`function` with float32 instead of bfloat16, which Triton's interpreter multiplies as if it were integers.

    Args:
        written: how many of the last arguments are written to.
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
