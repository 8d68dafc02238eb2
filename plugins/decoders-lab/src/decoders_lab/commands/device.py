"""``decoders bench device``: the speed of decoding on this device, compared with the speed of its memory."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from decoders.cli.benches import JsonFile, consoles, footnote, interrupted_by_sigterm, numbers, write_json
from decoders.cli.console import waiting

if TYPE_CHECKING:
    from rich.table import Table

    from ..device import Exactness, Figure


def device(
    model: Annotated[
        str, typer.Option(help='Folder, hub name or GGUF file, a shape such as llama-1b, or "demo".')
    ] = "demo",
    scale: Annotated[
        str | None,
        typer.Option(help="Pad the model to the size of a larger one: 110m, 0.5b, 1b or 3b; see decoders bench."),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16. Default: bfloat16; on a CPU float32.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 …; default: CUDA if there is one.")] = None,
    nodes: Annotated[str | None, typer.Option(help="Nodes of blocks. Default: 4,16,64,128; on a CPU 4,16.")] = None,
    prompt_length: Annotated[
        str | None, typer.Option(help="Tokens of prompts. Default: 64,512,2048; on a CPU 64,256.")
    ] = None,
    new_tokens: Annotated[
        int | None, typer.Option("--new-tokens", "-n", min=16, help="New tokens of a call. Default: 128; on a CPU 48.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Repeats of every measurement; the median counts.")] = 3,
    compile: Annotated[
        bool, typer.Option("--compile/--no-compile", help="Measure compiled steps; exactness is checked as by default.")
    ] = True,
    seconds: Annotated[
        float,
        typer.Option(
            min=0, help="After this time no further size of a block is measured: each may have to be compiled."
        ),
    ] = 60.0,
    json_file: JsonFile = None,
) -> None:
    """Measure this device in two minutes: copy speed, plain decoding, blocks of nodes, first token, sampling, exactness."""
    progress_console, console = consoles(json_file)
    counts = None if nodes is None else numbers(nodes, "--nodes takes nodes of a block such as 4,16")
    lengths = None if prompt_length is None else numbers(prompt_length, "--prompt-length takes tokens such as 64,512")
    with waiting(progress_console, "importing torch and transformers"):
        import torch

        from decoders import bench
        from decoders.bench import machine
        from decoders.bench.timed_call import vocabulary_size
        from decoders.cli.bench_run import Subjects
        from decoders.prompts.reading import read_prompts

        from ..device import DeviceBench, exactness, plain_decoding
        from ..scaling import ScaledSubjects

    on_cpu = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu")).type == "cpu"
    dtype = dtype or ("float32" if on_cpu else "bfloat16")
    size = new_tokens or (48 if on_cpu else 128)
    counts, lengths = (
        counts or ([4, 16] if on_cpu else [4, 16, 64, 128]),
        lengths or ([64, 256] if on_cpu else [64, 512, 2048]),
    )
    run = {
        "model": model, "scale": scale, "dtype": dtype, "new_tokens": size, "repeats": repeats, "compile": compile,
        "nodes": counts, "prompt_lengths": lengths,
    }  # fmt: skip
    figures: list[Figure] = []
    strategies: list[Exactness] = []
    facts: dict[str, Any] = {}

    def came(line: str) -> None:
        """Prints `line`, and writes the results so far to the JSON file, so that an interrupted run leaves them there."""
        progress_console.print(line)
        facts["copy_bandwidth"] = next((f.value * 1e9 for f in figures if f.name == "copy" and f.value), None)
        if json_file is not None and str(json_file) != "-":
            write_json(_results(facts, run, figures, strategies), json_file)

    with waiting(progress_console, f"loading {model} in {dtype}") as status, interrupted_by_sigterm():
        subjects = Subjects() if scale is None else ScaledSubjects(scale)
        target, tokenizer, draft = subjects.load(model, None, dtype, device)
        facts |= machine.facts(target.device)
        measured = DeviceBench(plain_decoding(target, compile), counts, lengths, size, repeats, seconds, status.update)
        with suppress(KeyboardInterrupt):
            for figure in measured.figures():
                figures.append(figure)
                came(f"{figure.name}: {_value(figure)} {_beside(figure)}".rstrip())
            if tokenizer is None:
                text = bench.random_workloads(vocabulary_size(target), [64], rows=2)[0]
            else:
                text = bench.workloads(tokenizer, read_prompts("code", 2), rows=2)[0]
            for strategy in exactness(target, draft, text, size, status.update):
                strategies.append(strategy)
                came(f"{strategy.strategy}: {'exact' if strategy.identical else strategy.reason}")
    name = ", ".join(filter(None, (model, getattr(target.config, "cost_scaled", ""))))
    console.print(device_table(figures, strategies, f"{name} · {dtype} · {facts['device']}"))
    console.print(footnote(facts | {"copy_bandwidth": facts.get("copy_bandwidth") or 0.0}), style="dim")
    if json_file is not None:
        write_json(_results(facts, run, figures, strategies), json_file)


def _results(
    facts: dict[str, Any], run: dict[str, Any], figures: Sequence[Figure], strategies: Sequence[Exactness]
) -> dict[str, Any]:
    results = {"figures": [asdict(f) for f in figures], "strategies": [asdict(s) for s in strategies]}
    return {"machine": facts, "run": run, **results}


def device_table(figures: Sequence[Figure], strategies: Sequence[Exactness], title: str) -> Table:
    """A table with a line for each figure and one line for exactness. Notes below it say what is missing, and which texts differ."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column()
    for figure in figures:
        table.add_row(figure.name, _value(figure), Text(_beside(figure)))
    compared = [s for s in strategies if s.identical is not None]
    count = f"{sum(bool(s.identical) for s in compared)} of {len(compared)}"
    table.add_row("exact", count, "greedy and sampled")
    notes = [f"{s.strategy}: {s.reason}" for s in strategies if not s.identical]
    if notes:
        table.caption, table.caption_justify = Text("\n".join(notes)), "left"
    return table


def _value(figure: Figure) -> str:
    return "–" if figure.value is None else f"{_number(figure.value)} {figure.unit}"


def _beside(figure: Figure) -> str:
    if figure.ratio is None:
        return figure.reason
    return f"{figure.ratio:.0%} of {figure.to}" if figure.to == "copy speed" else f"{figure.ratio:.2f} x {figure.to}"


def _number(value: float) -> str:
    """`value` as a text with three significant digits, or with all digits before the decimal point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
