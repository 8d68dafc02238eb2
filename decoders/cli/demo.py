"""``decoders demo``: shows live how a model completes a prompt, then prints a table that compares a few strategies."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import SettingsError, UnsupportedError, amount
from .console import plain_console, waiting
from .models import DEMO, Device, ModelName, Threads

if TYPE_CHECKING:
    from rich.table import Table

    from ..bench import Competitor, Record
    from ..prompts.reading import Content

#: Minimum number of new tokens in each text measured for the table, even on a slow machine.
FEWEST = 16
#: If neither --compile nor --no-compile is given, methods are compiled if --seconds is at least this number. Compiling takes one to
#: three minutes on two cores.
COMPILES_FROM = 120
#: Strategies that are compared if none are named. More would take longer.
STRATEGIES = ("autoregressive", "prompt_lookup", "speculative")


def demo(
    model: ModelName = DEMO,
    prompt: Annotated[str | None, typer.Option(help="Prompt to complete instead of the built-in ones.")] = None,
    prompts: Annotated[
        str | None,
        typer.Option(
            help="A file of prompts, or kinds of prompts, as in bench --prompts; the first of each kind is completed. "
            "Default: copy,code for the demo model, instruct:edit,instruct:summary for other models."
        ),
    ] = None,
    strategies: Annotated[
        list[str] | None,
        typer.Option(
            "--strategy",
            "-s",
            help="Strategy to compare; a+b merges the drafts of two. Repeatable. Default: autoregressive, prompt_lookup "
            "and, with a draft model, speculative and transformers' assisted generation.",
        ),
    ] = None,
    draft: Annotated[
        str | None, typer.Option(help="Draft model: folder or Hub name. The demo model has its own.")
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", min=1, help="Maximum number of new tokens.")
    ] = 96,
    repeats: Annotated[int, typer.Option(min=1, help="Maximum number of measured rounds.")] = 3,
    seconds: Annotated[
        float,
        typer.Option(
            min=0,
            help="Time limit for the table in seconds, compilation included. 0: only the first completion, no table.",
        ),
    ] = 240,
    live: Annotated[bool, typer.Option("--live/--no-live", help="Show text while it is generated.")] = True,
    dtype: Annotated[str, typer.Option(help="Model dtype: float32, bfloat16 or float16.")] = "float32",
    device: Device = None,
    threads: Threads = None,
    compile: Annotated[
        bool | None,
        typer.Option(
            "--compile/--no-compile",
            help=f"Run torch.compile before the table is measured. Default: only if --seconds is at least {COMPILES_FROM}.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON, and nothing else.")] = False,
) -> None:
    """Show strategies at work: first a completion as it is generated, then a table that compares their speed.

    The default model comes with this package and needs no download. The exit code is 1 if an exact strategy fails or
    generates other tokens than transformers.
    """
    started = time.monotonic()
    if not seconds and (as_json or not live):
        raise SettingsError(
            f"--seconds 0 leaves out the table, and {'--json' if as_json else '--no-live'} the first text, so nothing would be shown: "
            "give --seconds more than 0"
        )
    if prompt is not None and prompts is not None:
        raise SettingsError("give --prompt or --prompts, not both")
    progress = plain_console(stderr=True, quiet=as_json)
    console = plain_console(quiet=as_json)
    with waiting(progress, f"loading {'the demo models' if model == DEMO else model}"):
        from .. import bench as b
        from ..bench import machine
        from ..bench.measurement import WARM_UP
        from ..bench.methods import ASSISTED
        from ..bench.records import comparable
        from ..bench.tables import noise
        from ..prompts.reading import bare, read_prompts
        from .bench_run import Subjects
        from .benches import progress_bar
        from .live import show

        if prompt is None:
            texts = read_prompts(
                prompts or ("copy,code" if model == DEMO else "instruct:edit,instruct:summary"), limit=1
            )
        else:
            content: Content = prompt if model == DEMO else [{"role": "user", "content": prompt}]
            texts = [("prompt", "prompt", content)]
        target, tokenizer, assistant = Subjects().load(model, draft, dtype, device)
        assert tokenizer is not None
        names = strategies or [n for n in STRATEGIES if assistant is not None or n != "speculative"]
        baselines = [ASSISTED] if assistant is not None and not strategies else []
        workloads = b.workloads(tokenizer, texts)
        facts = machine.facts(target.device)
    if live and not as_json:
        # The last strategy that needs no draft model writes the first text. It does not wait for the compiler.
        config = {"compile": False if compile is False else "auto"}
        methods = b.strategy_methods(target, names, assistant, None, config, tokenizer)
        runnable = [method for method in methods if not method.impossible]
        if not runnable and not seconds:
            raise UnsupportedError("; ".join(f"{method.name}: {method.impossible}" for method in methods))
        for method in sorted(runnable, key=lambda method: "assistant_model" not in method.arguments)[-1:]:
            name, _, content = texts[0]
            if not console.is_terminal:  # nothing is shown until the text ends
                progress.print(f"a first text, with {method.name}; on a new machine kernels are compiled before it")
            show(console, method, workloads[0], tokenizer, name, bare(content), max_new_tokens)
            console.print(
                f"first text {time.monotonic() - started:.0f} s after the start, loading included\n", style="dim"
            )
    if not seconds:
        return
    compile = seconds >= COMPILES_FROM if compile is None else compile
    methods = b.transformers_methods(target, assistant, names=baselines)
    methods += b.strategy_methods(target, names, assistant, None, {"compile": compile}, tokenizer)
    how = "with compiling, which a later run need not repeat" if compile else "uncompiled"
    progress.print(f"The table takes up to {seconds:g} s (--seconds), or longer if one round does, {how}.", style="dim")
    began = time.monotonic()
    deadline = began + seconds
    with progress_bar(progress, len(methods)) as advance:
        entries = b.warm_up(
            methods, workloads, new_tokens=max_new_tokens, deadline=began + WARM_UP * seconds,
            progress=lambda what, left: advance(what, max(0.0, deadline - time.monotonic())),
        )  # fmt: skip
    console.print(f"{compilation(entries)}\n", style="dim")
    shows_live = live and not as_json and console.is_terminal
    # Each method writes two texts per prompt: one is checked, one is timed for the table. On a terminal, a third text is shown live.
    left = max(0.0, deadline - time.monotonic())
    new_tokens = affordable_tokens(entries, (2 + shows_live) * len(workloads), left, max_new_tokens)
    for (name, _, content), workload in zip(texts, workloads, strict=True) if shows_live else ():
        for entry in entries:
            if entry.method.ours and entry.status == "ok" and time.monotonic() < deadline:
                show(console, entry.method, workload, tokenizer, name, bare(content), new_tokens)
    with progress_bar(progress, len(methods) * len(workloads) * (1 + repeats)) as advance:
        rounds = b.take_turns(
            entries, workloads, new_tokens=new_tokens, repeats=repeats, progress=advance, first_tokens=False,
            deadline=deadline,
        )  # fmt: skip
    records, busy = comparable(b.summarise(entries))
    different = [r for r in records if r.ours and r.exact and (r.identical is False or r.status == "failed")]
    if as_json:
        result = {
            "model": model, "machine": facts, "prompts": [*entries[0].kind_of], "max_new_tokens": new_tokens, "rounds": rounds,
            "identical": not different, "busy": busy, "records": [r.as_dict() for r in records],
        }  # fmt: skip
        typer.echo(json.dumps(result, indent=2, default=str))
    else:
        console.print(overview(records))
        if rounds < repeats or new_tokens < max_new_tokens:
            fewer = f"texts of {amount(new_tokens, 'token')} in place of {max_new_tokens}, " * (
                new_tokens < max_new_tokens
            )
            console.print(f"{fewer}{rounds} of {amount(repeats, 'round')} for --seconds {seconds:g}", style="dim")
        for warning in filter(None, (noise(records), busy)):
            console.print(warning, style="yellow")
        console.print(f"{machine.line(facts)}, {dtype}", style="dim")
        if different and dtype != "float32":
            console.print(f"{different[0].method}: rounding to {dtype} may swap almost equally likely tokens.")
        console.print("decoders bench measures all strategies, with settings of your choice.")
        console.print(f"{time.monotonic() - started:.0f} s in all", style="dim")
    if different:
        raise typer.Exit(1)


def affordable_tokens(entries: Sequence[Competitor], texts: int, seconds: float, most: int) -> int:
    """The number of new tokens per text with which all methods can write `texts` texts each within `seconds`, by the times of the
    warm-up. At least :data:`FEWEST`, but never more than `most`, the number of new tokens in the warm-up.
    """
    needed = texts * sum(entry.warmup.second_call for entry in entries if entry.warmup is not None)
    return most if needed <= seconds else min(most, max(FEWEST, int(most * seconds / needed)))


def compilation(entries: Sequence[Competitor]) -> str:
    """A line of text that says how many graphs were compiled, and how many seconds this took."""
    warmups = [entry.warmup for entry in entries if entry.warmup is not None and entry.method.ours]
    if not (graphs := sum(w.compilations for w in warmups)):
        return "nothing compiled"
    seconds = sum(w.compile_seconds for w in warmups)
    return f"compiled {amount(graphs, 'graph')} in {seconds:.1f} s, once for all calls; no figure below includes it"


def overview(records: Sequence[Record]) -> Table:
    """The table of the demo: the speed of every strategy on every kind of prompt."""
    from ..bench.tables import loops, speed_table

    kinds = {kind: [r for r in records if r.kind == kind] for kind in dict.fromkeys(r.kind for r in records)}
    return speed_table({f"{kind} prompt{loops(of_kind)}": of_kind for kind, of_kind in kinds.items()})
