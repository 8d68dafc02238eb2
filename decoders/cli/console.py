"""The consoles to which commands print."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.status import Status

#: Width of output that goes to a file or a pipe, in columns.
FILE_WIDTH = 200


def plain_console(*, stderr: bool = False, quiet: bool = False) -> Console:
    """A console that reads no markup, because names of methods, models, patterns and extras contain brackets."""
    from rich.console import Console

    console = Console(stderr=stderr, quiet=quiet, markup=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = FILE_WIDTH
    return console


def waiting(console: Console, text: str) -> Status:
    """A spinner beside `text`. If `console` writes to stderr and stderr is not a terminal, texts are printed as lines instead."""
    from rich.status import Status
    from rich.text import Text

    if console.is_terminal or not console.stderr:
        return console.status(Text(text))

    class Lines(Status):
        def start(self) -> None:
            self.console.print(self.status)

        def stop(self) -> None:
            pass

        def update(self, status: RenderableType | None = None, **options: Any) -> None:
            super().update(status, **options)
            if status is not None:
                self.console.print(status)

    return Lines(Text(text), console=console)
