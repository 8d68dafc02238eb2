"""Shared parts of the bench commands: options, progress, and the output of results to the console or a file."""

from __future__ import annotations

import contextlib
import inspect
import json
import math
import os
import signal
import sys
import threading
import time
import typing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..common.files import write_whole
from ..errors import SettingsError, installing
from .console import plain_console

if TYPE_CHECKING:
    from rich.console import Console


JsonFile = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE", help="Write all results to this file as JSON; - is standard output."),
]
Acceptance = Annotated[
    list[str] | None,
    typer.Option(
        help="Also measure a simulated drafter: 0.8 accepts each of five draft tokens with rate 0.8; 0.9,0.8,0.6 are "
        "the shares of drafts accepted up to token 1, 2, 3. Repeatable."
    ),
]


def pieces(texts: Sequence[str] | None) -> list[str] | None:
    """The values of an option that may be repeated and comma-separated, as one list. None if the option was not given."""
    from ..bench.variants import split

    return None if texts is None else [piece for text in texts for piece in split(text)]


def by_strategy(settings: dict[str, Any]) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Divides settings into the loop's settings and the settings of strategies, by strategy.

    Raises:
        SettingsError: a setting belongs neither to the loop nor to a named strategy, or its value is invalid.
    """
    from ..settings import RuntimeSettings

    loop_settings = {name: value for name, value in settings.items() if name in RuntimeSettings.model_fields}
    RuntimeSettings.parse(loop_settings)
    for name, value in settings.items():
        if name not in loop_settings and not isinstance(value, dict):
            raise SettingsError(f"--set {name}=…: name the strategy too, as in --set prompt_lookup.{name}=…")
    return loop_settings, {name: value for name, value in settings.items() if name not in loop_settings}


def numbers(text: str, expected: str = "--batch takes batch sizes such as 1,4") -> list[int]:
    """Parses ``"1,4"`` to a list of numbers without duplicates. expected: the beginning of the error message.

    Raises:
        SettingsError: `text` is not a list of positive whole numbers.
    """
    try:
        values = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        values = []
    if not values or min(values) < 1:
        raise SettingsError(f"{expected}, not {text!r}")
    return list(dict.fromkeys(values))


def with_options_of(
    function: Callable[..., Any], without: Sequence[str] = ()
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator for a command ``f(own…, **options)`` that replaces ``**options`` in its signature by the options of `function`.

    Options that are named in `without`, or that the command defines itself, are left out.
    """

    def with_options(command: Callable[..., Any]) -> Callable[..., Any]:
        hints = typing.get_type_hints(function, include_extras=True) | typing.get_type_hints(
            command, include_extras=True
        )
        own = [p for p in inspect.signature(command).parameters.values() if p.kind is not p.VAR_KEYWORD]
        options = [p for name, p in inspect.signature(function).parameters.items() if name not in without]
        parameters = [
            p.replace(kind=p.KEYWORD_ONLY, annotation=hints[p.name])
            for p in (*own, *(p for p in options if p.name not in {o.name for o in own}))
        ]
        vars(command)["__signature__"] = inspect.Signature(parameters)
        command.__annotations__ = {p.name: p.annotation for p in parameters}
        return command

    return with_options


#: Without a terminal, there are at least this many seconds between two lines of progress.
SECONDS_A_LINE = 5.0


