"""Commands that plugins add, through the hook ``decoders_commands``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from ..errors import PluginError
from .catalogue import catalogue


class ExtensibleGroup(TyperGroup):
    """A group of commands with those that plugins add to it. They are asked when a name is none of ours, and for the help."""

    def list_commands(self, ctx: Any) -> list[str]:
        prefix = self._prefix()
        added = [name.removeprefix(prefix) for name in added_commands() if name.startswith(prefix)]
        return [*super().list_commands(ctx), *(name for name in added if " " not in name)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = super().get_command(ctx, cmd_name)
        if command is None and (function := added_commands().get(self._prefix() + cmd_name)) is not None:
            try:
                return as_command(function, cmd_name)
            except PluginError as error:
                return as_command(_refusing(error), cmd_name)
        return command

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """As typer does it, but the beginning of a name is close to it."""
        try:
            return super().resolve_command(ctx, args)
        except Exception as error:
            begun = [name for name in self.list_commands(ctx) if args and name.startswith(args[0])]
            if begun and "Did you mean" not in (message := getattr(error, "message", "Did you mean")):
                error.message = f"{message} Did you mean {' or '.join(map(repr, begun))}?"  # type: ignore[attr-defined]
            raise

    def _prefix(self) -> str:
        return f"{self.name} " if self.name in ("bench", "train") else ""


def added_commands() -> dict[str, Callable[..., None]]:
    """What plugins add, by name. Where none adds any, torch is not imported to find that out."""
    if not catalogue("commands"):
        return {}
    from ..plugins import registry
    from ..registry.kinds import DISTRIBUTION

    entries = registry().commands()
    return {name: entry.cls for name, entry in entries.items() if entry.provider != DISTRIBUTION}


def as_command(function: Callable[..., None], name: str) -> Any:
    """`function` as a command.

    Raises:
        PluginError: Typer cannot read its parameters.
    """
    made = typer.Typer(add_completion=False)
    made.command(name.rpartition(" ")[2])(function)
    try:
        return get_command(made)
    except Exception as error:
        raise PluginError(f"command {name!r} cannot be used: {type(error).__name__}: {error}") from error


def unusable_commands() -> dict[str, str]:
    """What is wrong with commands of plugins, by the plugin's key."""
    from ..plugins import registry

    wrong: dict[str, str] = {}
    for info in registry().plugins():
        for name in info.commands:
            try:
                if (function := added_commands().get(name)) is not None:
                    as_command(function, name)
            except PluginError as error:
                wrong[info.key] = f"{wrong[info.key]}; {error}" if info.key in wrong else str(error)
    return wrong


def _refusing(error: PluginError) -> Callable[..., None]:
    def refuse(arguments: list[str] = typer.Argument(None, help="Not read.")) -> None:
        raise error

    refuse.__doc__ = f"Of a plugin, and unusable: {error}"
    return refuse
