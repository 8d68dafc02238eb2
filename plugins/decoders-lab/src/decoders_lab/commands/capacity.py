"""``decoders bench capacity``: whether a step's time depends on the cache's capacity."""

from __future__ import annotations

from typing import Annotated

import typer

from decoders.cli.benches import JsonFile, conclude, consoles, numbers, progress_bar
from decoders.cli.console import waiting
from decoders.cli.models import Threads


def capacity(
    model: Annotated[str, typer.Argument(help="Folder, hub name, GGUF file, shape, or demo.")] = "demo",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    batch: Annotated[str, typer.Option(help="Batch sizes, comma-separated.")] = "1",
    repeats: Annotated[int, typer.Option(min=1, help="Rounds.")] = 5,
    compile: Annotated[bool, typer.Option("--compile/--no-compile", help="Measure compiled steps.")] = True,
    threads: Threads = None,
    json_file: JsonFile = None,
) -> None:
    """Compare the step times of plain decoding in a small and in a large cache."""
    progress_console, console = consoles(json_file)
    sizes = numbers(batch)

    from decoders.bench import strategy_methods
    from decoders.cli.bench_run import Subjects

    from ..capacity import SLOTS, capacity_table, check_capacity

    with waiting(progress_console, f"loading {model}"):
        target, _, _ = Subjects().load(model, None, dtype, None)
    methods = strategy_methods(target, ["autoregressive"], decoders_config={"compile": compile})
    costs = []
    with progress_bar(progress_console, len(sizes) * len(SLOTS) * (repeats + 1)) as advance:
        for rows in sizes:
            costs += check_capacity(methods, rows, slots=SLOTS, repeats=repeats, progress=advance)
    console.print(capacity_table(costs))
    run = {"model": model, "dtype": dtype, "batches": sizes, "repeats": repeats, "compile": compile}
    conclude(console, json_file, run, capacity=[cost.as_dict() for cost in costs])
