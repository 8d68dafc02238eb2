"""The built-in plugin: provides this package's strategies, verifiers and grammars by the hooks that all plugins use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from .. import constraints, strategies, verifiers
from ..common import library
from ..constraints import Backend, spec_of_library
from ..hookspecs import hookimpl
from ..strategy import Strategy
from ..verifiers.verifier import Verifier

#: Reserved names of commands; the command line defines these commands without loading plugins.
COMMANDS = (
    "demo", "generate", "warmup", "calibrate", "advise", "strategies", "verifiers", "grammar-backends", "plugins", "grammars",
    "config", "serve",
    "new-plugin", "doctor", "bench", "bench load", "train", "train ngram", "train medusa", "train eagle3",
    "train dflash", "train draft",
)  # fmt: skip


@hookimpl
def decoders_strategies() -> tuple[type[Strategy], ...]:
    return strategies.BUILT_IN


@hookimpl
def decoders_verifiers() -> tuple[type[Verifier], ...]:
    return verifiers.BUILT_IN


@hookimpl
def decoders_grammar_backends() -> tuple[type[Backend], ...]:
    return constraints.BUILT_IN


@hookimpl
def decoders_grammars() -> Mapping[str, Callable[[], Any]]:
    return {name: partial(spec_of_library, name) for name in library.plain_names()}


@hookimpl
def decoders_commands() -> Mapping[str, Callable[[], None]]:
    return dict.fromkeys(COMMANDS, _reserved)


def _reserved() -> None:
    """Reserves a name for a command of this package."""
