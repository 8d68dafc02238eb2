"""``decoders bench precision``: what quantized weights and a quantized cache cost in accuracy, and save in time and memory."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from decoders.cli.benches import JsonFile, conclude, consoles, numbers, pieces, progress_bar
from decoders.cli.console import waiting
from decoders.cli.models import Threads
from decoders.errors import UnknownNameError

KNOWN = ("int8", "int4", "kv:int8")


def precision(
    model: Annotated[str, typer.Argument(help="Model: a folder, a name on the hub, or demo.")] = "demo",
    precisions: Annotated[
        list[str] | None,
        typer.Option("--precision", "-p", help="int8, int4, kv:int8, or several with a +, such as int4+kv:int8."),
    ] = None,
    text: Annotated[
        list[Path] | None, typer.Option(help="Text files to read; repeatable. Default: source code of this package.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=64, help="Tokens read of each text.")] = 512,
    dtype: Annotated[str, typer.Option(help="The model's own precision.")] = "bfloat16",
    nodes: Annotated[str, typer.Option(help="Nodes of the steps that are timed.")] = "4,8,12,20",
    repeats: Annotated[int, typer.Option(min=1, help="Timed steps of each precision.")] = 20,
    compile: Annotated[bool, typer.Option(help="Time compiled steps.")] = False,
    threads: Threads = None,
    json_file: JsonFile = None,
) -> None:
    """Measure what quantized weights and a quantized cache change: perplexity, the next token, step times, memory."""
    progress_console, console = consoles(json_file)
    counts = numbers(nodes, "--nodes takes nodes of a block such as 4,8,12,20")
    names = pieces(precisions) or list(KNOWN)
    for part in (part for name in names for part in name.split("+")):
        if part not in KNOWN:
            raise UnknownNameError("precision", part, KNOWN)

    import torch

    from decoders.cli.models import load

    from ..precision import measure, precision_table

    with waiting(progress_console, f"loading {model}"):
        loaded, tokenizer = load(model, dtype)
    texts = [file.read_text(encoding="utf-8") for file in text] if text else [_default_text()]
    ids = [torch.tensor(tokenizer(whole)["input_ids"][:tokens]) for whole in texts]
    with progress_bar(progress_console, 2) as advance:
        costs = measure(loaded, names, ids, counts, repeats, compile, advance=advance)
    console.print(precision_table(costs, f"{model}, {dtype}, {sum(map(len, ids)):,} tokens"))
    run = {
        "model": model, "dtype": dtype, "tokens": [len(part) for part in ids], "repeats": repeats, "compile": compile
    }  # fmt: skip
    conclude(console, json_file, run, precisions=[asdict(cost) for cost in costs])


def _default_text() -> str:
    """The text that is measured without ``--text``."""
    from decoders import enabling, hookspecs, strategy, tree

    return "\n\n".join(
        Path(str(module.__file__)).read_text(encoding="utf-8") for module in (strategy, tree, hookspecs, enabling)
    )
