"""The registry: loads the built-in plugin and every installed plugin. It lists a broken plugin with its error and does not use it.

Environment: ``DECODERS_PLUGINS_BLOCK`` and ``DECODERS_PLUGINS_ALLOW`` (comma-separated entry-point or distribution names),
``DECODERS_PLUGINS_STRICT=1`` (raises an error if a plugin fails to load or its names clash).
"""

from __future__ import annotations

import inspect
import os
import threading
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import metadata
from typing import Any

import pluggy

from .. import hookspecs
from ..common.version import __version__
from ..constraints import Backend, type_names
from ..errors import DecodersError, GrammarError, PluginError, UnknownNameError, shortened, suggest
from ..hookspecs import PROJECT
from ..report import Observer
from ..strategy import Strategy
from ..verifiers.verifier import Verifier
from . import builtin
from .kinds import (
    BACKEND,
    BUILTIN,
    COMMAND,
    DISTRIBUTION,
    GRAMMAR,
    GRAMMAR_TYPE,
    KINDS,
    OBSERVER,
    STRATEGY,
    THIS_PROCESS,
    VERIFIER,
    Entry,
    Kind,
    Names,
    PluginInfo,
    Provided,
    canonical,
    settle,
)


class Registry:
    """All plugins of this process. Most callers want the shared registry, :func:`registry`.

    Raises:
        PluginError: with ``DECODERS_PLUGINS_STRICT=1``, if a plugin fails to load or two plugins claim a name.
    """

    def __init__(self) -> None:
        self.manager = _manager()
        self._lock = threading.RLock()
        self._plugins: dict[str, PluginInfo] = {}  # by key, in order of loading
        self._classes: dict[str, dict[Kind[Any], dict[str, type]]] = {}  # by key of a loaded plugin, kind and name
        self._names: dict[Kind[Any], Names[Any]] = {}
        self._observers: dict[type[Observer], Observer] = {}
        self._listening: tuple[Observer, ...] = ()
        self._load()

    def strategies(self) -> dict[str, Entry[Strategy]]:
        """Every usable strategy by name: first the built-in strategies, then the others, sorted by provider."""
        return dict(self._names[STRATEGY].usable)

    def strategy(self, name: str) -> type[Strategy]:
        """The class registered as `name`; ``-`` and ``_`` are the same.

        Raises:
            PluginError: several plugins claim the name.
            UnknownNameError: no plugin claims it.
        """
        return self._find(STRATEGY, name)

    def verifiers(self) -> dict[str, Entry[Verifier]]:
        """Every usable verifier by name: first the built-in verifiers, then the others, sorted by provider."""
        return dict(self._names[VERIFIER].usable)

    def verifier(self, name: str) -> type[Verifier]:
        """The verifier class registered as `name`; raises the errors of :meth:`strategy`. A strategy may have the same name."""
        return self._find(VERIFIER, name)

    def grammar_backends(self) -> dict[str, Entry[Backend]]:
        """Every usable grammar backend by name: first the built-in backends, then the others, sorted by provider."""
        return dict(self._names[BACKEND].usable)

    def grammar_backend(self, name: str) -> type[Backend]:
        """The backend class registered as `name`; raises the errors of :meth:`strategy`."""
        return self._find(BACKEND, name)

    def grammars(self) -> dict[str, Entry[Any]]:
        """Every usable grammar by name: first this package's grammars, then the others, sorted by provider."""
        return dict(self._names[GRAMMAR].usable)

    def grammar(self, name: str) -> Any:
        """The object that a plugin registered as grammar `name`; raises the errors of :meth:`strategy`."""
        return self._find(GRAMMAR, name)

    def grammar_types(self) -> dict[str, Entry[Any]]:
        """Every usable function of plugins that turns objects of a type into grammars, by the type's full name."""
        return dict(self._names[GRAMMAR_TYPE].usable)

    def grammar_of(self, value: object) -> Any:
        """Turns `value` into a grammar with the plugin's function for its type. Returns `value` itself if no plugin claims the type.

        Raises:
            PluginError: several plugins claim the type. GrammarError: the plugin's function fails, or returns no grammar.
        """
        names = self._names[GRAMMAR_TYPE]
        name = next((name for name in type_names(value) if name in names.usable or name in names.conflicts), None)
        if name is None:
            return value
        if name in names.conflicts:
            raise PluginError(names.conflicts[name])
        function: Any = names.usable[name].cls
        grammar = made_by(partial(function, value), f"{name.rpartition('.')[2]} objects")
        if grammar is None:
            raise GrammarError(
                f"the plugin's function for {name.rpartition('.')[2]} objects returned None for {shortened(repr(value))}: it must "
                "return a value that grammar= takes"
            )
        return grammar

    def commands(self) -> dict[str, Entry[Any]]:
        """Every usable command of plugins by name; this package's own commands are not included."""
        return dict(self._names[COMMAND].usable)

    def observers(self) -> dict[str, Entry[Observer]]:
        """Every usable observer class by name."""
        return dict(self._names[OBSERVER].usable)

    def listening(self) -> tuple[Observer, ...]:
        """One object of every usable observer class; always the same objects."""
        return self._listening

    def _find(self, kind: Kind[Provided], name: str) -> type[Provided]:
        try:
            return self._names[kind].find(name)
        except UnknownNameError as error:
            absent = [p.name for p in self._plugins.values() if p.status in ("failed", "blocked")]
            if absent:
                error.args = (f"{error} Not loaded: {', '.join(absent)} (`decoders plugins` says why).",)
            raise

    def origin(self, cls: type) -> str:
        """The distribution and version of a registered class; for any other class, its module."""
        for kind in KINDS:
            for entry in self._names[kind].usable.values():
                if entry.cls is cls:
                    return f"{entry.provider} {entry.version}".strip()
        return cls.__module__

    def plugins(self) -> list[PluginInfo]:
        """All plugins with their status."""
        return list(self._plugins.values())

    def unmatched(self) -> list[str]:
        """A message for each name in the block and allow lists that is not the name of a plugin or its distribution."""
        names = {canonical(name) for info in self._plugins.values() for name in (info.name, info.provider)}
        return [
            f"DECODERS_PLUGINS_{which} names {name!r}, which no plugin is called. {suggest(name, names)}"
            for which in ("BLOCK", "ALLOW")
            for name in sorted(_listed(which) - names)
        ]

    def register(self, plugin: object, name: str) -> PluginInfo:
        """Adds `plugin` (a module or object with ``@decoders.hookimpl`` functions) to this process as `name`.

        Returns the plugin's entry, whose ``status`` is "conflict" if a name clashes with another plugin's name.

        Raises:
            PluginError: the plugin is invalid, or `name` is taken.
        """
        info = PluginInfo(name, version="", provider=THIS_PROCESS)
        with self._lock:
            if info.key in self._plugins:
                raise PluginError(f"A plugin is already registered as {name!r}: unregister it first.")
            try:
                self._add(info, plugin)
            except Exception as error:
                raise PluginError(f"Plugin {name!r} is invalid: {_reason(error)}") from error
            self._settle()
            return self._plugins[info.key]

    def unregister(self, name: str) -> None:
        """Removes the plugin that :meth:`register` added as `name`, and frees its names.

        Raises:
            UnknownNameError: no plugin was registered as `name`.
        """
        with self._lock:
            own = {info.name: key for key, info in self._plugins.items() if info.provider == THIS_PROCESS}
            if name not in own:
                raise UnknownNameError("registered plugin", name, own)
            self.manager.unregister(name=own[name])
            del self._plugins[own[name]], self._classes[own[name]]
            self._settle()

    def _load(self) -> None:
        blocked, allowed = _listed("BLOCK"), _listed("ALLOW")
        strict = os.environ.get("DECODERS_PLUGINS_STRICT", "").lower() not in ("", "0", "false", "no")
        info = PluginInfo(BUILTIN, __version__, DISTRIBUTION)
        if BUILTIN in blocked:
            self._plugins[info.key] = replace(info, status="blocked", error="named in DECODERS_PLUGINS_BLOCK")
        else:
            self._add(info, builtin)

        for point in sorted(metadata.entry_points(group=PROJECT), key=lambda p: (_provider(p), p.name)):
            info = PluginInfo(point.name, point.dist.version if point.dist else "", _provider(point))
            names = {canonical(info.name), canonical(info.provider)}
            if names & blocked:
                self._plugins[info.key] = replace(info, status="blocked", error="named in DECODERS_PLUGINS_BLOCK")
            elif allowed and not names & allowed:
                self._plugins[info.key] = replace(info, status="blocked", error="not named in DECODERS_PLUGINS_ALLOW")
            else:
                try:
                    if point.pattern.match(point.value) is None:
                        raise PluginError(f"the entry point {point.value!r} is neither a module nor module:object")
                    self._add(info, point.load())
                except (Exception, SystemExit) as error:  # importing may call sys.exit
                    self._plugins[info.key] = replace(info, status="failed", error=_reason(error))
                    if strict:
                        raise PluginError(f"Plugin {info} failed to load: {_reason(error)}") from error
        self._settle()
        if strict:
            clash = next((p for p in self._plugins.values() if p.status == "conflict"), None)
            if clash is not None:
                raise PluginError(clash.error)

    def _add(self, info: PluginInfo, plugin: object) -> None:
        """Checks `plugin` in a separate manager and, if it is valid as a whole, adds it to the registry."""
        if self.manager.is_registered(plugin):
            raise PluginError(f"the object is already registered as plugin {self.manager.get_name(plugin)!r}")
        trial = _manager()
        trial.register(plugin, info.key)
        for caller in trial.get_hookcallers(plugin) or ():
            if not caller.has_spec():
                known = [name for name in vars(hookspecs) if name.startswith(f"{PROJECT}_")]
                raise PluginError(f"there is no hook {caller.name!r}. {suggest(caller.name, known)}")
        trial.check_pending()
        hooks = tuple(sorted(caller.name for caller in trial.get_hookcallers(plugin) or ()))
        if isinstance(plugin, type) and any(inspect.signature(getattr(plugin, hook)).parameters for hook in hooks):
            raise PluginError(f"{plugin.__name__} is a class: register an object, {plugin.__name__}()")
        if not hooks:
            raise PluginError("the plugin has no function marked @decoders.hookimpl")
        classes: dict[Kind[Any], dict[str, type]] = {}
        for kind in KINDS:
            answers = getattr(trial.hook, kind.hook)()  # one answer; empty if the plugin does not implement the hook
            classes[kind] = kind.collect(answers[0]) if answers else {}
        self._observers |= {cls: cls() for cls in classes[OBSERVER].values()}
        self.manager.register(plugin, info.key)
        self._classes[info.key] = classes
        claimed: dict[str, Any] = {kind.plural.replace(" ", "_"): tuple(names) for kind, names in classes.items()}
        self._plugins[info.key] = replace(info, hooks=hooks, **claimed)

    def _settle(self) -> None:
        """Decides again which plugin gets each name. A plugin that loses a name gets an error that says so."""
        names = {
            kind: settle(kind, [(self._plugins[key], found[kind]) for key, found in self._classes.items()])
            for kind in KINDS
        }
        for key in self._classes:
            problem = " ".join(message for kind in KINDS for message in names[kind].lost.get(key, ())) or None
            self._plugins[key] = replace(self._plugins[key], status="conflict" if problem else "loaded", error=problem)
        self._listening = tuple(self._observers[entry.cls] for entry in names[OBSERVER].usable.values())
        self._names = names  # replaced as a whole, because readers take no lock


