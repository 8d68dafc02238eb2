"""``decoders bench``: strategies and transformers' own methods side by side, in one run, taking turns."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import SettingsError
from .bench_options import by_strategy, numbers, pieces
from .bench_output import consoles, footnote, importing, write_json
from .extensions import ExtensibleGroup

app = typer.Typer(invoke_without_command=True, cls=ExtensibleGroup)


@app.callback()
def bench(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Option(help='Folder, hub name or GGUF file of a causal language model, or "demo", the default.'),
    ] = None,
    shapes: Annotated[
        list[str] | None,
        typer.Option(
            "--shape",
            help="Measure a shape with random weights instead of a model, comma-separated or repeated: llama-110m, "
            "smollm2-135m, gemma3-270m, qwen2.5-0.5b, qwen3-0.6b, llama-1b. Prompts are random tokens.",
        ),
    ] = None,
    draft: Annotated[str | None, typer.Option(help="Draft model, or shape; the demo model has its own.")] = None,
    assistant_tokenizer: Annotated[
        str | None, typer.Option(help="Tokenizer of a draft model that has another vocabulary: folder or hub name.")
    ] = None,
    scale: Annotated[
        str | None,
        typer.Option(
            help="Pad the model and its draft to the size of a larger one, 110m, 0.5b, 1b or 3b, without changing what they "
            "write: a Llama with tied embeddings, such as the demo."
        ),
    ] = None,
    beside: Annotated[
        list[str] | None,
        typer.Option(
            "--beside",
            help="Other engines with the same weights, comma-separated or repeated: llama.cpp, openvino; everything "
            "that they do, or one number format and mode, as in llama.cpp\\[q8_0], openvino\\[int4,lookup].",
        ),
    ] = None,
    strategies: Annotated[
        list[str] | None,
        typer.Option(
            "--strategy",
            "--strategies",
            "-s",
            help="Strategies, comma-separated or repeated; a+b merges, STRATEGY[KEY=VALUE,…] is a variant with other "
            "settings, STRATEGY\\[compile=false] the uncompiled tier. Default: all; of shapes autoregressive, prompt_lookup.",
        ),
    ] = None,
    baselines: Annotated[
        list[str] | None,
        typer.Option(
            "--baseline",
            "--baselines",
            help="transformers' methods to compare with, comma-separated or repeated; transformers-assisted[K] drafts K "
            "tokens in every step. Default: all; of shapes only transformers.",
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="[STRATEGY.]KEY=VALUE", help="A setting of all variants, or of the loop; may be repeated."
        ),
    ] = None,
    prompts: Annotated[
        str | None,
        typer.Option(
            help="copy, code, docstring (all: these three), instruct (edit, summary, extract, chat, code, list, story; "
            "one of them: instruct:edit), predictable, random, agent (--limit 10), comma-separated; or a file: text, or JSON "
            "lines with a field text or messages, and kind. Default: instruct where the tokenizer has a chat template, else all."
        ),
    ] = None,
    prompt_length: Annotated[
        str | None,
        typer.Option(help="Prompts of so many random tokens instead, comma-separated. Of shapes: 64."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Most prompts of a kind.")] = 4,
    batch: Annotated[str, typer.Option(help="Batch sizes, comma-separated.")] = "1",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16; comma-separated.")] = "float32",
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 …; default: CUDA if there is one.")] = None,
    new_tokens: Annotated[int, typer.Option("--new-tokens", "-n", min=1, help="Most new tokens per row.")] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds over all prompts.")] = 5,
    temperature: Annotated[float | None, typer.Option(min=0, help="Sample; 0 is greedy, the default.")] = None,
    top_k: Annotated[int | None, typer.Option(min=1, help="Sample among the k likeliest.")] = None,
    top_p: Annotated[float | None, typer.Option(min=0, max=1, help="Sample from the nucleus of this mass.")] = None,
    seed: Annotated[int, typer.Option(help="Of the first round when sampling; each round takes the next.")] = 0,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of the CPU.")] = None,
    capacity: Annotated[int | None, typer.Option(min=1, help="Least cache slots per row.")] = None,
    check_capacity: Annotated[
        bool, typer.Option("--check-capacity", help="Only compare step times of a small and a large cache.")
    ] = False,
    compile: Annotated[
        bool, typer.Option("--compile/--no-compile", help="Measure the compiled tier, which the warm-up brings about.")
    ] = True,
    tiers: Annotated[bool, typer.Option("--tiers", help="Measure every strategy uncompiled, too.")] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write everything as JSON; - is standard output.")
    ] = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw the speeds (PNG, SVG or PDF).")
    ] = None,
) -> None:
    """Measure strategies and transformers' own methods side by side.

    All dtypes of the model are in memory at once, so that they take turns too.
    """
    if context.invoked_subcommand is not None:
        return

    batches = numbers(batch)
    lengths = None if prompt_length is None else numbers(prompt_length, "--prompt-length takes tokens such as 64,2000")
    progress_console, console = consoles(json_file)
    if plot_file is not None:
        from ..bench.plot import figure_class

        figure_class()  # a missing matplotlib shows before the minutes of measuring, not after
    if model is not None and shapes is not None:
        raise SettingsError("give --model or --shape, not both")
    if prompts is not None and (prompt_length is not None or shapes is not None):
        raise SettingsError("--prompts are texts: with --shape or --prompt-length prompts are random tokens")
    if shapes is not None and (scale is not None or beside is not None):
        raise SettingsError("--scale and --beside take a model, not --shape")

    with importing(progress_console):
        import torch

        from ..bench import Sampling
        from ..bench.tables import noise
        from ..settings import parse_assignments
        from . import bench_run, generate

    if threads is not None:
        torch.set_num_threads(threads)
    loop_settings, strategy_settings = by_strategy(parse_assignments(settings or []))
    options = generate.sampling(temperature, top_k, top_p, None, None)
    chosen = {name: options[name] for name in ("temperature", "top_k", "top_p") if name in options}
    sampling = Sampling(**chosen, seed=seed) if options["do_sample"] else None
    of_shapes, named = shapes is not None, pieces(baselines)
    subjects = bench_run.checked_subjects(model, shapes, scale)
    has_draft = draft is not None or subjects == ["demo"]
    plan = bench_run.Plan(
        subjects=subjects, of_shapes=of_shapes, draft=draft, assistant_tokenizer=assistant_tokenizer, scale=scale, device=device,
        engines=bench_run.checked_engines(beside, has_draft, sampling),
        strategies=bench_run.checked_strategies(strategies, of_shapes, tiers, check_capacity),
        baselines=(named or []) if of_shapes else named, strategy_settings=strategy_settings, loop_settings=loop_settings,
        compile=compile, capacity=capacity, sampling=sampling, prompts=prompts,
        prompt_lengths=(lengths or [64]) if of_shapes else lengths, limit=limit, batches=batches,
        dtypes=[name.strip() for name in dtype.split(",") if name.strip()], new_tokens=new_tokens, repeats=repeats,
        capacity_only=check_capacity,
    )  # fmt: skip
    run = bench_run.Run(plan, progress_console)
    run.measure()
    for table in run.tables():
        console.print(table)
    console.print(footnote(run.facts), style="dim")
    if run.interrupted:
        console.print("Interrupted: the tables hold the prompts that every method has decoded.", style="yellow")
    if not check_capacity and (warning := noise(run.records)):
        console.print(warning, style="yellow")
    if json_file is not None:
        write_json(run.as_dict(), json_file)
    if plot_file is not None and not check_capacity:
        from ..bench.plot import plot

        plot(run.records, plot_file)
