"""The built-in plugin: provides this package's strategies, verifiers, backends and grammars by the hooks that all plugins use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from .. import constraints, strategies, verifiers
from ..common import library
from ..constraints import Backend, spec_of_library
from ..hookspecs import hookimpl
from ..strategies import merged
from ..strategy import Strategy
from ..verifiers.verifier import Verifier

#: The strategy for a combined name such as ``"a+b"``.
MERGED = merged.Merged


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
def decoders_grammar_types() -> Mapping[str, Callable[[Any], Any]]:
    return constraints.TYPES