@contextlib.contextmanager
def interrupted_by_sigterm() -> Iterator[None]:
    """A context manager: in its block, SIGTERM acts like Ctrl-C, so that a terminated run shows its results. Main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def check_writable(option: str, path: Path | None) -> None:
    """Raises SettingsError if `path`, the value of `option`, is a folder, is in a missing folder, or may not be written."""
    if path is None or str(path) == "-":
        return
    if path.is_dir() or not path.parent.is_dir():
        raise SettingsError(
            f"{option} {path}: " + ("is a folder" if path.is_dir() else f"there is no folder {path.parent}")
        )
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise SettingsError(f"{option} {path} may not be written")


def consoles(json_file: Path | None) -> tuple[Console, Console]:
    """Returns two consoles, for progress and for tables. Tables go to stderr if the JSON goes to stdout ("-").

    Raises:
        SettingsError: `json_file` cannot be written. (The check comes here, before minutes of measuring.)
    """
    check_writable("--json", json_file)
    return plain_console(stderr=True), plain_console(stderr=json_file is not None and str(json_file) == "-")


@contextlib.contextmanager
def progress_bar(console: Console, total: int) -> Iterator[Callable[..., None]]:
    """A progress bar of `total` calls. Yields a function that advances it by one call.

    The function takes a description and the remaining seconds. If the seconds are not given, it estimates them, assuming that all
    calls take equally long. Without a terminal, lines are printed instead: the first line at once, then at most one line in
    :data:`SECONDS_A_LINE` seconds. A line that comes sooner waits until this time has passed. Then it is printed, unless a later line
    has replaced it.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (BarColumn(20), MofNCompleteColumn(), TextColumn("{task.description}", markup=False))
    done, due, began = 0, -math.inf, time.monotonic()
    later = threading.Timer(0.0, lambda: None)

    def show(line: str, at: float) -> None:
        nonlocal due
        due = at + SECONDS_A_LINE
        console.print(line)

    def advance(what: str, left: float | None = None) -> None:
        nonlocal done, later
        later.cancel()
        now = time.monotonic()
        if left is None:
            left = (now - began) / done * (total - done) if done else math.inf
        done += 1
        what += f" · {duration(left)} left" if left < math.inf else ""
        if console.is_terminal:
            bar.update(task, advance=1, description=what)
        elif now >= due:
            show(f"{done}/{total} {what}", now)
        else:
            later = threading.Timer(due - now, show, [f"{done}/{total} {what}", due])
            later.daemon = True
            later.start()

    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total)
        try:
            yield advance
        finally:
            later.cancel()


def duration(seconds: float) -> str:
    """`seconds` as a text such as ``40 s`` or ``3 min``."""
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def footnote(facts: dict[str, Any]) -> str:
    """A line about the machine and the versions of the libraries. facts: from :func:`decoders.bench.machine.facts`."""
    from ..bench.machine import line

    missing = "" if facts["memory"] else f"; added memory not measured, it takes {installing('bench')}"
    return (
        f"{line(facts)}, copy bandwidth {facts['copy_bandwidth'] / 1e9:.1f} GB/s; "
        f"torch {facts['torch']}, transformers {facts['transformers']}, decoders {facts['decoders']}{missing}"
    )


def conclude(
    console: Console, json_file: Path | None, run: dict[str, Any], threads: int | None = None, **results: Any
) -> None:
    """Prints a line about the machine, and writes all results as JSON if requested.

    Args:
        run: the command's options, for the JSON file.
        threads: number of threads of the measured processes; None: this process was measured.
        results: lists of JSON-safe results, by name.

    Raises:
        SettingsError: see :func:`write_json`.
    """
    import torch

    from ..bench import machine

    cpu = torch.device("cpu")
    facts = machine.facts(cpu) | {"copy_bandwidth": machine.copy_bandwidth(cpu)}
    if threads is not None:
        facts["threads"] = threads
    console.print(footnote(facts), style="dim")
    if json_file is not None:
        write_json({"machine": facts, "run": run, **results}, json_file)


def write_json(result: dict[str, Any], path: Path) -> None:
    """Writes `result` to `path`, or to standard output for ``-``.

    Raises:
        SettingsError: `path` cannot be written.
    """
    text = json.dumps(result, indent=2, default=str) + "\n"
    if str(path) == "-":
        sys.stdout.write(text)
        return
    try:
        if path.is_file() or (path.parent.is_dir() and not path.exists()):
            # `write_whole` writes a temporary file first, so that an interrupted write leaves the old file.
            write_whole(path, text.encode())
        else:  # `path` is a pipe or a device
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"--json {path}: {error.strerror}") from error
