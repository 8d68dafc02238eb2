"""What drafts cost and what they are worth: seconds of a step by its nodes, and how often draft tokens are accepted."""

from __future__ import annotations

from .acceptance import CAUTION, AcceptanceRates, Follower, Proposals, row_weights
from .curve import CostCurve, CostPoint, Subject
from .steps import StepCosts, StepLine
from .worth import Looks, affordable, draft_budget, mean_seconds, node_budget, worthwhile

__all__ = [
    "CAUTION", "AcceptanceRates", "CostCurve", "CostPoint", "Follower", "Looks", "Proposals", "StepCosts", "StepLine", "Subject",
    "affordable", "draft_budget", "mean_seconds", "node_budget", "row_weights", "worthwhile",
]  # fmt: skip
