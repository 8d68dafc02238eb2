"""Strategies, verifiers and grammar backends from what a user writes: a name, ``"a+b"``, a class or an object."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, cast

from .constraints.base import Backend
from .errors import SettingsError
from .plugins import registry
from .settings import Settings, load_settings
from .strategies.merged import Merged, MergedSettings
from .strategy import Strategy
from .verifier import Verifier


def resolve_strategy(
    chosen: Any, call: Mapping[str, Any] | None = None, configured: Mapping[str, Any] | None = None
) -> Strategy:
    """A strategy object from what the user wrote: a name, ``"a+b"``, a class, or an object.

    Raises:
        UnknownNameError, SettingsError, PluginError.
    """
    if isinstance(chosen, Strategy):
        if call:
            raise SettingsError("strategy_config given beside a strategy object, which already holds its settings")
        return chosen
    if inspect.isclass(chosen) and issubclass(chosen, Strategy):
        return chosen(_settings_of(chosen, call, configured))
    if not isinstance(chosen, str):
        raise SettingsError(f"strategy must be a name, a Strategy class or a Strategy, not {type(chosen).__name__}")
    names = [part.strip() for part in chosen.split("+")]
    classes = [registry().strategy(name) for name in names]
    if len(classes) == 1:
        return resolve_strategy(classes[0], call, configured)
    own = [c.name for c in classes]
    for given in (call, configured):
        unknown = sorted(set(given or {}) - {*own, Merged.name})
        if unknown:
            raise SettingsError(
                f"strategy_config of {chosen!r} is keyed by strategy: {', '.join(own)}; not {unknown[0]!r}"
            )
    parts = [c(_settings_of(c, (call or {}).get(c.name), (configured or {}).get(c.name))) for c in classes]
    return Merged(
        parts,
        cast(MergedSettings, _settings_of(Merged, (call or {}).get(Merged.name), (configured or {}).get(Merged.name))),
    )


def resolve_verifier(chosen: Any) -> Verifier:
    """A verifier object from what the user wrote: a name, a class or an object.

    Raises:
        UnknownNameError, SettingsError, PluginError.
    """
    if isinstance(chosen, str):
        chosen = registry().verifier(chosen)
    if inspect.isclass(chosen) and issubclass(chosen, Verifier):
        chosen = chosen()
    if not isinstance(chosen, Verifier):
        raise SettingsError(f"verifier must be a name, a Verifier class or a Verifier, not {type(chosen).__name__}")
    return chosen


def resolve_backend(chosen: Any) -> Backend:
    """A backend of grammars from what the user wrote: a name, a class or an object; None is ``auto``.

    Raises:
        UnknownNameError, SettingsError, PluginError.
    """
    if chosen is None or isinstance(chosen, str):
        chosen = registry().grammar_backend(chosen or "auto")
    if inspect.isclass(chosen) and issubclass(chosen, Backend):
        chosen = chosen()
    if not isinstance(chosen, Backend):
        raise SettingsError(f"backend must be a name, a Backend class or a Backend, not {type(chosen).__name__}")
    return chosen


def _settings_of(
    strategy: type[Strategy], call: Mapping[str, Any] | None, configured: Mapping[str, Any] | None
) -> Settings:
    """A strategy's settings in force."""
    sections = (*registry().strategies(), Merged.name)
    return load_settings(strategy.settings_class, strategy.name, call or {}, configured or {}, sections=sections)


def strategy_name(strategy: Any) -> str:
    """The name that a strategy, class or spelling of a name stands for."""
    return (strategy if isinstance(strategy, str) else strategy.name).replace("-", "_")
