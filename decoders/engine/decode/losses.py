"""Warnings about conditions on this machine that make decoding slow or comparisons of speed wrong, each given once per process."""

from __future__ import annotations

import warnings

from ...report import Report
from ..model.kernels import cpu
from ..model.target import Target

_said: set[str] = set()


def warn_of_format(target: Target) -> None:
    """Warns of 16-bit weights on a CPU for which this package has no kernels: torch is slow at products of 16-bit weights."""
    if target.device.type != "cpu" or target.precision.weights is not None or target.dtype.itemsize != 2:
        return
    if (choice := cpu.chosen()).kernels is None:
        name = str(target.dtype).removeprefix("torch.")
        _once(
            "format",
            f"there are no kernels for this CPU, so weights in {name} decode slowly; float32 is faster ({choice})",
        )


def warn_of_load(report: Report) -> None:
    """Warns if the steps in `report` often waited for cores that other processes used."""
    if report.busy:
        consequence = "That slows transformers more than this loop, so compare no speeds now: close other programs"
        _once("load", f"{report.busy_line}. {consequence}")


def _once(kind: str, message: str) -> None:
    if kind not in _said:
        _said.add(kind)
        warnings.warn(f"decoders: {message}", stacklevel=3)
