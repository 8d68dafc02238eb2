"""The registered objects (strategies, grammars, plugins …) as JSON-safe data, for commands that only list them.

If possible, files are read instead of the registry, because the registry imports torch. ``builtin.json`` lists the objects of this
package. If plugins are installed, a list of all objects is kept in the user's cache until a file of the plugins or of this package
changes. If a plugin fails, nothing is cached.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import typer
from typer.core import TyperGroup
from typer.main import get_command

from ..common.files import cache_folder, write_whole
from ..common.version import __version__
from ..errors import PluginError

if TYPE_CHECKING:
    from ..registry import Entry

Items = list[dict[str, Any]]

#: The whole command line. :mod:`decoders.cli` replaces this empty object.
command_line = typer.Typer()

#: The objects of this package, by kind. Written by docs/generate_reference.py.
BUILTIN_FILE = Path(__file__).with_name("builtin.json")
#: If one of these environment variables is set, the registry is read instead of a file.
_LISTS = ("DECODERS_PLUGINS_BLOCK", "DECODERS_PLUGINS_ALLOW", "DECODERS_PLUGINS_STRICT")
#: Commands of decoders-lab, for the message if it is not installed.
OF_LAB = (
    "bench beside", "bench load-beside", "bench capacity", "bench device", "bench fresh", "bench grammar", "bench precision",
    "bench sampling", "bench serve", "train demo",
)  # fmt: skip


def catalogue(kind: str) -> Items:
    """All objects of one kind (:data:`KINDS`), in the order in which commands list them. The dicts are described at :func:`taken`.

    Raises:
        PluginError: ``DECODERS_PLUGINS_STRICT=1`` is set, and a plugin fails to load or two plugins claim one name.
    """
    if "decoders.registry.plugins" in sys.modules or any(map(os.environ.get, _LISTS)):
        return taken(kind)
    points = tuple(metadata.entry_points(group="decoders"))
    file, state = BUILTIN_FILE, ""
    if points:
        file = cache_folder() / "plugins" / f"{hashlib.sha256(sys.prefix.encode()).hexdigest()[:16]}.json"
        state = _state(points)
    content = _read(file)
    if content.get("state") != state or kind not in content:
        content = {"state": state} | {every: taken(every) for every in KINDS}
        if points and all(plugin["status"] != "failed" for plugin in content["plugins"]):
            with suppress(OSError):  # if the file cannot be written, the next call reads the registry, too
                write_whole(file, serialized(content).encode())
    return cast(Items, content[kind])


def taken(kind: str) -> Items:
    """The objects of one kind (:data:`KINDS`) from the registry, not from a cached file.

    Each dict has the object's name, provider and version, the attributes of its class in :data:`_ATTRIBUTES` and, for strategies, the
    settings. Grammars of this package are left out, because ``decoders grammars`` reads them from their files.
    """
    from ..registry import registry
    from ..registry.kinds import DISTRIBUTION

    if kind == "plugins":
        unusable = unusable_commands()
        items = [
            asdict(info) | ({"status": "failed", "error": unusable[info.key]} if info.key in unusable else {})
            for info in registry().plugins()
        ]
    else:
        entries: Iterable[Entry[Any]] = getattr(registry(), kind)().values()
        if kind == "grammars":
            entries = [entry for entry in entries if entry.provider != DISTRIBUTION]
        items = [_facts(entry, kind) for entry in entries]
    return cast(Items, json.loads(json.dumps(items, default=str)))  # the types are then the same as from a file


def added_commands() -> list[str]:
    """The names of the commands that plugins add. Finds them without importing torch if possible."""
    return [item["name"] for item in catalogue("commands")]


def _commands_of_plugins() -> dict[str, Callable[..., None]]:
    from ..registry import registry

    return {name: entry.cls for name, entry in registry().commands().items()}


def _check_name(name: str, names: Iterable[str]) -> None:
    """Raises PluginError if a plugin's command `name` clashes with a command of this package or of plugins (`names`)."""
    command: Any = get_command(command_line)
    for part in name.split():
        if not hasattr(command, "commands"):
            break
        if part not in command.commands:
            if name.split()[0] in names and name != part:
                raise PluginError(f"command {name!r} cannot be used: {name.split()[0]!r} is a command, not a group")
            return
        command = command.commands[part]
    raise PluginError(
        f"command {name!r} cannot be used: {command.name!r} is a command of this package, which keeps its name"
    )


def as_command(function: Callable[..., None], name: str) -> Any:
    """`function` as a command called `name`. Raises PluginError if Typer does not support its parameters."""
    made = typer.Typer(add_completion=False, rich_markup_mode=None)
    made.command(name.rpartition(" ")[2])(function)
    try:
        return get_command(made)
    except Exception as error:
        raise PluginError(f"command {name!r} cannot be used: {type(error).__name__}: {error}") from error


