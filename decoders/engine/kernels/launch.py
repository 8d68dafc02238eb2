"""Whether Triton kernels run here, and how an operator launches one."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import torch


@functools.cache
def interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels, on tensors of any device: how they are tested without a GPU."""
    return os.environ.get("TRITON_INTERPRET") == "1" and _installed()


@functools.cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def runs_kernels(device: torch.device) -> bool:
    """Whether kernels run on `device`: on CUDA where Triton is installed, which builds of torch for CUDA bring along on Linux."""
    return _installed() and (device.type == "cuda" or interpreted())


def traceable(kernel: Any) -> Any:
    """`kernel`, a ``triton.jit`` function, as an operator of ``torch.library.triton_op`` launches it: ``traceable(kernel)[grid](…)``.

    The compiler then sees the launch itself, and compiled steps and CUDA graphs hold it. The interpreter's functions cannot be traced.
    """
    return kernel if interpreted() else torch.library.wrap_triton(kernel)


def operator(name: str, function: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which launches kernels by :func:`traceable` and writes to none of its arguments, as an operator of torch.

    Args:
        fake: what it gives, without values: for compilers, which do not see into it where kernels are interpreted.
    """
    if not interpreted():
        return torch.library.triton_op(name, function, mutates_args=())
    schema = torch.library.infer_schema(function, mutates_args=())
    opaque = torch.library.custom_op(name, _without_bfloat16(function), mutates_args=(), schema=schema)
    opaque.register_fake(fake)
    return opaque


def _without_bfloat16(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with float32 in the place of bfloat16: the interpreter multiplies it as if it were integers."""

    def widened(*arguments: Any) -> Any:
        narrow = [isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16 for value in arguments]
        result = function(*(value.float() if n else value for value, n in zip(arguments, narrow, strict=True)))
        return result.to(torch.bfloat16) if any(narrow) else result

    return widened
