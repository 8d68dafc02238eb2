"""The built-in strategies, one file each, registered through the same hook as anybody else's."""

from __future__ import annotations

from ..hookspecs import hookimpl
from ..strategy import Strategy
from .autoregressive import Autoregressive
from .medusa import Medusa, MedusaSettings
from .prompt_lookup import PromptLookup, PromptLookupSettings
from .speculative import Speculative, SpeculativeSettings
from .staged import Staged, StagedSettings
from .threshold import Threshold, ThresholdSettings

__all__ = [
    "Autoregressive", "Medusa", "MedusaSettings", "PromptLookup", "PromptLookupSettings", "Speculative",
    "SpeculativeSettings", "Staged", "StagedSettings", "Threshold", "ThresholdSettings",
]  # fmt: skip


@hookimpl
def decoders_strategies() -> list[type[Strategy]]:
    return [Autoregressive, Speculative, Threshold, Staged, PromptLookup, Medusa]
