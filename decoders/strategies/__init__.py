"""The built-in strategies, one file each, and their shared parts."""

from __future__ import annotations

from ..strategy import Strategy
from .auto import Auto, AutoSettings
from .autoregressive import Autoregressive
from .dflash import DFlash, DFlashSettings
from .eagle3 import Eagle3, Eagle3Settings
from .early_exit import EarlyExit, EarlyExitSettings
from .grammar import Grammar, GrammarSettings
from .lookahead import Lookahead, LookaheadSettings
from .medusa import Medusa, MedusaSettings
from .mtp import Mtp, MtpSettings
from .ngram import Ngram, NgramSettings
from .prompt_lookup import PromptLookup, PromptLookupSettings
from .speculative import Speculative, SpeculativeSettings
from .staged import Staged, StagedSettings
from .suffix import Suffix, SuffixSettings
from .threshold import Threshold, ThresholdSettings
from .token_recycling import TokenRecycling, TokenRecyclingSettings

__all__ = [
    "Auto", "AutoSettings", "Autoregressive", "DFlash", "DFlashSettings", "Eagle3", "Eagle3Settings", "EarlyExit",
    "EarlyExitSettings", "Grammar", "GrammarSettings", "Lookahead", "LookaheadSettings", "Medusa", "MedusaSettings", "Mtp",
    "MtpSettings", "Ngram", "NgramSettings", "PromptLookup", "PromptLookupSettings", "Speculative", "SpeculativeSettings",
    "Staged", "StagedSettings", "Suffix", "SuffixSettings", "Threshold", "ThresholdSettings", "TokenRecycling",
    "TokenRecyclingSettings",
]  # fmt: skip

#: The built-in strategies, in the order in which they are listed.
BUILT_IN: tuple[type[Strategy], ...] = (
    Auto, Autoregressive, Speculative, EarlyExit, Threshold, Staged, Lookahead, PromptLookup, Ngram, Suffix, TokenRecycling,
    Medusa, Mtp, Eagle3, DFlash, Grammar,
)  # fmt: skip
