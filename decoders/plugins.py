"""Who provides which strategy: loads the built-ins and every installed plugin, and keeps a bad one from hurting.

Environment: ``DECODERS_PLUGINS_BLOCK`` and ``DECODERS_PLUGINS_ALLOW`` (comma-separated entry-point or distribution
names), ``DECODERS_PLUGINS_STRICT=1`` (a plugin that fails or clashes is an error instead of a line in the list).
"""

from __future__ import annotations

import inspect
import os
import re
import threading
import traceback
from collections import defaultdict
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Literal

import pluggy

from . import __version__, hookspecs, strategies
from .errors import PluginError, UnknownNameError
from .hookspecs import PROJECT
from .settings import Settings
from .strategy import Strategy

#: Plugin name of the built-in strategies, and the distribution they come with.
BUILTIN, DISTRIBUTION = "builtin", "hf-decoders"

Status = Literal["loaded", "blocked", "failed", "conflict"]


@dataclass(frozen=True)
class StrategyEntry:
    """A usable strategy: its registry name, its class, and the distribution and version that provide it."""

    name: str
    cls: type[Strategy]
    provider: str
    version: str


@dataclass(frozen=True)
class PluginInfo:
    """A plugin as ``decoders plugins`` lists it.

    Attributes:
        name: entry-point name. version, provider: of the distribution it comes with.
        hooks: hooks it implements. strategies: strategy names it claims, usable or not.
        status: "loaded", "blocked" (by a list), "failed" (nothing of it is used), "conflict" (a name is also claimed
            by another plugin; its other strategies are usable).
        error: why it is not simply loaded.
    """

    name: str
    version: str
    provider: str
    hooks: tuple[str, ...] = ()
    strategies: tuple[str, ...] = ()
    status: Status = "loaded"
    error: str | None = None


