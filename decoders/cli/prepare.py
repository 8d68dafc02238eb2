"""``decoders warmup``, ``calibrate`` and ``advise``: compile a model ahead of time, measure its steps, and recommend a strategy."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import amount
from .benches import JsonFile, consoles, duration, write_json
from .console import plain_console, waiting
from .models import DTYPE, Assistant, Device, Dtype, Json, ModelName, Threads, known_strategies

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from ..bench.advice import Advice
    from ..enabling import Calibration, Warmup


def warmup(
    model: ModelName,
    strategies: Annotated[
        list[str] | None,
        typer.Option(
            "--strategy",
            "-s",
            callback=known_strategies,
            help="Strategy to compile for. Repeatable. Default: autoregressive and prompt_lookup.",
        ),
    ] = None,
    assistant: Assistant = None,
    rows: Annotated[
        list[int] | None, typer.Option(min=1, help="Batch size to compile for. Repeatable. Default: 1.")
    ] = None,
    sampling: Annotated[
        bool, typer.Option("--sampling", help="Compile sampling, too. Default: only greedy decoding.")
    ] = False,
    dtype: Dtype = DTYPE,
    device: Device = None,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Compile a model ahead of time into torch.compile's cache on disk, and print how long that took."""
    from . import models

    names = strategies or ["autoregressive", "prompt_lookup"]
    console = plain_console(stderr=True, quiet=as_json)
    with waiting(console, f"loading {model}"):
        import decoders

        needs_draft = models.needs_assistant(names, assistant, model)
        loaded, tokenizer = models.load(model, dtype, device)
        draft = models.load_assistant(assistant, model, dtype, needs_draft, device)
    with waiting(console, "preparing and compiling"):
        done = decoders.warmup(
            loaded, strategies=names, rows=rows or [1], assistant_model=draft, sampling=sampling, tokenizer=tokenizer
        )
    if as_json:
        typer.echo(json.dumps(asdict(done), indent=2))
        return
    out = plain_console()
    for line in warmup_lines(done):
        out.print(line)


def warmup_lines(done: Warmup) -> Iterator[str]:
    """Yields the lines that ``decoders warmup`` prints: what was compiled, and the time for it."""
    yield f"model prepared in {done.pack_seconds:.1f} s"
    for part in done.parts:
        graphs = f"{amount(part.compilations, 'graph')} compiled"
        of = f"{part.strategy}, {amount(part.rows, 'row')}{', sampled' if part.sampling else ''}"
        yield f"{of}: {part.seconds:.1f} s, {graphs}"


