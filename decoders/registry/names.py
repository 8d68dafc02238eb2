"""Who has which name: the claims of all plugins on the names of one kind, settled."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, Literal

from ..errors import PluginError, UnknownNameError
from .kinds import Kind, Provided

#: Plugin name of what this package provides itself, and the distribution it comes with.
BUILTIN, DISTRIBUTION = "builtin", "hf-decoders"
#: Provider of plugins that were registered by hand.
THIS_PROCESS = "(this process)"

Status = Literal["loaded", "blocked", "failed", "conflict"]


@dataclass(frozen=True)
class PluginInfo:
    """A plugin as ``decoders plugins`` lists it.

    Attributes:
        name: entry-point name.
        version: of the distribution it comes with.
        provider: the name of that distribution.
        hooks: hooks it implements.
        strategies: names it claims, usable or not.
        verifiers: likewise.
        grammar_backends: likewise.
        grammars: likewise.
        observers: likewise.
        commands: likewise.
        status: "loaded", "blocked" (by a list), "failed" (nothing of it is used), "conflict" (a name is also claimed by
            another plugin; its other names are usable).
        error: why it is not simply loaded.
    """

    name: str
    version: str
    provider: str
    hooks: tuple[str, ...] = ()
    strategies: tuple[str, ...] = ()
    verifiers: tuple[str, ...] = ()
    grammar_backends: tuple[str, ...] = ()
    grammars: tuple[str, ...] = ()
    observers: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()
    status: Status = "loaded"
    error: str | None = None

    @property
    def key(self) -> str:
        """What tells it from all other plugins: several distributions may use one entry-point name."""
        return f"{self.provider}:{self.name}"

    def __str__(self) -> str:
        return f"{self.name!r} ({f'{self.provider} {self.version}'.strip()})"


@dataclass(frozen=True)
class Entry(Generic[Provided]):
    """What is usable under a name: its class (of a grammar or command what the plugin gave), and its distribution and version."""

    name: str
    cls: type[Provided]
    provider: str
    version: str


@dataclass(frozen=True)
class Names(Generic[Provided]):
    """The settled names of one kind.

    Attributes:
        kind: whose names these are.
        usable: entries by name.
        conflicts: names that nobody has since several claim them, with the message.
        lost: messages by plugin key, for each name that the plugin claims and did not get.
    """

    kind: Kind[Provided]
    usable: Mapping[str, Entry[Provided]]
    conflicts: Mapping[str, str]
    lost: Mapping[str, list[str]]

    def find(self, name: str) -> type[Provided]:
        """The class called `name`; ``-`` and ``_`` are the same.

        Raises:
            PluginError: several plugins claim the name.
            UnknownNameError: nobody does.
        """
        wanted = canonical(name)
        if wanted in self.conflicts:
            raise PluginError(self.conflicts[wanted])
        if wanted not in self.usable:
            raise UnknownNameError(self.kind.noun, name, self.usable)
        return self.usable[wanted].cls


def settle(kind: Kind[Provided], claims: Iterable[tuple[PluginInfo, Mapping[str, type[Provided]]]]) -> Names[Provided]:
    """Decides who gets each name. A built-in keeps its own; among others, a clash leaves nobody the name.

    Args:
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


def canonical(name: str) -> str:
    """`name` as registry and lists compare it: lower case, ``-`` and ``.`` as ``_``."""
    return re.sub("[-_.]+", "_", name.strip()).lower()