class Registry:
    """All plugins of this process. Most callers want the shared one, :func:`registry`.

    Raises:
        PluginError: with ``DECODERS_PLUGINS_STRICT=1``, when a plugin fails to load or two claim one name.
    """

    def __init__(self) -> None:
        self.manager = _manager()
        self._lock = threading.RLock()
        self._plugins: dict[str, PluginInfo] = {}  # by key, in order of loading
        self._classes: dict[str, tuple[type[Strategy], ...]] = {}
        self._usable: dict[str, StrategyEntry] = {}
        self._conflicts: dict[str, str] = {}
        self._load()

    def strategies(self) -> dict[str, StrategyEntry]:
        """Every usable strategy by name: the built-ins first, then by provider."""
        return dict(self._usable)

    def strategy(self, name: str) -> type[Strategy]:
        """The class registered as `name`; ``-`` and ``_`` are the same.

        Raises:
            PluginError: several plugins claim the name.
            UnknownNameError: nobody does.
        """
        wanted = canonical(name)
        if wanted in self._usable:
            return self._usable[wanted].cls
        if wanted in self._conflicts:
            raise PluginError(self._conflicts[wanted])
        error = UnknownNameError("strategy", name, self._usable)
        failed = [p.name for p in self._plugins.values() if p.status in ("failed", "blocked")]
        if failed:
            error.args = (f"{error} Not loaded: {', '.join(failed)} (`decoders plugins` says why).",)
        raise error

    def verifier(self, name):  # TEMPORARY
        from . import verifiers

        return {c.name: c for c in map(verifiers.__dict__.get, verifiers.__all__)}[canonical(name)]

    def plugins(self) -> list[PluginInfo]:
        """Every plugin found, whatever became of it."""
        return list(self._plugins.values())

    def register(self, plugin: object, name: str) -> PluginInfo:
        """Adds `plugin` (a module or object with ``@decoders.hookimpl`` functions) to this process as `name`.

        A name clash is reported as it is for installed plugins: look at the returned ``status``.

        Raises:
            PluginError: the plugin is invalid, or `name` is taken.
        """
        with self._lock:
            if self._key(name, "") in self._plugins:
                raise PluginError(f"A plugin is already registered as {name!r}: unregister it first.")
            info = PluginInfo(name, version="", provider="(this process)")
            try:
                self._add(self._key(name, ""), info, plugin)
            except Exception as error:
                raise PluginError(f"Plugin {name!r} is invalid: {_reason(error)}") from error
            self._resolve()
            return self._plugins[self._key(name, "")]

    def unregister(self, name: str) -> None:
        """Removes the plugin that :meth:`register` added as `name`; the names it blocked are free again.

        Raises:
            UnknownNameError: nothing was registered under that name.
        """
        with self._lock:
            key = self._key(name, "")
            if key not in self._plugins:
                own = [info.name for other, info in self._plugins.items() if other.startswith(":")]
                raise UnknownNameError("registered plugin", name, own)
            self.manager.unregister(name=key)
            del self._plugins[key], self._classes[key]
            self._resolve()

    @staticmethod
    def _key(name: str, provider: str) -> str:
        return f"{provider}:{name}"

    def _load(self) -> None:
        blocked, allowed = _listed("BLOCK"), _listed("ALLOW")
        strict = os.environ.get("DECODERS_PLUGINS_STRICT", "").lower() not in ("", "0", "false", "no")
        info = PluginInfo(BUILTIN, __version__, DISTRIBUTION)
        key = self._key(BUILTIN, DISTRIBUTION)
        if BUILTIN in blocked:
            self._plugins[key] = replace(info, status="blocked", error="named in DECODERS_PLUGINS_BLOCK")
        else:
            self._add(key, info, strategies)

        for point in sorted(metadata.entry_points(group=PROJECT), key=lambda p: (_provider(p), p.name)):
            provider = _provider(point)
            info = PluginInfo(point.name, point.dist.version if point.dist else "", provider)
            key = self._key(point.name, provider)
            names = {canonical(point.name), canonical(provider)}
            if names & blocked:
                self._plugins[key] = replace(info, status="blocked", error="named in DECODERS_PLUGINS_BLOCK")
            elif allowed and not names & allowed:
                self._plugins[key] = replace(info, status="blocked", error="not named in DECODERS_PLUGINS_ALLOW")
            else:
                try:
                    self._add(key, info, point.load())
                except (Exception, SystemExit) as error:  # an import may well call sys.exit
                    self._plugins[key] = replace(info, status="failed", error=_reason(error))
                    if strict:
                        raise PluginError(f"Plugin {_shown(info)} failed to load: {_reason(error)}") from error
        self._resolve()
        if strict:
            clash = next((p for p in self._plugins.values() if p.status == "conflict"), None)
            if clash is not None:
                raise PluginError(clash.error)

    def _add(self, key: str, info: PluginInfo, plugin: object) -> None:
        """Validates `plugin` on its own and, only if all of it is sound, makes it part of this registry."""
        if self.manager.is_registered(plugin):
            raise PluginError(f"it is the same object as plugin {self.manager.get_name(plugin)!r}")
        trial = _manager()
        trial.register(plugin, key)
        trial.check_pending()
        hooks = tuple(sorted(caller.name for caller in trial.get_hookcallers(plugin) or ()))
        if not hooks:
            raise PluginError("it has no function marked @decoders.hookimpl")
        found: dict[str, type[Strategy]] = {}
        for provided in trial.hook.decoders_strategies():
            if isinstance(provided, type):
                raise PluginError("decoders_strategies must return an iterable of classes, not one class")
            for cls in provided:
                check_class(cls)
                if cls.name in found:
                    raise PluginError(f"two of its strategies are named {cls.name!r}")
                found[cls.name] = cls
        self.manager.register(plugin, key)
        self._classes[key] = tuple(found.values())
        self._plugins[key] = replace(info, hooks=hooks, strategies=tuple(found))

    def _resolve(self) -> None:
        """Decides who gets each name. A built-in keeps its own; among others, a clash leaves nobody the name."""
        claims: defaultdict[str, list[tuple[str, type[Strategy]]]] = defaultdict(list)
        for key, classes in self._classes.items():
            for cls in classes:
                claims[cls.name].append((key, cls))
        usable: dict[str, StrategyEntry] = {}
        conflicts: dict[str, str] = {}
        errors: defaultdict[str, list[str]] = defaultdict(list)
        builtin = self._key(BUILTIN, DISTRIBUTION)
        for name, claimants in claims.items():
            winner = claimants[0] if len(claimants) == 1 or claimants[0][0] == builtin else None
            if winner is not None:
                info = self._plugins[winner[0]]
                usable[name] = StrategyEntry(name, winner[1], info.provider, info.version)
            if len(claimants) > 1:
                who = " and ".join(_shown(self._plugins[key]) for key, _ in claimants)
                losers = [key for key, _ in claimants if winner is None or key != winner[0]]
                last = self._plugins[losers[-1]]
                advice = f"Block one, for instance with DECODERS_PLUGINS_BLOCK={last.name}."
                if last.provider.startswith("("):
                    advice = f"Unregister one, for instance with registry().unregister({last.name!r})."
                outcome = "The built-in keeps the name." if winner else "Neither is used."
                message = f"Strategy {name!r} is claimed by {who}. {outcome} {advice}"
                if winner is None:
                    conflicts[name] = message
                for key in losers:
                    errors[key].append(message)
        for key in self._classes:
            problem = " ".join(errors[key]) or None
            self._plugins[key] = replace(self._plugins[key], status="conflict" if problem else "loaded", error=problem)
        # Readers take no lock: each table is replaced as a whole.
        self._usable, self._conflicts = usable, conflicts


