"""The figures of a call (:class:`Report`, returned as ``out.report``), and the base class of objects that observe calls."""

from .figures import GrammarUse, Stage, Timings, mean_length
from .report import BUSY, ObservedCall, Observer, Report
from .written import TracedStep, Tree, Written

__all__ = [
    "BUSY",
    "GrammarUse",
    "ObservedCall",
    "Observer",
    "Report",
    "Stage",
    "Timings",
    "TracedStep",
    "Tree",
    "Written",
    "mean_length",
]
