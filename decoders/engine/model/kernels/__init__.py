"""Kernels of this package, in Triton for CUDA and in C++ for CPUs: attention, and products of few rows."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

#: A joint product multiplies one input by up to MOST_MATRICES matrices. On CUDA, each matrix has a multiple of LARGEST_BLOCK outputs,
#: so that a block of outputs belongs to one matrix.
MOST_MATRICES, LARGEST_BLOCK = 3, 64


class Norm(NamedTuple):
    """A root-mean-square norm: weight ``[H]`` (None: no norm), and its :class:`~decoders.engine.model.weights.layers.Formula`."""

    weight: Tensor | None = None
    epsilon: float = 0.0
    one_added: bool = False
    rounded_first: bool = False


class Operands(NamedTuple):
    """The matrices of a product, or of whole decoder layers.

    Attributes:
        matrices: ``[O, K]`` each, or their quantized levels. A product has up to :data:`MOST_MATRICES` matrices with the same input.
        scales: the scales of quantized matrices; empty for other matrices.
        biases: a bias ``[O]`` for each matrix; or empty.
        digits: how many integers represent an activation in a quantized product (:mod:`~decoders.engine.model.weights.quantized`).
    """

    matrices: list[Tensor]
    scales: list[Tensor]
    biases: list[Tensor]
    digits: int = 1


@functools.cache
def interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels on any device, for tests without a GPU."""
    return os.environ.get("TRITON_INTERPRET") == "1" and _installed()


@functools.cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def runs_kernels(device: torch.device) -> bool:
    """Whether Triton kernels run on `device`: Triton is installed, and `device` is CUDA or Triton's interpreter is on."""
    return _installed() and (device.type == "cuda" or interpreted())


#: Maps the name of an operator to the function that launches its kernels.
LAUNCHERS: dict[str, Callable[..., Any]] = {}
_library = torch.library.Library("decoders", "FRAGMENT")


def operator(schema: str, launcher: str, fake: Callable[..., Any]) -> Callable[..., Any]:
    """Registers an operator of torch that launches CUDA kernels, and returns it.

    The operator is opaque to compilers: compiled code calls it, and CUDA graphs record its kernels. If compilers saw the launches, they
    would compile another graph for every size that changes a launch.

    Args:
        schema: the operator's name in ``torch.ops.decoders``, its arguments (written arguments come last) and its result.
        launcher: the module and the function that launch the kernels. The first call imports the module, which needs Triton.
        fake: returns empty tensors of the result's sizes, for tracing.
    """
    name, (module, launching) = schema.partition("(")[0], launcher.split(".")

    def function(*given: Any) -> Any:
        return getattr(importlib.import_module(f"{__name__}.{module}"), launching)(*given)

    LAUNCHERS[name] = function
    _library.define(schema)
    _library.impl(name, _on_own_device(function), "CUDA")
    if interpreted():
        computes = not schema.endswith("-> ()")  # operators without a result only copy numbers, in any dtype
        _library.impl(name, _without_bfloat16(function, schema.count("!")) if computes else function, "CPU")
    torch.library.register_fake(f"decoders::{name}", fake, lib=_library)
    return cast(Callable[..., Any], getattr(torch.ops.decoders, name).default)


def _on_own_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """A wrapper that makes the first argument's device the current device, because Triton launches kernels on the current device."""

    def guarded(first: Tensor, *more: Any) -> Any:
        with torch.cuda.device(first.device):
            return function(first, *more)

    return guarded


def _without_bfloat16(function: Callable[..., Any], written: int) -> Callable[..., Any]:
    """A wrapper that turns bfloat16 arguments into float32, because Triton's interpreter multiplies bfloat16 numbers as integers.

    written: how many of the last arguments `function` writes to.
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
