"""The errors of this package. An error about an unknown name lists the allowed names and suggests the nearest."""

from __future__ import annotations

import difflib
import functools
import inspect
import re
from collections.abc import Callable, Iterable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class DecodersError(Exception):
    """Base class of all errors of this package."""


class UnknownNameError(DecodersError, ValueError):
    """No strategy, verifier, setting or other object has the given name."""

    def __init__(self, kind: str, name: str, choices: Iterable[str], hint: str = ""):
        choices, (plain, bracket, _) = sorted(choices), name.partition("[")
        if bracket and kind in ("strategy", "verifier"):  # the notation of `decoders bench` and `decoders demo`
            hint = f"Pass its settings in {kind}_config=" + (" or --set." if kind == "strategy" else ".")
        super().__init__(f"Unknown {kind} {name!r}. {suggest(plain, choices)} {hint}".rstrip())
        self.kind, self.name, self.choices = kind, name, choices


class SettingsError(DecodersError, ValueError):
    """A setting does not exist, or its value has the wrong type or is out of range."""


class UnsupportedError(DecodersError, ValueError):
    """The decoding loop cannot decode a model exactly, or cannot honour an argument of ``generate``. The error names an alternative."""


class InputError(DecodersError, ValueError):
    """Token ids or an attention mask are invalid, or this model cannot read them."""


class ContextLengthError(DecodersError, ValueError):
    """Prompt and new tokens together exceed the model's context length, or the prompt is empty."""


class CacheMemoryError(DecodersError, MemoryError):
    """There is too little memory for the KV cache of a call."""


class RanksError(DecodersError, RuntimeError):
    """Processes that share a model got different calls, or a strategy drafts differently in them."""


class QueueFull(DecodersError, RuntimeError):
    """A scheduler's queue of waiting requests is full."""


class DeadlineError(DecodersError, TimeoutError):
    """A request did not end before its deadline. ``partial`` is the output so far."""


class CancelledError(DecodersError, RuntimeError):
    """A request was cancelled, or its scheduler was closed. ``partial`` is the output so far."""


class DraftError(DecodersError, ValueError):
    """A strategy broke the contract of :class:`decoders.strategy.Draft` (shape, dtype or topology), or wrote to the loop's tensors."""


class VerifierError(DecodersError, ValueError):
    """A verifier broke the contract of :class:`decoders.verifiers.verifier.Outcomes` (type, shape or distribution)."""


class TrainingError(DecodersError):
    """Training cannot start or continue: there is too little text, or the checkpoint belongs to another run."""


class PluginError(DecodersError):
    """A plugin could not be loaded, or two plugins claim the same name."""


class GrammarError(DecodersError, ValueError):
    """A grammar cannot be compiled, or a finished text breaks a grammar.

    Attributes:
        keyword: the cause, for example a keyword of JSON Schema.
        path: the JSON path of the cause.
    """

    def __init__(self, message: str, keyword: str | None = None, path: str | None = None) -> None:
        super().__init__(message)
        self.keyword, self.path = keyword, path


def canonical(name: str) -> str:
    """`name` in lower case, with ``_`` in place of ``-`` and ``.``. Names that become equal are the same name."""
    return re.sub("[-_.]+", "_", name.strip()).lower()


def suggest(name: str, choices: Iterable[str]) -> str:
    """The hint ``Did you mean …? Choose from …`` for an unknown `name`; without the question if no choice is similar."""
    choices = sorted(choices)
    spelt = {choice.lower(): choice for choice in choices}
    near = difflib.get_close_matches(name[:200].lower().replace("-", "_"), spelt, n=1)  # a client may send a long name
    hint = f"Did you mean {spelt[near[0]]!r}? " if near else ""
    return f"{hint}Choose from: {', '.join(choices) or '(there are none)'}."


def keywords_named(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator for functions without ``**kwargs``. An unknown keyword raises a SettingsError that names the nearest parameter."""
    known = [p.name for p in inspect.signature(function).parameters.values() if p.kind is not p.POSITIONAL_ONLY]

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs.keys() - known:
            raise SettingsError(f"{function.__name__}() has no argument {name}=. {suggest(name, known)}")
        return function(*args, **kwargs)

    return called


def shortened(text: str, limit: int = 60) -> str:
    """`text` on one line, cut to `limit` characters, for error messages."""
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


def amount(number: int, noun: str, plural: str = "") -> str:
    """`number` and `noun`: ``1 row``, ``2 rows``. plural: the plural of `noun`, if it is not `noun` followed by s."""
    return f"{number} {noun if number == 1 else plural or f'{noun}s'}"


def installing(extra: str) -> str:
    """The command that installs an optional part of this package, for error messages."""
    return f"pip install 'hf-decoders[{extra}]' (in a clone: pip install -e '.[{extra}]')"
