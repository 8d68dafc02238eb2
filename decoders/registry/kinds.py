"""The kinds of objects that plugins provide (strategies, verifiers, …): their hooks, their checks, and which plugin gets a name."""

from __future__ import annotations

import inspect
import re
from abc import ABC
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache, partial
from typing import Any, Generic, Literal, TypeVar

from ..constraints import Backend, full_name
from ..errors import PluginError, UnknownNameError, canonical, suggest
from ..report import Observer
from ..settings import OWN_VARIABLES, Configured, Settings, variable_of
from ..strategy import HINTS, TRAITS, Strategy
from ..verifiers.verifier import Verifier

Provided = TypeVar("Provided", bound=ABC)


@dataclass(frozen=True)
class Kind(Generic[Provided]):
    """A kind of class that plugins provide, such as strategies. Names of classes are unique within a kind.

    Attributes:
        noun, plural: the kind's name in errors, for one class and for several.
        base: base class of the provided classes.
        hook: name of the hook that returns the classes.
        check_more: function with further checks of a class; takes the class and its name for errors, raises PluginError.
    """

    noun: str
    plural: str
    base: type[Provided]
    hook: str
    check_more: Callable[[type[Provided], str], None]

    def collect(self, provided: Iterable[object]) -> dict[str, type[Provided]]:
        """Checks the classes `provided` by a plugin; returns them by name. Raises PluginError for invalid classes or equal names."""
        if isinstance(provided, type):
            raise PluginError(f"{self.hook} must return an iterable of classes, not one class")
        if not isinstance(provided, Iterable):
            raise PluginError(f"{self.hook} must return an iterable of classes, not {type(provided).__name__}")
        classes: dict[str, type[Provided]] = {}
        for cls in provided:
            name = self.check(cls)
            if name in classes:
                raise PluginError(f"two of the plugin's {self.plural} are named {name!r}")
            classes[name] = cls  # type: ignore[assignment]  # checked
        return classes

    def check(self, cls: object) -> str:
        """Checks a class and returns its name. Raises PluginError if `cls` is invalid."""
        shown = f"{cls.__module__}.{cls.__qualname__}" if isinstance(cls, type) else repr(cls)
        if not isinstance(cls, type) or not issubclass(cls, self.base):
            raise PluginError(f"{shown} is not a subclass of decoders.{self.base.__name__}")
        if inspect.isabstract(cls):
            raise PluginError(f"{shown} does not implement: {', '.join(sorted(cls.__abstractmethods__))}")
        name = _snake_case(getattr(cls, "name", None), f"{shown}.name")
        if not isinstance(summary := getattr(cls, "summary", ""), str):
            raise PluginError(f"{shown}.summary must be one line that says what it does, not {summary!r}")
        check_methods(cls, self.base)
        self.check_more(cls, shown)
        return name


def _form(value: object) -> object:
    """The parameter names of a function, or the type of any other value, to compare attributes with similar names."""
    return list(inspect.signature(value).parameters) if inspect.isfunction(value) else type(value)


@lru_cache(maxsize=256)  # every call of generate checks the classes of its objects
def check_methods(cls: type, base: type) -> None:
    """Raises PluginError if a method of `cls` cannot be called like the method of `base` with this name, or if `cls` probably misspells
    a name of `base`: the two attributes have similar names, and the same parameters or type.
    """
    known = {name: _form(value) for name, value in inspect.getmembers(base) if not name.startswith("_")}
    for name, own in inspect.getmembers(cls):
        near = () if name.startswith("_") or name in known else get_close_matches(name, known, n=1, cutoff=0.8)
        if near and _form(own) == known[near[0]]:
            raise PluginError(
                f"{cls.__module__}.{cls.__qualname__}.{name} is not an attribute of decoders.{base.__name__}. Did you mean {near[0]!r}?"
                " If not, rename it"
            )
    for name, method in vars(base).items():
        own = inspect.getattr_static(cls, name)
        if not inspect.isfunction(method) or name.startswith("_") or not inspect.isfunction(own) or own is method:
            continue
        given = list(inspect.signature(method).parameters)
        try:
            inspect.signature(own).bind(*given)
        except TypeError as error:
            code = getattr(inspect.unwrap(own), "__code__", own.__code__)
            raise PluginError(
                f"{cls.__module__}.{cls.__qualname__}.{name}{inspect.signature(own)} is called with ({', '.join(given)}): {error} "
                f"({code.co_filename}:{code.co_firstlineno})"
            ) from error


