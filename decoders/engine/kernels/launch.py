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


def traceable(kernel: Any) -> Callable[..., Any]:
    """`kernel`, a ``triton.jit`` function, as an operator of ``torch.library.triton_op`` launches it: ``traceable(kernel)[grid](…)``.

    The compiler then sees the launch itself, and compiled steps and CUDA graphs hold it. The interpreter's functions cannot be traced.
    """
    return kernel if interpreted() else torch.library.wrap_triton(kernel)
