"""What a call did, measured: :class:`Report`, returned as ``out.report``; and :class:`Observer`, told of calls while they run."""

from .figures import GrammarUse, Stage, Stopwatch, Timings
from .report import BUSY, ObservedCall, Observer, Report
from .written import TracedStep, Tree, Written

__all__ = [
    "BUSY",
    "GrammarUse",
    "ObservedCall",
    "Observer",
    "Report",
    "Stage",
    "Stopwatch",
    "Timings",
    "TracedStep",
    "Tree",
    "Written",
]