class GrammarKind(Kind[Any]):
    """The kind of grammars. Plugins provide grammars as objects by name, not as classes."""

    def collect(self, provided: Any) -> dict[str, Any]:
        if not isinstance(provided, Mapping):
            raise PluginError(f"{self.hook} must return a dict of grammars by name, not {type(provided).__name__}")
        for name, value in provided.items():
            _snake_case(name, "a grammar's name")
            # Other values are checked when the grammar is first used.
            if value is None or isinstance(value, (bool, int, float, bytes, str, list, tuple)):
                raise PluginError(
                    f"grammar {name!r} is {type(value).__name__}: give a value that grammar= takes, or a function that returns it"
                )
        return dict(provided)


class GrammarTypeKind(Kind[Any]):
    """The kind of types of objects that ``grammar=`` takes. Plugins provide a function for each full name of a type, not classes."""

    def collect(self, provided: Any) -> dict[str, Any]:
        if not isinstance(provided, Mapping):
            raise PluginError(f"{self.hook} must return a dict of functions by type, not {type(provided).__name__}")
        named: dict[str, Any] = {}
        for cls, function in provided.items():
            if not isinstance(cls, (type, str)) or "." not in (name := full_name(cls)):
                raise PluginError(f"{self.hook}: {cls!r} should be a type or its full name, such as 'my_package.Form'")
            if name.startswith("builtins."):
                raise PluginError(f"{self.hook}: plugins cannot claim {name[9:]!r}, a type of Python: leave it out")
            if not callable(function):
                raise PluginError(f"{self.hook}: {name} needs a function that returns a grammar, not {function!r}")
            named[name] = function
        return named


class CommandKind(Kind[Any]):
    """The kind of commands. Plugins provide commands as functions by name, not as classes."""

    def collect(self, provided: Any) -> dict[str, Any]:
        if not isinstance(provided, Mapping):
            raise PluginError(f"{self.hook} must return a dict of functions by name, not {type(provided).__name__}")
        for name, value in provided.items():
            if not isinstance(name, str) or not COMMAND_NAME.fullmatch(name):
                raise PluginError(f"a command's name must be like 'weigh', or 'bench weigh' in a group, not {name!r}")
            if not inspect.isroutine(value):
                raise PluginError(f"command {name!r} must be a function, not {value!r}")
            if not inspect.getdoc(value):
                raise PluginError(f"command {name!r} has no docstring, which is its help")
        return dict(provided)


def is_maker(value: object) -> bool:
    """Whether `value` is a function that returns a grammar. Types and ``list[int]`` are callable, too, but they are grammars."""
    return inspect.isroutine(value) or isinstance(value, partial)


#: The form of all names except commands.
SNAKE_CASE = re.compile("[a-z][a-z0-9]*(_[a-z0-9]+)*")
#: A command as users type it: its name, or its group and its name.
COMMAND_NAME = re.compile("([a-z][a-z0-9]*(-[a-z0-9]+)* )?[a-z][a-z0-9]*(-[a-z0-9]+)*")


def _snake_case(name: object, what: str) -> str:
    if not isinstance(name, str) or not SNAKE_CASE.fullmatch(name):
        raise PluginError(f"{what} must be a snake_case string, not {name!r}")
    return name


def _check_settings(cls: type[Configured], shown: str) -> None:
    settings = cls.settings_class
    if not isinstance(settings, type) or not issubclass(settings, Settings):
        raise PluginError(f"{shown}.settings_class must be a subclass of decoders.settings.Settings, not {settings!r}")
    for setting, field in settings.model_fields.items():
        if field.is_required():
            raise PluginError(f"{shown}: setting {setting!r} of {settings.__name__} must have a default")


