"""``decoders bench load``: many requests of different lengths."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import SettingsError, UnknownNameError
from .bench_options import pieces
from .bench_output import conclude, consoles, progress_bar
from .collector import set_aside
from .console import waiting

if TYPE_CHECKING:
    from ..bench.load import Arrival

CONTINUOUS = "transformers-continuous"
VLLM = "vllm"
METHODS = ("scheduler", "batches", "transformers", CONTINUOUS, VLLM)


def load(
    model: Annotated[str, typer.Argument(help="Model: a folder, a name on the hub, or demo.")] = "demo",
    strategies: Annotated[
        list[str] | None, typer.Option("--strategy", "-s", help="Strategies; repeatable. Default: autoregressive.")
    ] = None,
    methods: Annotated[
        list[str] | None, typer.Option("--method", help=f"{', '.join(METHODS)}; repeatable. Default: the first three.")
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="How many there are.")] = 40,
    rows: Annotated[int, typer.Option(min=1, help="Rows of the scheduler, and of a batch.")] = 8,
    rate: Annotated[
        float | None, typer.Option(min=1e-3, help="Arrivals per second, at random times. Default: all come at once.")
    ] = None,
    new_tokens: Annotated[int, typer.Option("--new-tokens", "-n", min=1, help="Median of the new tokens.")] = 28,
    longest: Annotated[int, typer.Option(min=1, help="Most new tokens.")] = 128,
    spread: Annotated[
        float, typer.Option(min=0, help="Standard deviation of the logarithm of the lengths; 0: all are the median.")
    ] = 0.9,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of every method, in turns; the median one counts.")] = 1,
    prompt_tokens: Annotated[int, typer.Option(min=2, help="Most tokens of a prompt.")] = 64,
    within: Annotated[float, typer.Option(min=0, help="Seconds in which a request counts as served in time.")] = 10.0,
    vllm: Annotated[
        Path | None,
        typer.Option(
            metavar="PYTHON", help="Interpreter of an environment that has vLLM, for its method. The model is a folder."
        ),
    ] = None,
    scale: Annotated[
        str | None,
        typer.Option(
            help="Pad the model to the size of a larger one, 110m, 0.5b, 1b or 3b, without changing what it writes; --dtype has to be "
            "given. A Llama with tied embeddings, such as the demo."
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help="Precision of the model.")] = "auto",
    compile: Annotated[bool, typer.Option(help="Run compiled steps.")] = False,
    seed: Annotated[int, typer.Option(help="Of lengths and arrivals.")] = 0,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of the CPU.")] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write everything as JSON; - is standard output.")
    ] = None,
) -> None:
    """Measure throughput and waiting times under a load of requests: a scheduler, fixed batches, transformers' own, vLLM.

    Only tokens that were asked for are counted. The instructions of the bench serve as prompts; nothing stops before its length.
    """
    progress_console, console = consoles(json_file)
    chosen, named = pieces(methods) or list(METHODS[:3]), pieces(strategies) or ["autoregressive"]
    for method in chosen:
        if method not in METHODS:
            raise UnknownNameError("method", method, METHODS)

    if VLLM in chosen and (vllm is None or not vllm.is_file() or not Path(model).is_dir()):
        raise SettingsError(
            "method vllm runs in an environment of its own, on a model's folder: --vllm PYTHON, a file, and a folder"
        )
    if VLLM in chosen and scale is not None:
        raise SettingsError(
            "method vllm reads the model's folder, and --scale pads a model in memory: leave one of them out"
        )

    import torch

    import decoders

    from ..bench.beside_vllm import Vllm
    from ..bench.load import LoadResult, arrivals, continuous, in_batches, scheduled
    from ..bench.load_tables import load_table
    from ..bench.prompts import INSTRUCTIONS, encode, instructions
    from ..bench.scaled_shapes import shape_named
    from ..report import Report
    from . import bench_models, models

    if threads is not None:
        torch.set_num_threads(threads)
    if scale is not None:
        shape_named(scale)
    with waiting(progress_console, f"loading {model}"):
        loaded, tokenizer = models.load(model, dtype if scale is None else "float32")
        if scale is not None:
            loaded, _ = bench_models.in_scale(loaded, None, scale, dtype)
    decoders.enable(loaded, tokenizer=tokenizer)
    # A load has the lengths that it has.
    loaded.generation_config.eos_token_id = None
    every = [content for kind in INSTRUCTIONS for _, _, content in instructions(kind)]
    prompts = [encode(tokenizer, content)[:prompt_tokens] for content in every]
    waves = arrivals(prompts, requests, new_tokens, longest, rate, seed, spread)
    # Every prompt is read, whatever was read before.
    options = {"decoders_config": {"compile": compile, "memory": False, "reuse": False}, "pad_token_id": 0}
    first = [replace(request, seconds=0.0, new_tokens=4) for request in waves[:rows]]  # packs, compiles
    runs = [(method, strategy) for method in chosen for strategy in (named if method in METHODS[:2] else [None])]

    def run_of(method: str, strategy: str | None, load: Sequence[Arrival]) -> LoadResult:
        if method == "scheduler":
            assert strategy is not None
            return scheduled(loaded, strategy, load, rows, options)
        if method == VLLM:
            return engine().run(load)
        return continuous(loaded, load) if method == CONTINUOUS else in_batches(loaded, strategy, load, rows, options)

    if compile and rows > 1 and loaded.device.type == "cpu":
        vars(loaded)["generate"].engine().forward_pass.compile(True, Report(""), single=True)
    all_runs: list[list[LoadResult]] = [[] for _ in runs]
    with ExitStack() as stack, progress_bar(progress_console, repeats * len(runs)) as advance:
        stack.callback(gc.unfreeze)

        @cache
        def engine() -> Vllm:
            assert vllm is not None
            slots = max(len(request.prompt) + request.new_tokens for request in waves)
            precision = str(loaded.dtype).removeprefix("torch.")
            return stack.enter_context(Vllm(vllm, model, precision, rows, slots, threads))

        for repeat in range(repeats):
            for (method, strategy), done in zip(runs, all_runs, strict=True):
                if repeat == 0 and method != CONTINUOUS:
                    run_of(method, strategy, first)
                    set_aside()  # or a collection would fall into somebody's turn
                done.append(run_of(method, strategy, waves))
                advance(done[-1].method)
    results = [sorted(done, key=lambda result: result.seconds)[len(done) // 2] for done in all_runs]
    come = "at once" if rate is None else f"{rate:g} per second"
    subject = model if scale is None else f"{model}, cost-scaled to {scale}"
    console.print(load_table(results, within, f"{subject}, {requests} requests, {come}, {rows} rows"))
    run = {
        "model": model, "scale": scale, "dtype": dtype, "requests": requests, "rows": rows, "rate": rate, "new_tokens": new_tokens,
        "longest": longest, "spread": spread, "repeats": repeats, "seed": seed, "compile": compile,
    }  # fmt: skip
    conclude(console, json_file, run, results=[asdict(result) for result in results])
