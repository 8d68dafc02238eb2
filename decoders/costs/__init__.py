"""What verifying costs and what it brings: seconds of a step by its nodes, measured, and how often draft tokens are right."""

from __future__ import annotations

from .acceptance import CAUTION, AcceptanceRates, Follower, Proposals, row_weights
from .curve import CostCurve, CostPoint, Subject
from .looks import Looks, affordable, mean_seconds
from .steps import StepCosts

__all__ = [
    "CAUTION", "AcceptanceRates", "CostCurve", "CostPoint", "Follower", "Looks", "Proposals", "StepCosts", "Subject", "affordable",
    "mean_seconds", "row_weights",
]  # fmt: skip
