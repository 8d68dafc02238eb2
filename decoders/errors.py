"""Errors a user can meet. Every message names what was wrong, the allowed values and, for names, the nearest match."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable


class DecodersError(Exception):
    """Base class of every error this package raises on purpose."""


class UnknownNameError(DecodersError, ValueError):
    """A name (strategy, verifier, setting …) that nothing is registered under."""

    def __init__(self, kind: str, name: str, choices: Iterable[str], hint: str = ""):
        choices = sorted(choices)
        super().__init__(f"Unknown {kind} {name!r}. {suggest(name, choices)} {hint}".rstrip())
        self.kind, self.name, self.choices = kind, name, choices


class SettingsError(DecodersError, ValueError):
    """A setting that does not exist or has a value out of range."""


class UnsupportedError(DecodersError, ValueError):
    """A model or an argument of ``generate`` that the shared loop cannot honour exactly, with the alternative."""


class InputError(DecodersError, ValueError):
    """Token ids or an attention mask that no model could read, or that are not this model's."""


class ContextLengthError(DecodersError, ValueError):
    """Prompt plus new tokens exceed what the model's positions can express, or the prompt is empty."""


class CacheMemoryError(DecodersError, MemoryError):
    """There is no memory for the key-value cache that a call wants."""


class RanksError(DecodersError, RuntimeError):
    """Processes that share a model were asked for different things, or a strategy drafts differently in them."""


class QueueFull(DecodersError, RuntimeError):
    """A scheduler has as many requests waiting as it takes."""


class DeadlineError(DecodersError, TimeoutError):
    """A request has not come to its end in the time that it was given. ``partial`` is what was written."""


class CancelledError(DecodersError, RuntimeError):
    """A request was cancelled, or its scheduler was closed. ``partial`` is what was written."""


class DraftError(DecodersError, ValueError):
    """A strategy broke the contract of :class:`decoders.strategy.Draft` (wrong shape, dtype or topology), or wrote into the loop's
    tensors.
    """


class VerifierError(DecodersError, ValueError):
    """A verifier broke the contract of :class:`decoders.verifiers.verifier.Outcomes`: what it gave is no distribution."""


class TrainingError(DecodersError):
    """Training cannot start or go on: there is too little text, or the checkpoint belongs to another run."""


class PluginError(DecodersError):
    """A plugin could not be loaded, or two plugins claim the same name."""


class GrammarError(DecodersError, ValueError):
    """A grammar that cannot be compiled, or a finished text that breaks one.

    Attributes:
        keyword: what is to blame, a keyword of JSON Schema, say.
        path: where it stands, as a JSON path.
    """

    def __init__(self, message: str, keyword: str | None = None, path: str | None = None) -> None:
        super().__init__(message)
        self.keyword, self.path = keyword, path


def canonical(name: str) -> str:
    """`name` in the form in which names are compared: lower case, ``-`` and ``.`` as ``_``."""
    return re.sub("[-_.]+", "_", name.strip()).lower()


def suggest(name: str, choices: Iterable[str]) -> str:
    """``Did you mean …? Choose from …`` for an unknown `name`; the first part only if something is close."""
    choices = sorted(choices)
    spelt = {choice.lower(): choice for choice in choices}
    near = difflib.get_close_matches(name.lower().replace("-", "_"), spelt, n=1)
    hint = f"Did you mean {spelt[near[0]]!r}? " if near else ""
    return f"{hint}Choose from: {', '.join(choices) or '(nothing is registered)'}."


def shortened(text: str, limit: int = 60) -> str:
    """`text` for a message: one line, not too long."""
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 1] + "…"
