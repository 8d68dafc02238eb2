"""Progress of long work on a console."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.console import Console


class AdvanceBar(Protocol):
    """Advances a progress bar by `count`, and shows `note` beside it."""

    def __call__(self, count: int, note: str = "") -> None: ...


@contextmanager
def progress_bar(console: Console | None, description: str, total: int, done: int = 0) -> Iterator[AdvanceBar]:
    """Yields a function that advances a progress bar from `done` to `total`. Shows no bar without a console, or without work left."""
    if console is None or done >= total:
        yield lambda count, note="": None
        return
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(description, total=total, completed=done, note="")
        yield lambda count, note="": progress.update(task, advance=count, note=note)
