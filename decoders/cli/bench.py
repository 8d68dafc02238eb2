"""``decoders bench``: strategies and transformers' own methods side by side, in one run, taking turns."""

from __future__ import annotations

import faulthandler
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import SettingsError, UnknownNameError
from .bench_models import load, other_engines, tokenizers_of
from .bench_options import by_strategy, in_both_tiers, numbers, pieces
from .bench_output import consoles, dtypes_order, footnote, interrupted_by_sigterm, progress_bar, write_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..bench import Method, Record


app = typer.Typer(invoke_without_command=True)


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
            "that they do, or one number format and mode, as in llama.cpp[q8_0], openvino[int4,lookup].",
        ),
    ] = None,
    strategies: Annotated[
        list[str] | None,
        typer.Option(
            "--strategy",
            "--strategies",
            "-s",
            # In capitals: rich would take lower-case brackets for markup.
            help="Strategies, comma-separated or repeated; a+b merges, STRATEGY[KEY=VALUE,…] is a variant with other "
            "settings, STRATEGY[compile=false] the uncompiled tier. Default: all; of shapes autoregressive, prompt_lookup.",
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
    dtypes = [name.strip() for name in dtype.split(",") if name.strip()]
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

    import torch

    from .. import bench as b
    from ..bench import bandwidth, machine
    from ..bench import capacity as c
    from ..bench.beside import check_installed, requests
    from ..bench.call import vocabulary_size
    from ..bench.scaled_shapes import shape_named
    from ..bench.shapes import SHAPES
    from ..bench.tables import capacity_table, noise, tables
    from ..settings import parse_assignments
    from . import generate
    from .prompts import read_prompts

    if threads is not None:
        torch.set_num_threads(threads)
    loop_settings, strategy_settings = by_strategy(parse_assignments(settings or []))
    generate_options = generate.sampling(temperature, top_k, top_p, None, None)
    sampling_options = {
        name: generate_options[name] for name in ("temperature", "top_k", "top_p") if name in generate_options
    }
    sampling = b.Sampling(**sampling_options, seed=seed) if generate_options["do_sample"] else None
    config: dict[str, Any] = {"compile": compile} | ({"slots": capacity} if capacity else {}) | loop_settings
    subjects = pieces(shapes) or [model or "demo"]
    for name in subjects if shapes is not None else ():
        if name not in SHAPES:
            raise UnknownNameError("shape", name, SHAPES)
    if scale is not None:
        shape_named(scale)  # a misspelt name shows before the minutes of loading
    has_draft = draft is not None or subjects == ["demo"]
    engines = [request for text in pieces(beside) or () for request in requests(text, has_draft)]
    for request in engines:
        check_installed(request.engine)
    if engines and sampling is not None:
        raise SettingsError("--beside compares greedy decoding: other engines draw other tokens")
    if engines and sys.__stderr__ is not None:
        faulthandler.enable(sys.__stderr__)  # an engine that crashes takes the run along: then it is said where
    names, baseline_names = pieces(strategies), pieces(baselines)
    if shapes is not None:
        names, baseline_names = names or ["autoregressive", "prompt_lookup"], baseline_names or []
        lengths = lengths or [64]
    names = in_both_tiers(names) if tiers else names
    names = ["autoregressive"] if check_capacity else names
    texts = [] if check_capacity or prompts is None else read_prompts(prompts, limit)
    records: list[Record] = []
    capacity_costs: list[Any] = []
    facts: dict[str, Any] = {}
    folder = Path(context.with_resource(tempfile.TemporaryDirectory(prefix="decoders-"))) if engines else None
    interrupted = False
    for name in subjects:
        methods: list[Method] = []
        tokenizer: PreTrainedTokenizerBase | None = None
        for dtype_name in dtypes:
            with progress_console.status(f"loading {name} in {dtype_name}"):
                target, tokenizer, assistant = load(name, draft, dtype_name, device, scale)
                tokenizers = tokenizers_of(tokenizer, assistant_tokenizer)
            label = str(target.dtype).removeprefix("torch.")
            if not check_capacity:
                methods += b.transformers_methods(target, assistant, baseline_names, label, sampling, tokenizers)
            methods += b.strategy_methods(
                target, names, assistant, strategy_settings, config, tokenizer, label, sampling,
                tokenizers.get("assistant_tokenizer"),
            )  # fmt: skip
        if folder is not None and not check_capacity:
            with progress_console.status("writing models for other engines") as status:
                exact = load(name, draft, "float32", "cpu", scale)  # every engine rounds the same numbers itself
                methods += other_engines(engines, methods[0].model, folder, exact, dtypes_order(methods), status.update)
                del exact
        device_used = methods[0].model.device
        if not facts:
            with progress_console.status("measuring the memory's bandwidth"):
                speed = bandwidth.copy_bandwidth(device_used)
            facts = machine.facts(device_used) | {"copy_bandwidth": speed}
        if check_capacity:
            calls = len(methods) * len(batches) * len(c.SLOTS) * (repeats + 1)
            with progress_bar(progress_console, calls) as advance:
                for rows in batches:
                    capacity_costs += c.check_capacity(methods, rows, slots=c.SLOTS, repeats=repeats, progress=advance)
            continue
        if lengths is not None:
            groups = [
                b.random_workloads(vocabulary_size(target), lengths, rows, min(limit or 1, 2)) for rows in batches
            ]
        else:
            assert tokenizer is not None
            if prompts is None:
                texts = read_prompts("instruct" if tokenizer.chat_template else "all", limit)
            groups = [b.workloads(tokenizer, texts, rows) for rows in batches]
        total = sum(b.calls(len(methods), len(group), repeats) for group in groups)
        subject_records: list[Record] = []
        with progress_bar(progress_console, total) as advance, interrupted_by_sigterm():
            for group in groups:
                try:
                    entries = b.measure(methods, group, new_tokens=new_tokens, repeats=repeats, progress=advance)
                except b.Interrupted as stopped:
                    entries, interrupted = stopped.entries, True
                subject_records += b.summarise(entries, speed, "" if name == "demo" else name, name in SHAPES)
                if interrupted:
                    break
        order = dtypes_order(methods)
        records += sorted(subject_records, key=lambda r: (order.index(r.dtype), r.batch))
        for method in methods:
            if method.engine is not None:
                method.engine.close()
        del methods, target, assistant, groups, entries  # the next one wants the memory
        if interrupted:
            break
    result: dict[str, Any] = {
        "machine": facts,
        "run": {
            "model": None if shapes is not None else subjects[0], "shapes": subjects if shapes is not None else [],
            "draft": draft, "scale": scale, "beside": [request.name for request in engines],
            "new_tokens": new_tokens, "repeats": repeats, "compile": config["compile"],
            "slots": capacity, "prompts": prompts, "prompt_lengths": lengths, "loop": loop_settings,
            "sampling": sampling and asdict(sampling),
        },
    }  # fmt: skip
    if check_capacity:
        result["capacity"] = [x.as_dict() for x in capacity_costs]
        result_tables = [capacity_table(capacity_costs)]
    else:
        result["records"] = [record.as_dict() for record in records]
        result_tables = tables(records)
    for table in result_tables:
        console.print(table)
    console.print(footnote(result["machine"]), style="dim")
    if interrupted:
        console.print("Interrupted: the tables hold the prompts that every method has decoded.", style="yellow")
    if not check_capacity and (warning := noise(records)):
        console.print(warning, style="yellow")
    if json_file is not None:
        write_json(result, json_file)
    if plot_file is not None and not check_capacity:
        from ..bench.plot import plot

        plot(records, plot_file)