def calibrate(
    model: ModelName,
    assistant: Annotated[
        str | None,
        typer.Option(help='Draft model to measure as well: folder or Hub name; "demo" is the one in this package.'),
    ] = None,
    rows: Annotated[list[int] | None, typer.Option(min=1, help="Batch size. Repeatable. Default: 1.")] = None,
    context: Annotated[
        list[int] | None, typer.Option(min=1, help="Context length, in tokens. Repeatable. Default: 64 and 2048.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="Time limit per model, in seconds.")] = 10.0,
    compiled: Annotated[
        bool, typer.Option("--compile", help="Run torch.compile first, and measure compiled steps.")
    ] = False,
    dtype: Dtype = DTYPE,
    device: Device = None,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Measure the time of verification steps of different numbers of tokens, store it for strategy auto, and print it."""
    from . import models

    console = plain_console(stderr=True, quiet=as_json)
    with waiting(console, f"loading {model}"):
        import decoders

        loaded, tokenizer = models.load(model, dtype, device)
        draft = models.load_assistant(assistant, model, dtype, False, device)
    with waiting(console, "measuring"):
        done = decoders.calibrate(
            loaded, rows=rows or [1], contexts=context or [64, 2048], assistant_model=draft, seconds=seconds,
            tokenizer=tokenizer, decoders_config={"compile": compiled},
        )  # fmt: skip
    if as_json:
        curves = {"curve": done.curve.model_dump(), "assistant": done.assistant and done.assistant.model_dump()}
        strategies = [asdict(cost) for cost in done.strategies]
        typer.echo(json.dumps({**curves, "strategies": strategies, "path": str(done.path)}, indent=2))
        return
    out = plain_console()
    out.print(_curves(done))
    out.print(_strategies(done))
    out.print(f"kept as {done.path}", soft_wrap=True)


def _curves(done: Calibration) -> Table:
    from rich.table import Table

    curves = [("target", done.curve), *([("draft", done.assistant)] if done.assistant is not None else [])]
    nodes = sorted({point.nodes for _, curve in curves for point in curve.points})
    table = Table(title="milliseconds per step, by nodes of the block", box=None, title_justify="left")
    for heading in ("", *map(str, nodes)):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for name, curve in curves:
        lines = sorted({(p.compiled, p.rows, p.context) for p in curve.points})
        for compiled, rows, context in lines:
            of = {
                p.nodes: p.seconds for p in curve.points if (p.compiled, p.rows, p.context) == (compiled, rows, context)
            }
            figures = [f"{1e3 * of[n]:.3g}" if n in of else "" for n in nodes]
            tier = "compiled" if compiled else "uncompiled"
            table.add_row(f"{name}, {tier}, {rows} x {context}", *figures)
    return table


def _strategies(done: Calibration) -> Table:
    from rich.table import Table

    table = Table(title="microseconds per step of a strategy's own work, one row", box=None, title_justify="left")
    for heading in ("strategy", "propose", "observe", "whole step"):
        table.add_column(heading, justify="left" if heading == "strategy" else "right")
    for cost in done.strategies:
        table.add_row(cost.strategy, *(f"{1e6 * x:.0f}" for x in (cost.propose, cost.observe, cost.step)))
    return table


def advise(
    model: Annotated[
        str,
        typer.Argument(
            help='Folder, Hub name or GGUF file of a causal language model, a shape as in bench --shape, or "demo", the '
            "model in this package."
        ),
    ],
    prompts: Annotated[
        str | None,
        typer.Option(
            help="Your prompts: a file (text, or JSON lines with text or messages), or kinds of prompts as in bench --prompts."
        ),
    ] = None,
    draft: Annotated[str | None, typer.Option(help="Draft model to try as well: folder or Hub name.")] = None,
    seconds: Annotated[
        float,
        typer.Option(
            min=0.1, help="Time limit in seconds, without loading. Compiled steps are measured only from 120 on."
        ),
    ] = 150.0,
    compile: Annotated[bool, typer.Option("--compile/--no-compile", help="Also measure compiled steps.")] = True,
    dtype: Dtype = DTYPE,
    device: Device = None,
    threads: Threads = None,
    json_file: JsonFile = None,
) -> None:
    """Recommend a strategy and its settings for a model, from measurements of two to three minutes.

    Speed depends on the prompts: give your own with --prompts. `decoders bench` measures more, and for longer.
    """
    progress_console, console = consoles(json_file)
    with waiting(progress_console, f"loading {model}") as status:
        import decoders

        from ..bench.shapes import SHAPES
        from ..prompts.reading import read_prompts
        from .bench_run import Subjects

        contents = None if prompts is None else [content for _, _, content in read_prompts(prompts, None)]
        number_format = "float32" if dtype == "auto" and model in SHAPES else dtype
        target, tokenizer, assistant = Subjects().load(model, draft, number_format, device)

        def told(what: str, left: float) -> None:
            status.update(f"{what} · at most {duration(left)} left" if left else what)

        advice = decoders.advise(
            target,
            contents,
            tokenizer=tokenizer,
            assistant_model=assistant,
            seconds=seconds,
            compile=compile,
            progress=told,
        )
    print_advice(advice, console)
    if json_file is not None:
        write_json(advice.as_dict(), json_file)


def print_advice(advice: Advice, console: Console) -> None:
    """Prints the measurements as tables, the recommendation with its code, and further advice."""
    from rich.text import Text

    from ..bench.tables import fitting, speed_table
    from ..bench.verdict import pooled

    tiers = {
        "uncompiled": [r for r in advice.records if r.compiled_share != 1],
        "compiled": [r for r in advice.records if r.compiled_share == 1],
    }
    together = {name: next(iter(pooled(records).values())) for name, records in tiers.items() if records}
    for table in fitting(speed_table(together), console.width):
        console.print(table)
    if advice.busy:
        console.print(advice.busy, style="yellow")
    console.print(Text(advice.headline, style="bold"))
    if advice.code:
        console.print(f"    {advice.code}", style="green", soft_wrap=True)
    for line in advice.lines:
        console.print(line)
    console.print(f"{advice.measured}. decoders bench measures more.", style="dim")
