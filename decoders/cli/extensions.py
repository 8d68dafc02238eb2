"""Commands that plugins add, through the hook ``decoders_commands``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperGroup

from ..errors import PluginError
from .catalogue import added_commands, as_command


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

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """As click does it, with whole sentences."""
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl([(name, c.get_short_help_str(limit=200)) for name, c in commands if c and not c.hidden])

    def _prefix(self) -> str:
        return f"{self.name} " if self.name in ("bench", "train") else ""


def _refusing(error: PluginError) -> Callable[..., None]:
    def refuse(arguments: list[str] = typer.Argument(None, help="Not read.")) -> None:
        raise error

    refuse.__doc__ = f"Of a plugin, and unusable: {error}"
    return refuse
