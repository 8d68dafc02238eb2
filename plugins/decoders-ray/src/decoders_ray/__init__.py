"""Replicas of a model on a Ray cluster, each decoding with the scheduler of hf-decoders.

:func:`application` is served by Ray Serve, :func:`complete` runs over a dataset of prompts with Ray Data, :func:`simulate` says
what many replicas would do and cost.
"""

from .resume import Delivered, ResumeError, resumed
from .routing import PrefixTable
from .simulation import Load, Outcome, Replica, replicas_for, simulate

__all__ = [
    "Delivered", "Load", "Outcome", "PrefixTable", "Replica", "ResumeError", "application", "complete", "replicas_for", "resumed",
    "simulate",
]  # fmt: skip


def __getattr__(name: str) -> object:
    # Ray is imported by what needs it: the simulation runs without.
    if name == "application":
        from .serving import application

        return application
    if name == "complete":
        from .batches import complete

        return complete
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