#: The attributes that strategies declare: name → (test whether a value is right, the right values).
_DECLARED: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "hidden_layers": (lambda v: isinstance(v, tuple) and all(type(n) is int for n in v), "a tuple of integers"),
    "grade_rates": (
        lambda v: isinstance(v, tuple) and all(isinstance(n, int | float) and 0 <= n <= 1 for n in v),
        "a tuple of shares from 0 to 1",
    ),
    "needs": (lambda v: isinstance(v, str), "a string"),
    "auto_place": (lambda v: v is None or isinstance(v, int | float), "a number or None"),
    "auto_settings": (lambda v: isinstance(v, Mapping), "a dict of settings"),
    "hints": (lambda v: isinstance(v, Mapping), "a dict of settings by argument"),
} | {n: (lambda v: isinstance(v, bool), "True or False") for n, t in TRAITS.items() if isinstance(t.default, bool)}


def check_traits(owner: Strategy | type[Strategy], shown: str) -> None:
    """Raises PluginError if an attribute that a strategy or its class declares has a wrong type."""
    for name, (right, wanted) in _DECLARED.items():
        value = getattr(owner, name)
        if not isinstance(value, property) and not right(value):
            raise PluginError(f"{shown}.{name} must be {wanted}, not {value!r}")


def _check_strategy(cls: type[Strategy], shown: str) -> None:
    _check_settings(cls, shown)
    check_traits(cls, shown)
    settings = cls.settings_class
    for setting in settings.model_fields:
        own = OWN_VARIABLES.get(variable_of(cls.name, setting))
        if own is not None:
            raise PluginError(
                f"setting {setting!r} of strategy {cls.name!r} would be read from {variable_of(cls.name, setting)}, the variable of "
                f"this package's setting {own!r}: rename the strategy or its setting"
            )
    for hint in cls.hints:
        if hint not in HINTS:
            raise PluginError(
                f"{shown}.hints: {hint!r} is no drafting argument of transformers. {suggest(str(hint), HINTS)}"
            )
    named = [(f"hints: {hint!r} stands for setting {setting!r}", setting) for hint, setting in cls.hints.items()]
    for what, setting in (
        *named,
        *((f"auto_settings: {setting!r} is a setting", setting) for setting in cls.auto_settings),
    ):
        if setting not in settings.model_fields:
            raise PluginError(
                f"{shown}.{what}, which {settings.__name__} does not have. {suggest(str(setting), settings.model_fields)}"
            )
    if cls.auto_place is not None and not (cls.exact and (cls.rests or not cls.observes)):
        why = (
            "with `observe` must declare `rests = True`, so that auto can skip its drafts"
            if cls.exact
            else "must be exact"
        )
        raise PluginError(f"{shown}.auto_place: a candidate of auto {why}. Otherwise leave auto_place out")


def _check_verifier(cls: type[Verifier], shown: str) -> None:
    _check_settings(cls, shown)
    check_made(cls, shown)


def check_made(cls: type[ABC], shown: str, *given: object) -> None:
    """Raises PluginError if `cls` cannot be called with the arguments `given`: its settings, or none."""
    try:
        inspect.signature(cls).bind(*given)
    except TypeError as error:
        how = "from its settings" if given else "without arguments"
        raise PluginError(f"{shown} must be made {how}: {error}") from error


STRATEGY = Kind("strategy", "strategies", Strategy, "decoders_strategies", _check_strategy)  # type: ignore[type-abstract]
VERIFIER = Kind("verifier", "verifiers", Verifier, "decoders_verifiers", _check_verifier)  # type: ignore[type-abstract]
BACKEND = Kind("grammar backend", "grammar backends", Backend, "decoders_grammar_backends", check_made)  # type: ignore[type-abstract]

GRAMMAR = GrammarKind("grammar", "grammars", ABC, "decoders_grammars", lambda cls, shown: None)
OBSERVER = Kind("observer", "observers", Observer, "decoders_observers", check_made)
GRAMMAR_TYPE = GrammarTypeKind("grammar type", "grammar types", ABC, "decoders_grammar_types", lambda cls, shown: None)
COMMAND = CommandKind("command", "commands", ABC, "decoders_commands", lambda cls, shown: None)

KINDS: tuple[Kind[Any], ...] = (STRATEGY, VERIFIER, BACKEND, GRAMMAR, OBSERVER, COMMAND, GRAMMAR_TYPE)


#: Name of the built-in plugin, and its distribution.
BUILTIN, DISTRIBUTION = "builtin", "hf-decoders"
#: Provider of plugins that :meth:`Registry.register` added.
THIS_PROCESS = "(this process)"

