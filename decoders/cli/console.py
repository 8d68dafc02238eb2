"""Consoles of the commands."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.status import Status


def plain_console(*, stderr: bool = False, quiet: bool = False) -> Console:
    """A console that shows text as it is: methods, models, patterns and extras have brackets, which rich takes for markup."""
    from rich.console import Console

    return Console(stderr=stderr, quiet=quiet, markup=False)


def waiting(console: Console, text: str) -> Status:
    """A spinner beside `text`, as it is."""
    from rich.text import Text

    return console.status(Text(text))