def made_by(function: Callable[[], Any], what: str) -> Any:
    """Returns the result of a plugin's `function`. Raises GrammarError if `function` fails. what: its purpose, for the message."""
    try:
        return function()
    except DecodersError:
        raise
    except Exception as error:
        raise GrammarError(f"the plugin's function for {what} failed: {_reason(error)}") from error


_lock = threading.RLock()
_shared: Registry | None = None
_loading = False


def registry() -> Registry:
    """The registry of this process, loaded on first use; thread-safe.

    Raises:
        PluginError: see :class:`Registry`; or a plugin calls this function while it is imported.
    """
    global _shared, _loading
    if _shared is None:
        with _lock:
            if _loading:  # only the loading thread gets here, because of the lock
                raise PluginError("a plugin must not ask for the registry while it is being loaded")
            if _shared is None:
                _loading = True
                try:
                    _shared = Registry()
                finally:
                    _loading = False
    return _shared


def reset_registry() -> None:
    """Drops the shared registry, so that the next :func:`registry` loads it again (tests, freshly installed plugins)."""
    global _shared
    with _lock:
        _shared = None


def _manager() -> pluggy.PluginManager:
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(hookspecs)
    return manager


def _listed(which: str) -> set[str]:
    value = os.environ.get(f"DECODERS_PLUGINS_{which}", "")
    return {canonical(name) for name in value.split(",") if name.strip()}


def _provider(point: metadata.EntryPoint) -> str:
    return point.dist.name if point.dist else "(unknown distribution)"


def _reason(error: BaseException) -> str:
    """The error in one line, with file and line number if the plugin's code raised it."""
    text = " ".join(str(error).split())
    if isinstance(error, PluginError | pluggy.PluginValidationError):
        return text
    frames = [f for f in traceback.extract_tb(error.__traceback__)[1:] if "importlib" not in f.filename]
    if isinstance(error, SyntaxError):  # the error has the line of the mistake; the last frame only imports the file
        text, place = error.msg, f"{error.filename}:{error.lineno}"
    else:
        place = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    where = f" ({place})" if place else ""
    return f"{type(error).__name__}: {text}{where}"
