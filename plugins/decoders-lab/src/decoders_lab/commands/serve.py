"""``decoders bench serve``: the time that a server adds to a request."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from decoders.cli.benches import JsonFile, conclude, consoles
from decoders.cli.console import waiting
from decoders.cli.models import Threads


def serve(
    model: Annotated[str, typer.Argument(help="Model: a folder, a name on the hub, or demo.")] = "demo",
    strategy: Annotated[str, typer.Option("--strategy", "-s", help="Strategy of all requests.")] = "autoregressive",
    prompt: Annotated[str, typer.Option(help="Prompt of all requests.")] = "def add(a, b):",
    new_tokens: Annotated[int, typer.Option("--new-tokens", "-n", min=1, help="New tokens of each request.")] = 16,
    requests: Annotated[int, typer.Option(min=1, help="Number of requests, with and without a server.")] = 100,
    dtype: Annotated[str, typer.Option(help="Precision of the model.")] = "auto",
    compile: Annotated[bool, typer.Option(help="Run compiled steps.")] = False,
    threads: Threads = None,
    json_file: JsonFile = None,
) -> None:
    """Measure the time that `decoders serve` adds to a request: equal requests to a scheduler and through HTTP, in turns."""
    from rich.table import Table

    from decoders.cli.serve import check_installed

    check_installed()
    progress_console, console = consoles(json_file)

    from decoders.cli import models

    from ..serving import overhead

    with waiting(progress_console, f"loading {model}"):
        loaded, tokenizer = models.load(model, dtype)
    with waiting(progress_console, "asking"):
        results = overhead(loaded, tokenizer, strategy, prompt, new_tokens, requests, compile)
    table = Table(
        "",
        "scheduler ms",
        "server ms",
        "added ms",
        title=f"{model}, {requests} requests, {new_tokens} new tokens, medians",
    )
    for result in results:
        table.add_row(
            result.method, *(f"{1e3 * value:.2f}" for value in (result.scheduler, result.server, result.added))
        )
    console.print(table)
    run = {
        "model": model, "strategy": strategy, "requests": requests, "new_tokens": new_tokens, "dtype": dtype,
        "compile": compile,
    }  # fmt: skip
    conclude(console, json_file, run, results=[asdict(result) for result in results])
