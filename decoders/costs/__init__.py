"""What decoding costs on a machine: seconds of a verification step by its nodes, measured, kept on disk, refined by calls."""

from __future__ import annotations

from .curve import CostCurve, CostPoint, Subject
from .steps import StepCosts

__all__ = ["CostCurve", "CostPoint", "StepCosts", "Subject"]
