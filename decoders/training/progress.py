"""Progress of long work on a console."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.console import Console


class Advance(Protocol):
    """Advances a progress bar by `count`, and shows `note` beside it."""

    def __call__(self, count: int, note: str = "") -> None: ...


@contextmanager
def progress_bar(console: Console | None, description: str, total: int, done: int = 0) -> Iterator[Advance]:
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


class Pace:
    """The loss and the speed of training, smoothed over about twenty steps.

    Args:
        positions: number of tokens or positions that a step learns from.
    """

    def __init__(self, positions: int) -> None:
        self.positions = positions
        self.loss = self.speed = 0.0
        self._began = False

    def update(self, loss: float, seconds: float) -> None:
        """Adds a step to the averages. It took `seconds` and had the loss `loss`."""
        speed = self.positions / max(seconds, 1e-9)
        keep = 0.95 if self._began else 0.0
        self.loss = keep * self.loss + (1 - keep) * loss
        self.speed = keep * self.speed + (1 - keep) * speed
        self._began = True

    def __str__(self) -> str:
        return f"loss {self.loss:.3f}, {self.speed:,.0f} tokens/s"
