"""What plugins can provide: a kind is a base class, the hook that gives its subclasses, and what each must satisfy."""

from __future__ import annotations

import inspect
import re
from abc import ABC
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from ..constraints import Backend
from ..errors import PluginError, suggest
from ..report import Observer
from ..settings import OWN_VARIABLES, Settings, variable_of
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
        if not isinstance(provided, Iterable):
            raise PluginError(f"{self.hook} must return an iterable of classes, not {type(provided).__name__}")
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
        name = _snake_case(getattr(cls, "name", None), f"{shown}.name")
        self.check_more(cls, shown)
        return name


class GrammarKind(Kind[Any]):
    """Grammars: objects in the place of classes, given by name."""

    def collect(self, provided: Any) -> dict[str, Any]:
        if not isinstance(provided, Mapping):
            raise PluginError(f"{self.hook} must return a dict of grammars by name, not {type(provided).__name__}")
        for name, value in provided.items():
            _snake_case(name, "a grammar's name")
            # What makes sense is known on first use; these never do.
            if value is None or isinstance(value, (bool, int, float, bytes, str, list, tuple)):
                raise PluginError(
                    f"grammar {name!r} is {type(value).__name__}: what grammar= takes, or a function that makes it"
                )
        return dict(provided)


class CommandKind(Kind[Any]):
    """Commands: functions in the place of classes, given by name."""

    def collect(self, provided: Any) -> dict[str, Any]:
        if not isinstance(provided, Mapping):
            raise PluginError(f"{self.hook} must return a dict of functions by name, not {type(provided).__name__}")
        for name, value in provided.items():
            if not isinstance(name, str) or not COMMAND_NAME.fullmatch(name):
                raise PluginError(
                    f"a command is called like 'weigh' or 'bench weigh' (groups: bench, train), not {name!r}"
                )
            if not inspect.isroutine(value):
                raise PluginError(f"command {name!r} must be a function, not {value!r}")
            if not inspect.getdoc(value):
                raise PluginError(f"command {name!r} has no docstring, which is its help")
        return dict(provided)


def is_maker(value: object) -> bool:
    """Whether a plugin gave a function that makes a grammar. Types, and ``list[int]``, can be called too and are grammars."""
    return inspect.isroutine(value) or isinstance(value, partial)


#: What is looked up by its name has one of this form.
SNAKE_CASE = re.compile("[a-z][a-z0-9]*(_[a-z0-9]+)*")
#: A command as it is typed, in a group of commands or not.
COMMAND_NAME = re.compile("((bench|train) )?[a-z][a-z0-9]*(-[a-z0-9]+)*")


def _snake_case(name: object, what: str) -> str:
    if not isinstance(name, str) or not SNAKE_CASE.fullmatch(name):
        raise PluginError(f"{what} must be a snake_case string, not {name!r}")
    return name


def _check_settings(cls: type[Strategy], shown: str) -> None:
    settings = cls.settings_class
    if not isinstance(settings, type) or not issubclass(settings, Settings):
        raise PluginError(f"{shown}.settings_class must be a subclass of decoders.settings.Settings, not {settings!r}")
    for setting in settings.model_fields:
        own = OWN_VARIABLES.get(variable_of(cls.name, setting))
        if own is not None:
            raise PluginError(
                f"setting {setting!r} of strategy {cls.name!r} would be read from {variable_of(cls.name, setting)}, which is "
                f"{own!r} of the loop: call one of the two something else"
            )
    if not isinstance(cls.hints, Mapping):
        raise PluginError(f"{shown}.hints must be a dict of settings by argument, not {cls.hints!r}")
    for hint, setting in cls.hints.items():
        if setting not in settings.model_fields:
            raise PluginError(
                f"{shown}.hints: {hint!r} stands for setting {setting!r}, which {settings.__name__} does not have. "
                f"{suggest(str(setting), settings.model_fields)}"
            )


def _check_made_by_name(cls: type[ABC], shown: str) -> None:
    try:
        inspect.signature(cls).bind()
    except TypeError as error:
        raise PluginError(f"{shown} must be made without arguments: {error}") from error


STRATEGY = Kind("strategy", "strategies", Strategy, "decoders_strategies", _check_settings)  # type: ignore[type-abstract]
VERIFIER = Kind("verifier", "verifiers", Verifier, "decoders_verifiers", _check_made_by_name)  # type: ignore[type-abstract]
BACKEND = Kind("grammar backend", "grammar backends", Backend, "decoders_grammar_backends", _check_made_by_name)  # type: ignore[type-abstract]

GRAMMAR = GrammarKind("grammar", "grammars", ABC, "decoders_grammars", lambda cls, shown: None)
OBSERVER = Kind("observer", "observers", Observer, "decoders_observers", _check_made_by_name)
COMMAND = CommandKind("command", "commands", ABC, "decoders_commands", lambda cls, shown: None)

KINDS: tuple[Kind[Any], ...] = (STRATEGY, VERIFIER, BACKEND, GRAMMAR, OBSERVER, COMMAND)
