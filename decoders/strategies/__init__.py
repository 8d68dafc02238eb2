"""The built-in strategies, one file each, registered through the same hook as anybody else's."""

from __future__ import annotations

from ..hookspecs import hookimpl
from ..strategy import Strategy
from .autoregressive import Autoregressive
from .lookahead import Lookahead, LookaheadSettings
from .prompt_lookup import PromptLookup, PromptLookupSettings

__all__ = ["Autoregressive", "Lookahead", "LookaheadSettings", "PromptLookup", "PromptLookupSettings"]


@hookimpl
def decoders_strategies() -> list[type[Strategy]]:
    return [Autoregressive, Lookahead, PromptLookup]
