"""The built-in strategies, one file each, registered through the same hook as anybody else's."""

from __future__ import annotations

from ..hookspecs import hookimpl
from ..strategy import Strategy
from .autoregressive import Autoregressive
from .ngram import Ngram, NgramSettings
from .prompt_lookup import PromptLookup, PromptLookupSettings

__all__ = ["Autoregressive", "PromptLookup", "PromptLookupSettings", "Ngram", "NgramSettings"]


@hookimpl
def decoders_strategies() -> list[type[Strategy]]:
    return [Autoregressive, PromptLookup, Ngram]
