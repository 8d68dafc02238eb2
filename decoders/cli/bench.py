"""``decoders bench``: measures strategies and transformers' own methods in one run. The methods take turns to decode each prompt."""

from __future__ import annotations

from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import SettingsError
from .benches import (
    Acceptance,
    JsonFile,
    by_strategy,
    check_writable,
    consoles,
    footnote,
    numbers,
    with_options_of,
    write_json,
)
from .catalogue import OF_LAB, ExtensibleGroup
from .console import waiting
from .models import AssistantTokenizer, Device, Temperature, Threads, TopK, TopP


class BenchGroup(ExtensibleGroup):
    """Parses ``decoders bench MODEL …`` like ``decoders bench --model MODEL …``, unless the first word resembles a command."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return ["[MODEL]", "[OPTIONS]", "[COMMAND]"]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and not (
            args[0].startswith("-")
            or f"bench {args[0]}" in OF_LAB
            or get_close_matches(args[0], self.list_commands(ctx), cutoff=0.7)
        ):
            args = ["--model", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(invoke_without_command=True, cls=BenchGroup, rich_markup_mode=None)


def measure(
    *,
    model: Annotated[
        str | None,
        typer.Option(
            help='Folder, Hub name or GGUF file of a causal language model. Default: "demo", the model in this package.'
        ),
    ] = None,
    shapes: Annotated[
        list[str] | None,
        typer.Option(
            "--shape",
            help="Measure architectures with random weights and random prompts instead of a model: llama-110m, "
            "smollm2-135m, gemma3-270m, qwen2.5-0.5b, qwen3-0.6b, llama-1b. Comma-separated or repeated.",
        ),
    ] = None,
    draft: Annotated[
        str | None,
        typer.Option(help="Draft model: folder, Hub name, or a shape as in --shape. The demo model has its own."),
    ] = None,
    assistant_tokenizer: AssistantTokenizer = None,
    strategies: Annotated[
        list[str] | None,
        typer.Option(
            "--strategy",
            "--strategies",
            "-s",
            help="Strategies, comma-separated or repeated. a+b merges the drafts of two, STRATEGY[KEY=VALUE,…] sets "
            "settings, STRATEGY[compile=false] runs uncompiled. Default: all; with --shape autoregressive, "
            "prompt_lookup.",
        ),
    ] = None,
    acceptance: Acceptance = None,
    baselines: Annotated[
        list[str] | None,
        typer.Option(
            "--baseline",
            "--baselines",
            help="Methods of transformers to compare with, comma-separated or repeated; transformers-assisted[K] drafts K "
            "tokens per step; all: every method. Default: plain transformers.",
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="[STRATEGY.]KEY=VALUE",
            help="Setting of a strategy in all its variants; without STRATEGY, of the decoding loop. Repeatable.",
        ),
    ] = None,
    prompts: Annotated[
        str | None,
        typer.Option(
            help="Kinds of prompts, comma-separated: copy, code, docstring (all: these three), instruct (instruct:KIND for "
            "one of edit, summary, extract, chat, code, list, story), predictable, random, agent (--limit 10); or a "
            "file: text, or JSON lines with text or messages, and kind. Default: instruct if the tokenizer has a chat "
            "template, else all."
        ),
    ] = None,
    prompt_length: Annotated[
        str | None,
        typer.Option(
            help="Use prompts of this many random tokens instead of texts. Comma-separated. Default with --shape: 64."
        ),
    ] = None,
    suite: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Measure a published benchmark: spec-bench, speed-bench, mt-bench, gsm8k, humaneval. All its turns are "
            "measured, greedily and at temperature 1, or only at --temperature.",
        ),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Data file of --suite as it is published, or the folder that contains it.")
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit",
            "--samples",
            min=1,
            help="Maximum number of prompts per kind; with --suite per category, chosen by --seed.",
        ),
    ] = 4,
    batch: Annotated[str, typer.Option(help="Batch sizes, comma-separated.")] = "1",
    dtype: Annotated[str, typer.Option(help="Model dtypes, comma-separated: float32, bfloat16, float16.")] = "float32",
    device: Device = None,
    new_tokens: Annotated[
        int, typer.Option("--new-tokens", "-n", min=1, help="Maximum number of new tokens per row.")
    ] = 64,
    repeats: Annotated[
        int | None, typer.Option(min=1, help="Number of rounds over all prompts. Default: 5; with --suite: 1.")
    ] = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    seed: Annotated[
        int,
        typer.Option(
            help="Seed of the first sampled round (each further round adds 1), and of the choice of prompts by --limit."
        ),
    ] = 0,
    seconds: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Time limit in seconds, without loading; strategies, prompts or rounds that do not fit are left out. "
            "Default: no limit.",
        ),
    ] = None,
    threads: Threads = None,
    compile: Annotated[
        bool, typer.Option("--compile/--no-compile", help="Measure compiled steps; the warm-up compiles them.")
    ] = True,
    details: Annotated[
        bool,
        typer.Option(
            "--details",
            help="Also show each kind of prompt, the time of each part of a step, the start-up time and the memory.",
        ),
    ] = False,
    json_file: JsonFile = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Plot the speeds to this file (PNG, SVG or PDF).")
    ] = None,
    subjects: Any = None,
) -> None:
    """Measures strategies and transformers' own methods side by side, and prints a table and a recommendation.

    Args:
        subjects: loads the models, and may add methods to measure; None: a plain :class:`~decoders.cli.bench_run.Subjects`. All other
            arguments are options of the command.
    """
    batches = numbers(batch)
    lengths = None if prompt_length is None else numbers(prompt_length, "--prompt-length takes tokens such as 64,2000")
    progress_console, console = consoles(json_file)
    if plot_file is not None:
        from ..bench.plot import check_format

        check_format(plot_file)
        check_writable("--plot", plot_file)
    if model is not None and shapes is not None:
        raise SettingsError("give --model or --shape, not both")
    for name, texts in (("prompts", prompts), ("suite", suite)):
        if texts is not None and (prompt_length is not None or shapes is not None):
            raise SettingsError(f"--{name} names texts, but with --shape or --prompt-length prompts are random tokens")
    if (prompts if suite is not None else data) is not None:
        raise SettingsError("give either --suite with --data, or --prompts")

    with waiting(progress_console, "importing torch and transformers"):
        from ..bench import Sampling
        from ..bench.methods import PLAIN
        from ..bench.plot import plot
        from ..bench.synthetic import Synthetic
        from ..bench.tables import noise
        from ..prompts.suites import read_suite
        from ..settings import parse_assignments
        from . import bench_run, models

    loop_settings, strategy_settings = by_strategy(parse_assignments(settings or []))
    options = models.sampling(temperature, top_k, top_p, None, None)
    chosen = {name: options[name] for name in ("temperature", "top_k", "top_p") if name in options}
    sampling = Sampling(**chosen, seed=seed) if options["do_sample"] else None
    of_shapes = shapes is not None
    for text in acceptance or ():
        Synthetic.of(text)
    names = bench_run.checked_strategies(strategies, of_shapes, strategy_settings)
    if suite is not None and names is not None:  # a suite's speed-ups need plain decoding as the baseline
        names = [PLAIN, *(name for name in names if name != PLAIN)]
    plan = bench_run.Plan(
        subjects=bench_run.checked_subjects(model, shapes), of_shapes=of_shapes, draft=draft,
        assistant_tokenizer=assistant_tokenizer, device=device,
        strategies=names, baselines=bench_run.checked_baselines(baselines), acceptances=acceptance or [],
        strategy_settings=strategy_settings, loop_settings={"compile": compile} | loop_settings,
        prompts=prompts, suite=suite,
        questions=[] if suite is None else read_suite(suite, data, limit, seed),
        samplings=(None, Sampling(seed=seed)) if suite is not None and temperature is None and sampling is None else (sampling,),
        prompt_lengths=(lengths or [64]) if of_shapes else lengths, limit=limit, batches=batches,
        dtypes=[models.known_dtype(name.strip()) for name in dtype.split(",") if name.strip()], new_tokens=new_tokens,
        repeats=repeats or (5 if suite is None else 1), seconds=seconds,
    )  # fmt: skip
    run = bench_run.Run(plan, progress_console, subjects or bench_run.Subjects())
    if json_file is not None and str(json_file) != "-":  # written during the run, so an interrupted run leaves results
        run.save = partial(write_json, path=json_file)
    run.measure()
    for part in run.tables(details, console.width):
        console.print(part)
    if not details:
        console.print("--details shows each kind of prompt, the parts of a step, start-up time and memory", style="dim")
    console.print(footnote(run.facts), style="dim")
    if run.interrupted:
        console.print("Interrupted: the tables hold the prompts that every method has decoded.", style="yellow")
    for warning in filter(None, (noise(run.records), run.busy)):
        console.print(warning, style="yellow")
    if str(json_file) == "-":
        write_json(run.as_dict(), Path("-"))
    if plot_file is not None:
        plot(run.records, plot_file)


@app.callback()
@with_options_of(measure, without=["subjects"])
def bench(context: typer.Context, **options: Any) -> None:
    """Measure strategies and transformers' own methods side by side.

    Measuring all strategies on a dozen prompts takes many minutes: choose strategies with --strategy, set a time limit with
    --seconds, and choose methods of transformers with --baseline. The --json file is updated during the run. The model is in memory
    once for each --dtype, because dtypes take turns, too.
    """
    if context.invoked_subcommand is None:
        measure(**options)