def unusable_commands() -> dict[str, str]:
    """Maps the key of each plugin with unusable commands to an error message. A plugin's messages are joined to one text."""
    from ..registry import registry

    wrong: dict[str, str] = {}
    claimed = [(info.key, name) for info in registry().plugins() for name in info.commands]
    commands = _commands_of_plugins() if claimed else {}
    for key, name in claimed:
        try:
            _check_name(name, commands)
            if (function := commands.get(name)) is not None:
                as_command(function, name)
        except PluginError as error:
            wrong[key] = f"{wrong[key]}; {error}" if key in wrong else str(error)
    return wrong


class ExtensibleGroup(TyperGroup):
    """A group of commands that includes commands of plugins. These are looked up only for an unknown name and for the help."""

    def list_commands(self, ctx: Any) -> list[str]:
        prefix = self._prefix()
        added = [name.removeprefix(prefix).partition(" ")[0] for name in added_commands() if name.startswith(prefix)]
        return list(dict.fromkeys((*super().list_commands(ctx), *added)))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = super().get_command(ctx, cmd_name)
        if command is not None:
            return command
        added, name = added_commands(), self._prefix() + cmd_name
        if name in added and (function := _commands_of_plugins().get(name)) is not None:
            try:
                return as_command(function, cmd_name)
            except PluginError as error:
                return as_command(_refusing(error), cmd_name)
        if any(other.startswith(f"{name} ") for other in added):
            return ExtensibleGroup(name=cmd_name, help="Commands of plugins.", no_args_is_help=True)
        return None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Like Typer's method, but also suggests names that begin with the given word."""
        try:
            return super().resolve_command(ctx, args)
        except Exception as error:
            if args and (name := self._prefix() + args[0]) in OF_LAB:
                error.possibilities = ()  # type: ignore[attr-defined]
                error.message = (  # type: ignore[attr-defined]
                    f"'{name}' is a command of decoders-lab, a separate distribution: pip install ./plugins/decoders-lab in a clone"
                )
                raise
            begun = [name for name in self.list_commands(ctx) if args and name.startswith(args[0])]
            if begun and "Did you mean" not in (message := getattr(error, "message", "Did you mean")):
                error.message = f"{message} Did you mean {' or '.join(map(repr, begun))}?"  # type: ignore[attr-defined]
            raise

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Like Click's method, but does not shorten the commands' descriptions."""
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl([(name, c.get_short_help_str(limit=200)) for name, c in commands if c and not c.hidden])

    def _prefix(self) -> str:
        return "" if self.name == "decoders" else f"{self.name} "


def _refusing(error: PluginError) -> Callable[..., None]:
    def refuse(arguments: list[str] = typer.Argument(None, help="Not read.")) -> None:
        raise error

    refuse.__doc__ = f"Of a plugin, and unusable: {error}"
    return refuse


#: For each kind of object, the attributes of its class that are listed.
_ATTRIBUTES = {
    "strategies": ("summary", "exact", "needs_assistant", "needs_grammar", "needs"),
    "verifiers": ("summary", "exact", "trees", "coupled"),
    "grammar_backends": ("summary",),
    "grammars": (),
    "commands": (),
}
KINDS = (*_ATTRIBUTES, "plugins")


def _facts(entry: Entry[Any], kind: str) -> dict[str, Any]:
    facts = {attribute: getattr(entry.cls, attribute) for attribute in _ATTRIBUTES[kind]}
    facts = {"name": entry.name} | facts | {"provider": entry.provider, "version": entry.version}
    if kind == "strategies":
        facts["settings"] = [
            {
                "name": name,
                "default": None if field.is_required() else field.get_default(call_default_factory=True),
                "required": field.is_required(),
                "description": field.description or "",
            }
            for name, field in entry.cls.settings_class.model_fields.items()
        ]
    return facts


def serialized(content: dict[str, Any]) -> str:
    """`content` as JSON text."""
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def _read(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _state(points: Iterable[metadata.EntryPoint]) -> str:
    """A hash of the installed plugins, and of the paths and modification times of all files of the plugins and of this package."""
    found: list[Any] = [__version__, sys.version]
    found += [(p.name, p.value, p.dist.name if p.dist else "", p.dist.version if p.dist else "") for p in points]
    folders = [Path(__file__).parents[1]]
    # The package is the text before the first dot of `value`. `point.module` would raise an error if the value names no module.
    for package in sorted({re.split(r"\W", point.value)[0] for point in points}):
        spec = importlib.util.find_spec(package) if package else None
        if spec is None:
            found.append(package)
            continue
        folders += [Path(place) for place in spec.submodule_search_locations or [spec.origin or package]]
    for folder in folders:
        for file in sorted(folder.rglob("*.py")) if folder.is_dir() else [folder]:
            found.append((str(file), _changed(file)))
    # The times of site-packages are included because a plugin's dependency may be installed or removed.
    found += [_changed(Path(sysconfig.get_path(name))) for name in ("purelib", "platlib")]
    return hashlib.sha256(repr(found).encode()).hexdigest()[:32]


def _changed(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