def check_class(cls: object) -> None:
    """Raises PluginError unless `cls` is a strategy class that can be registered."""
    shown = f"{cls.__module__}.{cls.__qualname__}" if isinstance(cls, type) else repr(cls)
    if not isinstance(cls, type) or not issubclass(cls, Strategy):
        raise PluginError(f"{shown} is not a subclass of decoders.Strategy")
    if inspect.isabstract(cls):
        raise PluginError(f"{shown} does not implement: {', '.join(sorted(cls.__abstractmethods__))}")
    name = getattr(cls, "name", None)
    if not isinstance(name, str) or not re.fullmatch("[a-z][a-z0-9]*(_[a-z0-9]+)*", name):
        raise PluginError(f"{shown}.name must be a snake_case string, not {name!r}")
    settings = cls.settings_class
    if not isinstance(settings, type) or not issubclass(settings, Settings):
        raise PluginError(f"{shown}.settings_class must be a subclass of decoders.settings.Settings, not {settings!r}")


def canonical(name: str) -> str:
    """`name` as registry and lists compare it: lower case, ``-`` and ``.`` as ``_``."""
    return re.sub("[-_.]+", "_", name.strip()).lower()


_lock = threading.RLock()
_shared: Registry | None = None
_loading = False


def registry() -> Registry:
    """The registry of this process, loaded on first use; safe to call from any thread.

    Raises:
        PluginError: see :class:`Registry`; or a plugin asks for the registry while it is being imported.
    """
    global _shared, _loading
    if _shared is None:
        with _lock:
            if _loading:  # only the loading thread itself gets past the lock
                raise PluginError("a plugin must not ask for the registry while it is being loaded")
            if _shared is None:
                _loading = True
                try:
                    _shared = Registry()
                finally:
                    _loading = False
    return _shared


def reset_registry() -> None:
    """Forgets the shared registry, so that the next :func:`registry` looks again (tests, freshly installed plugins)."""
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


def _shown(info: PluginInfo) -> str:
    return f"{info.name!r} ({f'{info.provider} {info.version}'.strip()})"


def _reason(error: BaseException) -> str:
    """One line: what was raised and, if the plugin's own code raised it, where."""
    text = " ".join(str(error).split())
    if isinstance(error, PluginError | pluggy.PluginValidationError):
        return text
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if len(frames) > 1 else ""
    return f"{type(error).__name__}: {text}{where}"
