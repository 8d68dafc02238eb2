"""Operators for CUDA on the CPU: Triton's interpreter runs their kernels there."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

#: The module and the function that launch each operator's kernels, and how many of its last arguments the operator writes to.
LAUNCHERS = {
    **{
        name: (f"products_triton.{name}", 0)
        for name in ("few_rows_linear", "gated_linear", "linear_to_residual", "linear_rotated")
    },
    "linear_to_cache": ("products_triton.linear_to_cache", 2),
    "rms_norm": ("epilogues_triton.normalized", 0),
    "tree_attention": ("attention_cuda.launch", 0),
    "move_slots": ("moves_triton.move", None),
}
_library = torch.library.Library("decoders", "FRAGMENT")


def register() -> None:
    for name, (launcher, written) in LAUNCHERS.items():
        function = launching(*launcher.split("."))
        # An operator without a result only copies numbers, in any dtype.
        _library.impl(name, function if written is None else without_bfloat16(function, written), "CPU")


def launching(module: str, function: str) -> Callable[..., Any]:
    return lambda *given: getattr(import_module(f"decoders.engine.model.kernels.{module}"), function)(*given)


def without_bfloat16(function: Callable[..., Any], written: int) -> Callable[..., Any]:
    """A wrapper that turns bfloat16 arguments into float32, because Triton's interpreter multiplies bfloat16 numbers as integers."""

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