Status = Literal["loaded", "blocked", "failed", "conflict"]


@dataclass(frozen=True)
class PluginInfo:
    """A plugin as ``decoders plugins`` lists it.

    Attributes:
        name: entry-point name.
        version, provider: the version and name of the plugin's distribution.
        hooks: names of the hooks that the plugin implements.
        strategies, verifiers, grammar_backends, grammars, grammar_types, observers, commands: names that it claims, usable or not.
        status: "loaded", "blocked" (by the block or allow list), "failed" (nothing of the plugin is used), "conflict" (another plugin
            also claims one of its names; its other names are usable).
        error: the reason for a status other than "loaded".
    """

    name: str
    version: str
    provider: str
    hooks: tuple[str, ...] = ()
    strategies: tuple[str, ...] = ()
    verifiers: tuple[str, ...] = ()
    grammar_backends: tuple[str, ...] = ()
    grammars: tuple[str, ...] = ()
    grammar_types: tuple[str, ...] = ()
    observers: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()
    status: Status = "loaded"
    error: str | None = None

    @property
    def key(self) -> str:
        """The plugin's unique key, which includes its distribution, because distributions may use the same entry-point name."""
        return f"{self.provider}:{self.name}"

    def __str__(self) -> str:
        return f"{self.name!r} ({f'{self.provider} {self.version}'.strip()})"


@dataclass(frozen=True)
class Entry(Generic[Provided]):
    """A usable name with its class (for grammars, grammar types and commands: the object), and the class's distribution and version."""

    name: str
    cls: type[Provided]
    provider: str
    version: str


@dataclass(frozen=True)
class Names(Generic[Provided]):
    """The names of a kind that plugins claim.

    Attributes:
        usable: entries by name.
        conflicts: names that several plugins claim, unusable for all, with the error.
        lost: by plugin key, an error for each name that the plugin claims but cannot use.
    """

    kind: Kind[Provided]
    usable: Mapping[str, Entry[Provided]]
    conflicts: Mapping[str, str]
    lost: Mapping[str, list[str]]

    def find(self, name: str) -> type[Provided]:
        """The class called `name`; ``-`` and ``_`` are the same.

        Raises:
            PluginError: several plugins claim the name.
            UnknownNameError: no plugin claims it.
        """
        wanted = canonical(name)
        if wanted in self.conflicts:
            raise PluginError(self.conflicts[wanted])
        if wanted not in self.usable:
            raise UnknownNameError(self.kind.noun, name, self.usable)
        return self.usable[wanted].cls


def settle(kind: Kind[Provided], claims: Iterable[tuple[PluginInfo, Mapping[str, type[Provided]]]]) -> Names[Provided]:
    """Returns which plugin gets each name. The built-in plugin keeps its names; other plugins that claim the same name all lose it.

    claims: every plugin with its classes by name, in order of loading.
    """
    claimants: defaultdict[str, list[tuple[PluginInfo, type[Provided]]]] = defaultdict(list)
    for plugin, classes in claims:
        for name, cls in classes.items():
            claimants[name].append((plugin, cls))
    usable: dict[str, Entry[Provided]] = {}
    conflicts: dict[str, str] = {}
    lost: defaultdict[str, list[str]] = defaultdict(list)
    for name, several in claimants.items():
        first, cls = several[0]
        has_owner = len(several) == 1 or (first.name, first.provider) == (BUILTIN, DISTRIBUTION)
        losers = [plugin for plugin, _ in (several[1:] if has_owner else several)]
        if has_owner:
            usable[name] = Entry(name, cls, first.provider, first.version)
        if losers:
            who = " and ".join(str(plugin) for plugin, _ in several)
            outcome = "The built-in keeps the name." if has_owner else "Neither is used."
            message = f"{kind.noun.capitalize()} {name!r} is claimed by {who}. {outcome} {_advice(losers[-1])}"
            if not has_owner:
                conflicts[name] = message
            for plugin in losers:
                lost[plugin.key].append(message)
    return Names(kind, usable, conflicts, lost)


def _advice(plugin: PluginInfo) -> str:
    if plugin.provider == THIS_PROCESS:
        return f"Unregister one, for instance with registry().unregister({plugin.name!r})."
    return f"Block one, for instance with DECODERS_PLUGINS_BLOCK={plugin.name}."
