"""What the model cards of trained networks share."""

from __future__ import annotations


def command_lines(command: str | None) -> str:
    """The command that trained it as a block of a shell, with empty lines around it; nothing where it was no command."""
    return f"\n```sh\n{command}\n```\n" if command else ""
