"""Costs and gains of drafting: seconds of a step by its number of nodes, and acceptance rates of draft tokens."""

from __future__ import annotations

from .acceptance import CAUTION, AcceptanceRates, Follower, Proposals, row_weights
from .curve import CostCurve, CostPoint, Subject
from .steps import StepCosts, StepLine
from .worth import Trials, affordable, draft_budget, mean_seconds, node_budget, worthwhile

__all__ = [
    "CAUTION", "AcceptanceRates", "CostCurve", "CostPoint", "Follower", "Trials", "Proposals", "StepCosts", "StepLine", "Subject",
    "affordable", "draft_budget", "mean_seconds", "node_budget", "row_weights", "worthwhile",
]  # fmt: skip
