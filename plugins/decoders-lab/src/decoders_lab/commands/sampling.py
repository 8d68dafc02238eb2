"""``decoders bench sampling``: the cost of choosing tokens, by sampling plan, number of nodes and size of the vocabulary."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from decoders.cli.benches import JsonFile, conclude, consoles, numbers, pieces, progress_bar
from decoders.cli.models import Threads
from decoders.errors import UnknownNameError

from .grammar import vocabulary_sizes


def sampling(
    plans: Annotated[
        list[str] | None,
        typer.Option(
            "--plan", "-p", help="Plans, comma-separated or repeated: greedy, temperature, top_p … Default: all."
        ),
    ] = None,
    nodes: Annotated[str, typer.Option(help="Nodes of a block, comma-separated.")] = "1,9,33",
    vocabulary: Annotated[
        str, typer.Option(help="Tokens of the vocabularies, comma-separated; k is 1000.")
    ] = "32k,152k",
    repeats: Annotated[int, typer.Option(min=1, help="Measurements of each plan.")] = 20,
    definitions: Annotated[
        int,
        typer.Option(min=0, help="Measurements of the processors' definitions, which sort the vocabulary; 0: none."),
    ] = 3,
    flat: Annotated[
        bool,
        typer.Option(
            "--flat", help="Logits in which thousands of tokens share the probability: the slowest to truncate."
        ),
    ] = False,
    threads: Threads = None,
    json_file: JsonFile = None,
) -> None:
    """Measure what choosing the tokens of a block costs beside a forward pass: temperature, top_k, top_p and the like.

    The logits are made up and fall as language models' do; no model is needed.
    """
    progress_console, console = consoles(json_file)
    sizes = vocabulary_sizes(vocabulary)
    counts = numbers(nodes, "--nodes takes nodes of a block such as 1,9,33")

    from .. import sampling as s
    from ..sampling import sampling_table

    selected = {}
    for name in pieces(plans) or s.PLANS:
        if name not in s.PLANS:
            raise UnknownNameError("plan", name, s.PLANS)
        selected[name] = s.PLANS[name]
    times: list[s.SamplingTime] = []
    logits = s.flat if flat else s.text_like
    with progress_bar(progress_console, len(sizes) * len(counts)) as advance:
        for size in sizes:
            for count in counts:
                times += s.time_sampling(selected, [count], size, repeats, logits, definitions)
                advance(f"{count} nodes, {size} tokens")
    for size in sizes:
        console.print(sampling_table([time for time in times if time.vocabulary == size], f"{size:,} tokens · ms"))
    run = {
        "repeats": repeats, "definitions": definitions, "vocabularies": sizes, "nodes": counts, "flat": flat,
        "plans": selected,
    }  # fmt: skip
    conclude(console, json_file, run, times=[asdict(time) for time in times])
