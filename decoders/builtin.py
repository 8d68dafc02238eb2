"""The plugin that comes with this package: its strategies and verifiers, through the same hooks as anybody else's."""

from __future__ import annotations

from . import strategies, verifiers
from .hookspecs import hookimpl
from .strategy import Strategy
from .verifier import Verifier


@hookimpl
def decoders_strategies() -> tuple[type[Strategy], ...]:
    return strategies.BUILT_IN


@hookimpl
def decoders_verifiers() -> tuple[type[Verifier], ...]:
    return verifiers.BUILT_IN
