"""Replicas of a model on a Ray cluster, each decoding with the scheduler of hf-decoders.

:func:`application` is an application for Ray Serve, :func:`complete` completes a dataset of prompts with Ray Data, and
:func:`simulate` estimates the speed and cost of many replicas.
"""

from .resume import Delivered, ResumeError, resumed
from .routing import PrefixTable
from .simulation import Load, Outcome, Replica, replicas_for, simulate

__all__ = [
    "Delivered", "Load", "Outcome", "PrefixTable", "Replica", "ResumeError", "application", "complete", "replicas_for", "resumed",
    "simulate",
]  # fmt: skip


def __getattr__(name: str) -> object:
    # Ray is imported only when needed: the simulation runs without it.
    if name == "application":
        from .serving import application

        return application
    if name == "complete":
        from .batches import complete

        return complete
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
