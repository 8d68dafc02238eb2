"""Turns a user's value (a name, ``"a+b"``, a class or an object) into a strategy, verifier, grammar backend or grammar."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from ..common import library
from ..constraints import Backend, CompiledGrammar, Spec, as_spec, spec_of_file, spec_of_library, unknown_grammar
from ..errors import GrammarError, SettingsError, UnknownNameError, UnsupportedError, canonical
from ..settings import Settings, load_settings
from ..strategy import Strategy
from ..verifiers.verifier import Verifier
from .builtin import MERGED
from .kinds import BACKEND, STRATEGY, VERIFIER, check_made, check_methods, is_maker
from .plugins import made_by, registry


def resolve_strategy(
    chosen: Any, call: Mapping[str, Any] | None = None, configured: Mapping[str, Any] | None = None
) -> Strategy:
    """The strategy that `chosen` means: a name, ``"a+b"``, a class or an object.

    call, configured: settings from the call, and from the generation config or ``enable()``; the call's settings win.

    Raises:
        UnknownNameError, SettingsError, PluginError: a name or a setting is unknown or invalid, or the class breaks the contract.
    """
    if isinstance(chosen, Strategy):
        if call:
            raise SettingsError("strategy_config cannot go with a strategy object, which already holds its settings")
        check_methods(type(chosen), Strategy)
        chosen.compose(resolve_strategy, {name: entry.cls for name, entry in registry().strategies().items()})
        return chosen
    if inspect.isclass(chosen) and issubclass(chosen, Strategy):
        STRATEGY.check(chosen)
        check_made(chosen, chosen.__qualname__, chosen.settings_class)
        for given in (call, configured):
            for name, value in (given or {}).items():
                if isinstance(value, Mapping) and name not in chosen.settings_class.model_fields:
                    raise SettingsError(
                        f"strategy_config of {chosen.name!r} must contain the settings themselves, {{'setting': value}}: only "
                        f"strategies merged with '+' have a dict per strategy, such as {name!r} here"
                    )
        return resolve_strategy(chosen(_settings_of(chosen, call, configured)))
    if not isinstance(chosen, str):
        raise SettingsError(f"strategy must be a name, a Strategy class or a Strategy, not {type(chosen).__name__}")
    names = [part.strip() for part in chosen.split("+")]
    if "+" in chosen and not all(names):
        raise SettingsError(
            f"strategy={chosen!r} has a '+' without a strategy on each side: write two names, \"suffix+ngram\""
        )
    classes = [registry().strategy(name) for name in names]
    if len(classes) == 1:
        return resolve_strategy(classes[0], call, configured)
    own = [c.name for c in classes]
    for given in (call, configured):
        unknown = sorted(set(given or {}) - {*own, MERGED.name})
        if unknown:
            raise SettingsError(
                f"strategy_config of {chosen!r} must have strategies as keys: {', '.join([*own, MERGED.name])}; not {unknown[0]!r}"
            )
        for name, value in (given or {}).items():
            if not isinstance(value, Mapping | None):
                raise SettingsError(
                    f"strategy_config of {chosen!r}: {name!r} must be a dict of settings, not {value!r}"
                )
    parts = [c(_settings_of(c, (call or {}).get(c.name), (configured or {}).get(c.name))) for c in classes]
    joint = _settings_of(MERGED, (call or {}).get(MERGED.name), (configured or {}).get(MERGED.name))
    return resolve_strategy(MERGED(parts, cast(Any, joint)))


def with_hints(
    chosen: Any,
    config: Mapping[str, Any] | None,
    hints: Mapping[str, Any],
    where: Callable[[str], str] = lambda hint: "",
) -> Mapping[str, Any] | None:
    """Returns the ``strategy_config`` `config`, plus the drafting arguments `hints` as settings of the strategy `chosen`.

    Args:
        hints: drafting arguments of transformers, by name; :attr:`Strategy.hints` maps them to settings.
        where: takes the name of a drafting argument; returns a sentence about the argument's origin, for the end of the error message.

    Raises:
        UnsupportedError: no chosen strategy has a setting for a hint. SettingsError: a setting is given twice with different values, or
            `chosen` is a strategy object.
        UnknownNameError, PluginError: see :func:`resolve_strategy`.
    """
    if not hints:
        return config
    if not isinstance(chosen, (str, type, Strategy)):
        return config  # resolve_strategy raises the error
    merged = isinstance(chosen, str) and "+" in chosen
    classes: list[Any] = (
        [registry().strategy(n.strip()) for n in chosen.split("+")] if isinstance(chosen, str) else [chosen]
    )
    settings: dict[str, Any] = dict(config or {})
    for hint, value in hints.items():
        takers = [c for c in classes if hint in getattr(c, "hints", {})]
        if not takers:
            able = sorted(name for name, entry in registry().strategies().items() if hint in entry.cls.hints)
            raise UnsupportedError(
                f"{hint}={value!r} does not apply to strategy {strategy_name(chosen)!r}: leave {hint} out, or choose the strategy "
                f"{' or '.join(map(repr, able))}.{where(hint)}"
            )
        if isinstance(chosen, Strategy):
            raise SettingsError(
                f"{hint}={value!r} cannot go with a strategy object, which already holds its settings.{where(hint)}"
            )
        for taker in takers:
            if merged:
                settings[taker.name] = dict(settings.get(taker.name) or {})
            own, setting = settings[taker.name] if merged else settings, taker.hints[hint]
            if own.setdefault(setting, value) != value:
                raise SettingsError(
                    f"{hint}={value!r} and {setting}={own[setting]!r} in strategy_config set the same setting: leave one of them out"
                )
    return settings


def resolve_verifier(chosen: Any, config: Mapping[str, Any] | None = None) -> Verifier:
    """The verifier that `chosen` means: a name, a class or an object. config: its settings.

    Raises:
        UnknownNameError, SettingsError, PluginError: a name or a setting is unknown or invalid, or the class breaks the contract.
    """
    if isinstance(chosen, str):
        chosen = registry().verifier(chosen)
    if inspect.isclass(chosen) and issubclass(chosen, Verifier):
        VERIFIER.check(chosen)
        if config and not chosen.settings_class.model_fields:
            raise SettingsError(f"verifier {chosen.name!r} has no settings: leave verifier_config out")
        return chosen(chosen.settings_class.parse(dict(config))) if config else chosen()
    if config and isinstance(chosen, Verifier):
        raise SettingsError("verifier_config cannot go with a verifier object, which already holds its settings")
    if not isinstance(chosen, Verifier):
        raise SettingsError(f"verifier must be a name, a Verifier class or a Verifier, not {type(chosen).__name__}")
    check_methods(type(chosen), Verifier)
    return chosen


def resolve_backend(chosen: Any) -> Backend:
    """The grammar backend that `chosen` means: a name, a class or an object; None means the name ``auto``.

    Raises:
        UnknownNameError, SettingsError, PluginError: the name is unknown, the value is not a backend, or the class breaks the contract.
    """
    if chosen is None or isinstance(chosen, str):
        chosen = registry().grammar_backend(chosen or "auto")
    if inspect.isclass(chosen) and issubclass(chosen, Backend):
        BACKEND.check(chosen)
        chosen = chosen()
    if not isinstance(chosen, Backend):
        raise SettingsError(f"backend must be a name, a Backend class or a Backend, not {type(chosen).__name__}")
    check_methods(type(chosen), Backend)
    return chosen


def resolve_grammar(given: Any) -> Spec | CompiledGrammar | None:
    """The grammar that `given` means: the name of a grammar (of this package or a plugin), or an object; None means free text.

    Raises:
        UnknownNameError: no grammar has this name. PluginError: several plugins claim the name, or the object's type.
        GrammarError: the object, or the plugin's value for it, is not a grammar.
    """
    value = registry().grammar_of(given)  # also of a plugin's own type of strings
    return _named(value) if isinstance(value, str) else as_spec(value)


def _named(name: str) -> Spec | CompiledGrammar:
    try:
        value = registry().grammar(name)
    except UnknownNameError as error:
        try:
            return spec_of_library(name)  # also finds names with the suffix of the grammar's file
        except UnknownNameError:
            raise unknown_grammar(name, error.choices) from None
    grammar = resolve_grammar(made_by(value, f"grammar {name!r}") if is_maker(value) else value)
    if grammar is None:
        raise GrammarError(
            f"the plugin's function for grammar {name!r} returned None: it must return a value that grammar= takes"
        )
    if isinstance(grammar, Spec) and grammar.label is None:
        grammar = dataclasses.replace(grammar, label=canonical(name))
    return grammar


def grammar_or_file(text: str) -> Spec | CompiledGrammar:
    """The grammar in the file `text` if it exists, else the grammar called `text`.

    Raises:
        GrammarError: `text` looks like a file's name, and the file does not exist. Also all errors of :func:`resolve_grammar`.
    """
    library.check_file(text)
    return spec_of_file(Path(text)) if Path(text).is_file() else _named(text)


def _settings_of(
    strategy: type[Strategy], call: Mapping[str, Any] | None, configured: Mapping[str, Any] | None
) -> Settings:
    sections = (*registry().strategies(), MERGED.name)
    return load_settings(strategy.settings_class, strategy.name, call or {}, configured or {}, sections=sections)


def strategy_name(strategy: Any) -> str:
    """The name of a strategy object or class, or `strategy` itself if it is a name; ``-`` becomes ``_``."""
    return (strategy if isinstance(strategy, str) else strategy.name).replace("-", "_")
