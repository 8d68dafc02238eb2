"""What plugins can provide: a kind is a base class, the hook that gives its subclasses, and what each must satisfy."""

from __future__ import annotations

import inspect
import re
from abc import ABC
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ..constraints.base import Backend
from ..errors import PluginError
from ..settings import Settings
from ..strategy import Strategy
from ..verifiers.verifier import Verifier

#: A class that plugins provide.
Provided = TypeVar("Provided", bound=ABC)


@dataclass(frozen=True)
class Kind(Generic[Provided]):
    """A kind of class that plugins provide. Names are unique within a kind.

    Attributes:
        noun: the word for one, in messages.
        plural: for several.
        base: what the classes derive from.
        hook: name of the hook that gives them.
        check_more: raises PluginError if a class, shown as the text, lacks what only this kind needs.
    """

    noun: str
    plural: str
    base: type[Provided]
    hook: str
    check_more: Callable[[type[Provided], str], None]

    def collect(self, provided: Iterable[object]) -> dict[str, type[Provided]]:
        """What one plugin provides, by name.

        Raises:
            PluginError: a class cannot be registered, or two have one name.
        """
        if isinstance(provided, type):
            raise PluginError(f"{self.hook} must return an iterable of classes, not one class")
        classes: dict[str, type[Provided]] = {}
        for cls in provided:
            name = self.check(cls)
            if name in classes:
                raise PluginError(f"two of its {self.plural} are named {name!r}")
            classes[name] = cls  # type: ignore[assignment]  # checked
        return classes

    def check(self, cls: object) -> str:
        """The name of a class of this kind.

        Raises:
            PluginError: `cls` cannot be registered.
        """
        shown = f"{cls.__module__}.{cls.__qualname__}" if isinstance(cls, type) else repr(cls)
        if not isinstance(cls, type) or not issubclass(cls, self.base):
            raise PluginError(f"{shown} is not a subclass of decoders.{self.base.__name__}")
        if inspect.isabstract(cls):
            raise PluginError(f"{shown} does not implement: {', '.join(sorted(cls.__abstractmethods__))}")
        name = getattr(cls, "name", None)
        if not isinstance(name, str) or not re.fullmatch("[a-z][a-z0-9]*(_[a-z0-9]+)*", name):
            raise PluginError(f"{shown}.name must be a snake_case string, not {name!r}")
        self.check_more(cls, shown)
        return name


def _check_settings(cls: type[Strategy], shown: str) -> None:
    settings = cls.settings_class
    if not isinstance(settings, type) or not issubclass(settings, Settings):
        raise PluginError(f"{shown}.settings_class must be a subclass of decoders.settings.Settings, not {settings!r}")


def _check_made_by_name(cls: type[ABC], shown: str) -> None:
    try:
        inspect.signature(cls).bind()
    except TypeError as error:
        noun = "verifier" if issubclass(cls, Verifier) else "grammar backend"
        raise PluginError(f"{shown} must be made without arguments, a {noun} has no settings: {error}") from error


STRATEGY = Kind("strategy", "strategies", Strategy, "decoders_strategies", _check_settings)  # type: ignore[type-abstract]
VERIFIER = Kind("verifier", "verifiers", Verifier, "decoders_verifiers", _check_made_by_name)  # type: ignore[type-abstract]
BACKEND = Kind("grammar backend", "grammar backends", Backend, "decoders_grammar_backends", _check_made_by_name)  # type: ignore[type-abstract]

KINDS: tuple[Kind[Any], ...] = (STRATEGY, VERIFIER, BACKEND)
