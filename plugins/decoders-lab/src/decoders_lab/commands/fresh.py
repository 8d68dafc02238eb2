"""``decoders bench fresh``: waiting times and memory of a new process."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from decoders.cli.benches import JsonFile, conclude, consoles, numbers, pieces
from decoders.cli.console import waiting
from decoders.cli.models import Threads
from decoders.errors import SettingsError, UnknownNameError


def fresh(
    models: Annotated[
        list[str] | None,
        typer.Option("--model", help='Folder, hub name, GGUF file or "demo"; comma-separated or repeated.'),
    ] = None,
    shapes: Annotated[
        list[str] | None,
        typer.Option("--shape", help="Shape with random weights, comma-separated or repeated: llama-110m …"),
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16; comma-separated.")] = "float32",
    strategies: Annotated[
        list[str] | None,
        typer.Option("--strategy", "-s", help="Strategies; each gets its own process. Default: autoregressive."),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="A setting of the loop in all calls, for instance compile=false."
        ),
    ] = None,
    prompt_length: Annotated[
        str, typer.Option(help="Random tokens of a prompt, comma-separated; calls use the first length, prefill all.")
    ] = "64,512,2048",
    new_tokens: Annotated[int, typer.Option("--new-tokens", "-n", min=2, help="New tokens of a call.")] = 128,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds in which methods take turns.")] = 3,
    history: Annotated[int, typer.Option(min=0, help="Tokens before a chat's second turn; 0: no chat.")] = 2000,
    question: Annotated[int, typer.Option(min=1, help="Tokens that the second turn adds.")] = 50,
    patience: Annotated[
        float, typer.Option(min=0, help="Seconds to wait for compilation in the background before taking turns.")
    ] = 60,
    again: Annotated[
        bool,
        typer.Option(
            "--again",
            help="Also measure a second process, which finds the first one's disk cache of torch.compile.",
        ),
    ] = False,
    baseline: Annotated[
        bool, typer.Option("--baseline/--no-baseline", help="Also measure a process with transformers' generate only.")
    ] = True,
    threads: Threads = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 …; default: CUDA if there is one.")] = None,
    json_file: JsonFile = None,
) -> None:
    """Measure first tokens, compilation, memory, prefill and a chat's second turn, in newly started processes.

    Prompts are random tokens, and no text ends early. torch.compile's disk cache is empty for the first process.
    """

    from decoders.cli.models import DTYPES

    status, console = consoles(json_file)
    lengths = tuple(numbers(prompt_length, "--prompt-length takes tokens such as 64,2000"))
    dtypes = pieces([dtype]) or []
    for name in dtypes:
        if name not in DTYPES[1:]:
            raise UnknownNameError("dtype", name, DTYPES[1:])

    from decoders.bench.shapes import SHAPES
    from decoders.registry import resolve_strategy
    from decoders.settings import RuntimeSettings, parse_assignments

    from ..fresh import Job, in_new_process
    from ..fresh_tables import fresh_tables

    config = parse_assignments(settings or [])
    RuntimeSettings.parse(config)
    for name in pieces(shapes) or ():
        if name not in SHAPES:
            raise UnknownNameError("shape", name, SHAPES)
    subjects = [*(pieces(shapes) or ()), *(pieces(models) or ())]
    if not subjects:
        raise SettingsError("name what to measure: --shape llama-110m, or --model with a folder")
    names = pieces(strategies) or ["autoregressive"]
    for name in names:
        if resolve_strategy(name, None, None).needs_assistant:
            raise SettingsError(
                f"{name} needs a draft model, and there is none in a new process: measure it with decoders bench"
            )
    processes: list[dict[str, Any]] = []
    for subject in subjects:
        for dtype_name in dtypes:
            runs: list[dict[str, Any]] = []
            plan = [("transformers", "")] if baseline else []
            plan += [(name, name) for name in names]
            for method, strategy in plan:
                job = Job(
                    subject=subject, dtype=dtype_name, strategy=strategy, config=config, prompt_lengths=lengths,
                    new_tokens=new_tokens, repeats=repeats, history=history, question=question, patience=patience,
                    threads=threads, device=device,
                )  # fmt: skip
                with (
                    tempfile.TemporaryDirectory(prefix="decoders-bench-", ignore_cleanup_errors=True) as cache,
                    waiting(status, f"{subject} in {dtype_name}: {method}") as line,
                ):
                    for turn in range(1 + (again and bool(strategy))):
                        label = method if not turn else f"{method}, disk cache warm"
                        figures = in_new_process(
                            job,
                            Path(cache),
                            lambda what: line.update(f"{subject} in {dtype_name}, {label}: {what}"),  # noqa: B023
                        )
                        labels = {"subject": subject, "shape": subject in SHAPES, "dtype": dtype_name, "method": label}
                        runs.append(labels | {"strategy": strategy, "config": config} | figures)
            for table in fresh_tables(runs):
                console.print(table)
            processes += runs
    options = {
        "prompt_lengths": lengths, "new_tokens": new_tokens, "repeats": repeats, "history": history,
        "question": question, "patience": patience, "threads": threads,
    }  # fmt: skip
    conclude(console, json_file, options, threads, processes=processes)
    if any("error" in run for run in processes):
        raise typer.Exit(1)
