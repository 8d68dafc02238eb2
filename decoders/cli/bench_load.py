"""``decoders bench load``: measures throughput and latency under a load of many requests of different lengths."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, replace
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import SettingsError, UnknownNameError, amount
from .benches import Acceptance, JsonFile, conclude, consoles, pieces, progress_bar, with_options_of
from .console import waiting
from .models import Device, ModelName, Threads, known_strategies, set_aside

if TYPE_CHECKING:
    from ..bench.load import Arrival, LoadResult
    from ..bench.synthetic import Synthetic

    #: Prepares a method for a load (requests with arrival times) and a dtype. Its context yields a function that decodes a load.
    Opens = Callable[[Sequence[Arrival], str], AbstractContextManager[Callable[[Sequence[Arrival]], LoadResult]]]

CONTINUOUS = "transformers-continuous"
METHODS = ("scheduler", "batches", "transformers", CONTINUOUS)


def measure_load(
    *,
    model: ModelName = "demo",
    strategies: Annotated[
        list[str] | None,
        typer.Option("--strategy", "-s", help="Strategies, comma-separated or repeated. Default: autoregressive."),
    ] = None,
    acceptance: Acceptance = None,
    methods: Annotated[
        list[str] | None,
        typer.Option(
            "--method", help=f"Methods, comma-separated or repeated: {', '.join(METHODS)}. Default: the first three."
        ),
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="Number of requests.")] = 40,
    rows: Annotated[int, typer.Option(min=1, help="Batch size: maximum number of requests decoded at once.")] = 8,
    rate: Annotated[
        float | None,
        typer.Option(
            min=1e-3,
            help="Average number of requests per second, at random times (a Poisson process). Default: all arrive at once.",
        ),
    ] = None,
    new_tokens: Annotated[
        int, typer.Option("--new-tokens", "-n", min=1, help="Median number of new tokens per request.")
    ] = 28,
    longest: Annotated[int, typer.Option(min=1, help="Maximum number of new tokens per request.")] = 128,
    spread: Annotated[
        float,
        typer.Option(
            min=0, help="Spread of the numbers of new tokens: standard deviation of their logarithm. 0: all are equal."
        ),
    ] = 0.9,
    repeats: Annotated[
        int, typer.Option(min=1, help="Number of runs per method, taken in turns; the median is shown.")
    ] = 1,
    prompt_tokens: Annotated[int, typer.Option(min=2, help="Maximum number of prompt tokens.")] = 64,
    within: Annotated[
        float,
        typer.Option(min=0, help="Latency limit in seconds: a request that ends within it counts as served in time."),
    ] = 10.0,
    dtype: Annotated[
        str, typer.Option(help="Model dtype: float32, bfloat16, float16 or auto (the checkpoint's).")
    ] = "auto",
    compile: Annotated[bool, typer.Option(help="Compile the decoding step with torch.compile.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of the lengths and the arrival times.")] = 0,
    device: Device = None,
    threads: Threads = None,
    json_file: JsonFile = None,
    load_model: Any = None,
    others: Mapping[str, Any] = {},
    facts: Mapping[str, Any] = {},
) -> None:
    """Decodes a load with every method, and prints a table.

    Args:
        load_model: returns model and tokenizer for a name, a dtype and a device; None: :func:`~decoders.cli.models.load`.
        others: further methods, functions of the type `Opens`, by name.
        facts: entries to add to the options in the JSON file.
    """
    progress_console, console = consoles(json_file)
    chosen, named = pieces(methods) or list(METHODS[:3]), pieces(strategies) or ["autoregressive"]
    for method in chosen:
        if method not in (*METHODS, *others):
            raise UnknownNameError("method", method, (*METHODS, *others))
    known_strategies(named)

    import decoders

    from ..bench.load import arrivals, continuous, in_batches, rehearse_load, scheduled
    from ..bench.synthetic import Synthetic
    from ..bench.tables import fitting, load_table
    from ..prompts.reading import INSTRUCTIONS, encode, instructions
    from ..registry import resolve_strategy
    from ..report import Report
    from . import models

    for name in named:
        if resolve_strategy(name).needs_assistant:
            raise SettingsError(
                f"strategy {name!r} needs a draft model, which bench load does not take: measure it with decoders bench"
            )

    drafters = [Synthetic.of(text) for text in acceptance or ()]
    with waiting(progress_console, f"loading {model}"):
        loaded, tokenizer = (load_model or models.load)(model, dtype, device)
    decoders.enable(loaded, tokenizer=tokenizer)
    # The load sets the number of new tokens of each request, so there are no stop tokens.
    loaded.generation_config.eos_token_id = None
    every = [content for kind in INSTRUCTIONS for _, _, content in instructions(kind)]
    prompts = [encode(tokenizer, content)[:prompt_tokens] for content in every]
    whole = arrivals(prompts, requests, new_tokens, longest, rate, seed, spread)
    # Requests do not use cached keys and values of earlier requests, nor what a strategy has learned from them.
    options = {"decoders_config": {"compile": compile, "memory": False, "reuse": False}, "pad_token_id": 0}
    # A short load that prepares and compiles the model before the measured runs.
    first = [replace(request, seconds=0.0, new_tokens=4) for request in whole[:rows]]
    rehearse_load(loaded, drafters, whole, options)
    ours: list[str | Synthetic | None] = [*named, *drafters]
    runs = [(method, strategy) for method in chosen for strategy in (ours if method in METHODS[:2] else [None])]

    def run_of(method: str, strategy: str | Synthetic | None, load: Sequence[Arrival]) -> LoadResult:
        if method == "scheduler":
            assert strategy is not None
            return scheduled(loaded, strategy, load, rows, options)
        if method in others:
            return opened(method)(load)
        return continuous(loaded, load) if method == CONTINUOUS else in_batches(loaded, strategy, load, rows, options)

    if compile and rows > 1 and loaded.device.type == "cpu":
        vars(loaded)["generate"].engine().forward_pass.tiers.compile(True, Report(""), single=True)
    all_runs: list[list[LoadResult]] = [[] for _ in runs]
    with ExitStack() as stack, progress_bar(progress_console, repeats * len(runs)) as advance:
        stack.callback(gc.unfreeze)

        @cache
        def opened(method: str) -> Callable[[Sequence[Arrival]], LoadResult]:
            return stack.enter_context(others[method](whole, str(loaded.dtype).removeprefix("torch.")))

        for repeat in range(repeats):
            for (method, strategy), done in zip(runs, all_runs, strict=True):
                if repeat == 0 and method != CONTINUOUS:
                    run_of(method, strategy, first)
                    set_aside()  # otherwise a garbage collection would slow down one of the methods
                done.append(run_of(method, strategy, whole))
                advance(done[-1].method)
    results = [sorted(done, key=lambda result: result.seconds)[len(done) // 2] for done in all_runs]
    come = "at once" if rate is None else f"{rate:g} per second"
    subject = ", ".join(filter(None, (model, getattr(loaded.config, "cost_scaled", ""))))
    table = load_table(results, within, f"{subject}, {amount(requests, 'request')}, {come}, {amount(rows, 'row')}")
    for part in fitting(table, console.width):
        console.print(part)
    run = {
        "model": model, "dtype": dtype, "requests": requests, "rows": rows, "rate": rate, "new_tokens": new_tokens,
        "longest": longest, "spread": spread, "repeats": repeats, "seed": seed, "compile": compile,
        **facts,
    }  # fmt: skip
    conclude(console, json_file, run, results=[asdict(result) for result in results])


@with_options_of(measure_load, without=["load_model", "others", "facts"])
def load(**options: Any) -> None:
    """Measure throughput and latency under a load of requests: with continuous batching, in fixed batches, and in transformers.

    The prompts are as for `bench --prompts instruct`. Stop tokens are off: each request has a given number of new tokens, and only
    these are counted.
    """
    measure_load(**options)
