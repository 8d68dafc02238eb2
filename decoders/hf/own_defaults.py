"""A checkpoint's own generation config, settled for a model that answers requests: nobody who sends one can change it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import GenerationConfig

from ..errors import SettingsError, UnsupportedError
from ..registry.resolve import with_hints
from .arguments import HINTS, REFUSED, hints_of, said_in, shown


@dataclass(frozen=True)
class OwnDefaults:
    """What was made of a checkpoint's own generation config.

    Attributes:
        config: a copy that goes with every strategy.
        strategy_config: settings of the strategy, hints how to draft among them.
        left_out: what is not in the copy and stands for no setting, by name, as text.
    """

    config: GenerationConfig
    strategy_config: dict[str, Any]
    left_out: dict[str, str]

    @staticmethod
    def of(config: GenerationConfig, strategy: str, strategy_config: Mapping[str, Any]) -> OwnDefaults:
        """Leaves out what ``generate(strategy=…)`` refuses (``use_cache=False``, ``num_beams``), and several texts per prompt,
        which requests ask for in another way. Hints how to draft become settings of `strategy` if it has them.

        Args:
            strategy, strategy_config: of requests that name none. Settings count before hints.
        """
        own, settings = copy.copy(config), dict(strategy_config)
        left_out = {name: value for name, (refused, _) in REFUSED.items() if refused(value := said_in([own], name))}
        if own.num_return_sequences not in (None, 1):
            left_out["num_return_sequences"] = own.num_return_sequences
        for name, value in hints_of({name: said_in([own], name) for name in HINTS}).items():
            try:
                settings = dict(with_hints(strategy, settings, {name: value}) or {})
            except UnsupportedError:
                left_out[name] = value
            except SettingsError:  # a setting says otherwise
                continue
        for name in (*left_out, *HINTS):
            setattr(own, name, None)
        return OwnDefaults(own, settings, {name: shown(value) for name, value in left_out.items()})
