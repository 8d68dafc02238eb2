"""Warnings, each once in a process, where this machine or its load makes decoding slow or comparisons wrong."""

from __future__ import annotations

import warnings

import torch

from ...report import Report
from ..model.target import Target
from ..model.torch_compat import packed_type

_said: set[str] = set()


def warn_of_format(target: Target) -> None:
    """Warns of weights of 16 bits on a processor without instructions for them."""
    if target.device.type != "cpu" or target.precision.weights is not None or target.dtype.itemsize != 2:
        return
    if packed_type(target.dtype) == torch.float32:
        name = str(target.dtype).removeprefix("torch.")
        _once(
            "format",
            f"this processor has no instructions for {name}: the model decodes in float32, with a copy of its weights that is twice as "
            "large. Load it with dtype=torch.float32, or take decoders_config={'weights': 'int8'}, which is smaller and faster",
        )


def warn_of_load(report: Report) -> None:
    """Warns of other processes that take the cores."""
    if report.busy:
        consequence = "That slows transformers more than this loop, so compare no speeds now: close other programs"
        _once("load", f"{report.busy_line}. {consequence}")


def _once(kind: str, message: str) -> None:
    if kind not in _said:
        _said.add(kind)
        warnings.warn(f"decoders: {message}", stacklevel=3)
