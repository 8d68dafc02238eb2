"""Reads the options of a call of ``generate`` once: from its arguments, then generation configs, then settings."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from ..errors import SettingsError, UnsupportedError
from ..registry.plugins import registry
from ..registry.resolve import resolve_strategy, resolve_verifier, strategy_name, with_hints
from ..settings import RuntimeSettings, load_settings
from ..strategy import HINTS, Strategy
from ..verifiers.verifier import Verifier
from .arguments import OWN, REFUSED, TRANSLATED, first_of, hints_of, loop_options, of_config, said_in, shown
from .attached import is_peft

#: Keywords that a generation config may have, and their JSON types.
_CONFIGURABLE: dict[str, tuple[type, ...]] = {
    "strategy": (str,),
    "strategy_config": (Mapping,),
    "grammar": (str, Mapping),
    "thinking": (int, Mapping),
}


@dataclass(frozen=True)
class Defaults:
    """Defaults of calls, from :func:`decoders.enable`.

    Attributes:
        strategy: as in ``generate``; None: transformers decodes calls that name no strategy.
        strategy_config: settings of the strategy.
        runtime: settings of the loop.
    """

    strategy: Any = None
    strategy_config: Mapping[str, Any] | None = None
    runtime: Mapping[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        """Raises the errors that a call with these defaults would raise."""
        _check_mapping("strategy_config", self.strategy_config)
        load_settings(RuntimeSettings, None, {}, {}, enabled=self.runtime, sections=registry().strategies())
        if self.strategy is not None:
            resolve_strategy(self.strategy, self.strategy_config)
        elif self.strategy_config:
            raise SettingsError("strategy_config needs a strategy: give enable() strategy=… too")

    def config_for(self, strategy: Any, configured: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        """The default settings of `strategy`, overridden by the settings in a generation config (`configured`); None: no settings."""
        chosen_here = isinstance(self.strategy, (str, type)) and strategy_name(self.strategy) == strategy_name(strategy)
        if not chosen_here or not self.strategy_config or isinstance(strategy, Strategy):
            return configured
        settings = dict(self.strategy_config)
        for name, value in (configured or {}).items():
            both = isinstance(value, Mapping) and isinstance(settings.get(name), Mapping)
            settings[name] = {**settings[name], **value} if both else value
        return settings


NO_DEFAULTS = Defaults()


@dataclass(frozen=True)
class Options:
    """The options of one call.

    Attributes:
        strategy: the strategy, which proposes draft tokens.
        verifier: the verifier, which decides which draft tokens are accepted.
        runtime: settings of the loop.
        grammar: the value of ``grammar=``, as given.
        thinking: the value of ``thinking=``, as given.
        seed: the value of ``seed=``, as given.
        generator: the value of ``generator=``, as given.
        configs: generation configs; the first config that sets a value decides.
        arguments: all other arguments, for transformers.
    """

    strategy: Strategy
    verifier: Verifier
    runtime: RuntimeSettings
    grammar: Any
    thinking: Any
    seed: Any
    generator: torch.Generator | None
    configs: list[GenerationConfig]
    arguments: dict[str, Any]

    @staticmethod
    def read(
        arguments: Mapping[str, Any], config: GenerationConfig | None, defaults: Defaults = NO_DEFAULTS
    ) -> Options | None:
        """The options of a call; None for a call without a strategy, which transformers' ``generate`` decodes.

        Args:
            arguments: arguments of ``generate``.
            config: the model's generation config.
            defaults: the options that apply if neither `arguments` nor `config` set them.

        Raises:
            SettingsError, UnsupportedError: an option is wrong. UnknownNameError, PluginError: a name is unknown, or its plugin failed.
        """
        own = {name: arguments.get(name) for name in OWN}
        others = {name: value for name, value in arguments.items() if name not in OWN}
        for name in ("strategy_config", "decoders_config", "verifier_config"):
            _check_mapping(name, own[name])
        given = others.get("generation_config")
        if not isinstance(given, (GenerationConfig, type(None))):
            raise SettingsError(f"generation_config must be a GenerationConfig, not {shown(given)}")
        configs = [c for c in (given, config) if c is not None]
        configured = _configured(configs)
        in_configs = {name: said_in(configs, name) for name in (*HINTS, *TRANSLATED)}
        runtime = load_settings(
            RuntimeSettings,
            None,
            loop_options(others)
            | dict(own["decoders_config"] or {})
            | ({"strategy": own["strategy"]} if isinstance(own["strategy"], str) else {}),
            loop_options(in_configs) | ({"strategy": configured["strategy"]} if configured["strategy"] else {}),
            enabled=defaults.runtime,
            sections=registry().strategies(),
        )
        given_strategies = (own["strategy"], configured["strategy"], defaults.strategy, runtime.strategy)
        chosen = next((strategy for strategy in given_strategies if strategy is not None), None)
        if chosen is None:
            misplaced = sorted(
                {name for said in (configured, own) for name, value in said.items() if value is not None}
            )
            if misplaced:
                raise SettingsError(f"{', '.join(misplaced)} needs a strategy: pass strategy=… too")
            return None
        # Settings in a config that names a strategy belong to that strategy alone.
        same = configured["strategy"] is None or strategy_name(configured["strategy"]) == strategy_name(chosen)
        in_call = with_hints(chosen, own["strategy_config"], hints_of(others))
        in_config = with_hints(chosen, configured["strategy_config"] if same else None, hints_of(in_configs), of_config)
        return Options(
            strategy=resolve_strategy(chosen, in_call, defaults.config_for(chosen, in_config)),
            verifier=resolve_verifier(own["verifier"] or runtime.verifier, own["verifier_config"]),
            runtime=runtime,
            grammar=own["grammar"] if own["grammar"] is not None else configured["grammar"],
            thinking=own["thinking"] if own["thinking"] is not None else configured["thinking"],
            seed=own["seed"],
            generator=own["generator"],
            configs=configs,
            arguments={name: value for name, value in others.items() if name not in (*HINTS, *TRANSLATED)},
        )

    def apart(self, names: frozenset[str]) -> tuple[dict[str, Any], Options]:
        """Splits off the arguments called `names`. Returns the split-off arguments that are not None, and the other options."""
        taken = {name: value for name, value in self.arguments.items() if name in names}
        others = {name: value for name, value in self.arguments.items() if name not in names}
        given = {name: value for name, value in taken.items() if value is not None}
        return given, replace(self, arguments=others) if taken else self

    def check(self) -> None:
        """Raises UnsupportedError if the strategy lacks an argument that it needs, or if two draft models are given, and SettingsError
        if ``assistant_model`` is not a model.

        Only warns about a draft model that the strategy does not use, so that the same call can be tried with every strategy.
        """
        strategy, assistant = self.strategy, self.arguments.get("assistant_model")
        if not isinstance(assistant, (PreTrainedModel, str, type(None))) and not is_peft(assistant):
            raise SettingsError(
                "assistant_model must be a causal language model of transformers, or its path as a string, not "
                f"{shown(assistant)}"
            )
        if assistant is None and strategy.needs_assistant:
            has_setting = "draft_model" in strategy.settings_class.model_fields
            setting = ", or draft_model in its settings" if has_setting else ""
            raise UnsupportedError(f"strategy {strategy.name!r} needs assistant_model={setting}")
        if assistant is not None and not (strategy.needs_assistant or strategy.takes_assistant):
            if getattr(strategy.settings, "draft_model", None) is not None:
                raise UnsupportedError(
                    f"strategy {strategy.name!r} has a draft_model in its settings and uses no assistant_model; leave one of them out"
                )
            warnings.warn(
                f"strategy {strategy.name!r} drafts without assistant_model, which has no effect", stacklevel=2
            )
        if strategy.needs_grammar and self.grammar is None and self.thinking is None:
            raise UnsupportedError(
                f"strategy {strategy.name!r} needs grammar=: a schema, a pattern, or the name of a grammar of the library"
            )


def _configured(configs: list[GenerationConfig]) -> dict[str, Any]:
    """The options of this package in generation configs, by name; None for an option that no config sets."""
    configured = {name: first_of(configs, name) for name in _CONFIGURABLE}
    for name, kinds in _CONFIGURABLE.items():
        if not isinstance(configured[name], (*kinds, type(None))):
            wanted = " or ".join(f"a {kind.__name__.lower()}" for kind in kinds)
            raise SettingsError(f"{name} in the generation config must be {wanted}, not {configured[name]!r}")
    return configured


def _check_mapping(name: str, given: Any) -> None:
    """Raises SettingsError unless `given` is None or a mapping of settings by name."""
    if given is None or (isinstance(given, Mapping) and all(isinstance(key, str) for key in given)):
        return
    wrong = (
        f"the key {next(k for k in given if not isinstance(k, str))!r}" if isinstance(given, Mapping) else shown(given)
    )
    raise SettingsError(f'{name} must be a dict of settings, {{"name": value}}, not {wrong}')


@dataclass(frozen=True)
class OwnDefaults:
    """The options in a checkpoint's own generation config.

    Attributes:
        config: a copy of the generation config, with only values that every strategy accepts.
        strategy_config: settings of the strategy, including settings from transformers' drafting arguments (hints).
        left_out: values that are neither in `config` nor in `strategy_config`, by name, as text.
    """

    config: GenerationConfig
    strategy_config: dict[str, Any]
    left_out: dict[str, str]

    @staticmethod
    def of(config: GenerationConfig, strategy: str, strategy_config: Mapping[str, Any]) -> OwnDefaults:
        """Removes values that ``generate(strategy=…)`` refuses (``use_cache=False``, ``num_beams``), sampling at temperature 0, and
        ``num_return_sequences`` (each request sets its own). Turns drafting hints into settings if `strategy` has these settings.

        Args:
            strategy, strategy_config: the default strategy of requests and its settings, which override hints.
        """
        own, settings = copy.copy(config), dict(strategy_config)
        left_out = {name: value for name, (refused, _) in REFUSED.items() if refused(value := said_in([own], name))}
        if own.num_return_sequences not in (None, 1):
            left_out["num_return_sequences"] = own.num_return_sequences
        if own.do_sample and own.temperature is not None and own.temperature <= 0:  # meaning greedy decoding
            left_out |= {"do_sample": True, "temperature": own.temperature}
        for name, value in hints_of({name: said_in([own], name) for name in HINTS}).items():
            try:
                settings = dict(with_hints(strategy, settings, {name: value}) or {})
            except UnsupportedError:
                left_out[name] = value
            except SettingsError:  # contradicts a setting, which takes precedence
                continue
        for name in (*left_out, *HINTS):
            setattr(own, name, None)
        return OwnDefaults(own, settings, {name: shown(value) for name, value in left_out.items()})
