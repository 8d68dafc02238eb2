"""``decoders demo``: shows live how a model completes a prompt, then prints a table that compares a few strategies."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import SettingsError, UnknownNameError, UnsupportedError, amount
from .console import plain_console, waiting
from .models import Device, ModelName, Threads

if TYPE_CHECKING:
    from rich.table import Table
    from transformers import PreTrainedTokenizerBase

    from ..bench import Competitor, Record
    from ..prompts.reading import Content

#: Kinds of prompts for the demo model and for other models. By default, the demo decodes one prompt of each of the first two kinds.
DEMO_KINDS = ("copy", "code", "docstring")
INSTRUCTION_KINDS = ("edit", "summary", "extract", "chat", "code", "list")
#: Minimum number of new tokens in each text that is measured for the table, even on a slow machine.
FEWEST = 16
#: If neither --compile nor --no-compile is given, methods are compiled if --seconds is at least this number. Compiling takes one to
#: three minutes on two cores.
COMPILES_FROM = 120
#: Strategies that are compared if none are named. More would take longer.
STRATEGIES = ("autoregressive", "prompt_lookup", "speculative")


def demo(
    model: ModelName = "demo",
    prompt: Annotated[str | None, typer.Option(help="Prompt to complete instead of the built-in ones.")] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, readable=True, help="File with the prompt to complete.")
    ] = None,
    kind: Annotated[
        str | None,
        typer.Option(
            help="Kind of built-in prompt. Demo model: copy, code or docstring (default: copy, then code). Other models: "
            "edit, summary, extract, chat, code or list (default: edit, then summary)."
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
            f"--seconds 0 shows the first text only, and {'--json' if as_json else '--no-live'} shows none: for the table, give "
            "--seconds more than 0"
        )
    progress = plain_console(stderr=True, quiet=as_json)
    console = plain_console(quiet=as_json)
    known = DEMO_KINDS if model == "demo" else INSTRUCTION_KINDS
    texts = choose_prompts(prompt, prompt_file, kind, known)
    with waiting(progress, f"loading {'the demo models' if model == 'demo' else model}"):
        from .. import bench as b
        from ..bench import machine
        from ..bench.measurement import WARM_UP
        from ..bench.methods import ASSISTED
        from ..bench.records import comparable
        from ..prompts.reading import bare
        from .bench_run import Subjects
        from .benches import progress_bar
        from .live import show

        target, tokenizer, assistant = Subjects().load(model, draft, dtype, device)
        assert tokenizer is not None
        names = strategies or [n for n in STRATEGIES if assistant is not None or n != "speculative"]
        baselines = [ASSISTED] if assistant is not None and not strategies else []
        workloads = b.workloads(tokenizer, texts)
        facts = machine.facts(target.device)
    if live and not as_json:
        # The last strategy that needs no draft model writes the first text. It does not wait for the compiler.
        config = {"compile": False if compile is False else "auto"}
        methods_at_once = b.strategy_methods(target, names, assistant, None, config, tokenizer)
        runnable = [method for method in methods_at_once if not method.impossible]
        if not runnable and not seconds:
            raise UnsupportedError("; ".join(f"{method.name}: {method.impossible}" for method in methods_at_once))
        without_draft = [method for method in runnable if "assistant_model" not in method.arguments]
        for first_method in (without_draft or runnable)[-1:]:
            name, _, content = texts[0]
            if not console.is_terminal:  # nothing is shown until the text ends
                progress.print(
                    f"a first text, with {first_method.name}; on a new machine kernels are compiled before it"
                )
            show(console, first_method, workloads[0], tokenizer, name, bare(content), max_new_tokens)
            console.print(
                f"first text {time.monotonic() - started:.0f} s after the start, loading included\n", style="dim"
            )
    if not seconds:
        return
    compile = seconds >= COMPILES_FROM if compile is None else compile
    methods = b.transformers_methods(target, assistant, names=baselines)
    methods += b.strategy_methods(target, names, assistant, None, {"compile": compile}, tokenizer)
    how = "with compiling, which a later run need not repeat" if compile else "uncompiled"
    progress.print(f"The table takes up to {seconds:g} s (--seconds), or one round of two methods, {how}.", style="dim")
    began = time.monotonic()
    deadline = began + seconds
    with progress_bar(progress, len(methods)) as advance:

        def told(what: str, left: float) -> None:
            advance(what, max(left, deadline - time.monotonic()))

        entries = b.warm_up(
            methods, workloads, new_tokens=max_new_tokens, progress=told, deadline=began + WARM_UP * seconds
        )
    console.print(f"{compilation(entries)}\n", style="dim")
    lively = live and not as_json and console.is_terminal
    # Each method writes two texts per prompt: one is checked, one is timed for the table. On a terminal it writes a third to look at.
    left = max(0.0, deadline - time.monotonic())
    new_tokens = affordable_tokens(entries, (2 + lively) * len(workloads), left, max_new_tokens)
    for (name, _, content), workload in zip(texts, workloads, strict=True) if lively else ():
        for entry in entries:
            if entry.status == "ok" and time.monotonic() < deadline:
                show(console, entry.method, workload, tokenizer, name, bare(content), new_tokens)
    runs = b.calls(len(methods), len(workloads), repeats)
    with progress_bar(progress, runs - len(methods)) as advance:
        rounds = b.take_turns(
            entries, workloads, new_tokens=new_tokens, repeats=repeats, progress=advance, first_tokens=False,
            deadline=deadline,
        )  # fmt: skip
    records, busy = comparable(b.summarise(entries))
    different = [r for r in records if r.ours and r.exact and (r.identical is False or r.status == "failed")]
    if as_json:
        result = {
            "model": model, "machine": facts, "prompts": [workload.name for workload in workloads],
            "max_new_tokens": new_tokens, "rounds": rounds,
            "identical": not different, "busy": busy, "completions": completions(entries, tokenizer),
            "records": [r.as_dict() for r in records],
        }  # fmt: skip
        typer.echo(json.dumps(result, indent=2, default=str))
    else:
        from ..bench.tables import noise

        console.print(overview(records))
        if rounds < repeats or new_tokens < max_new_tokens:
            fewer = (
                f", texts of {amount(new_tokens, 'token')} in place of {max_new_tokens}"
                if new_tokens < max_new_tokens
                else ""
            )
            console.print(f"{rounds} of {amount(repeats, 'round')} for --seconds {seconds:g}{fewer}", style="dim")
        for warning in filter(None, (noise(records), busy)):
            console.print(warning, style="yellow")
        console.print(
            f"{facts['cpu']}, {amount(facts['threads'], 'thread')}, device {facts['device']}, {dtype}", style="dim"
        )
        for record in different if dtype != "float32" else []:
            console.print(f"{record.method}: {dtype} rounds near-ties, which may flip a token; float32 does not.")
            break
        if not strategies and (other_names := others(names)):
            console.print(f"There are also {other_names}: decoders bench measures all, with settings of your choice.")
        console.print(f"{time.monotonic() - started:.0f} s in all", style="dim")
    if different:
        raise typer.Exit(1)


def affordable_tokens(entries: Sequence[Competitor], texts: int, seconds: float, most: int) -> int:
    """The greatest number of new tokens with which every method can decode `texts` texts within `seconds`, but at least
    :data:`FEWEST` and at most `most`.

    The warm-up has measured how long each method takes for a text of `most` tokens.
    """
    needed = texts * sum(entry.warmup.second_call for entry in entries if entry.warmup is not None)
    return most if needed <= seconds else min(most, max(FEWEST, int(most * seconds / needed)))


def choose_prompts(
    prompt: str | None, prompt_file: Path | None, kind: str | None, known: Sequence[str] = DEMO_KINDS
) -> list[tuple[str, str, Content]]:
    """The prompts, each as (name, kind, text or messages).

    These are the user's own prompt, or one prompt of `kind`, or one prompt of each of the first two kinds in `known`. The user's own
    prompt becomes a message for the chat template, unless `known` are the demo model's kinds.

    Raises:
        SettingsError: two prompts were given, or the prompt is empty.
        UnknownNameError: no such kind.
    """
    from .. import demo as models

    if sum(given is not None for given in (prompt, prompt_file, kind)) > 1:
        raise SettingsError("give one of --prompt, --prompt-file and --kind")
    if prompt is not None or prompt_file is not None:
        try:
            text = prompt_file.read_text(encoding="utf-8") if prompt_file is not None else prompt
        except UnicodeDecodeError as error:
            raise SettingsError(f"{prompt_file} is not UTF-8 text: {error}") from error
        if not text:
            raise SettingsError("the prompt is empty")
        content: Content = text if known is DEMO_KINDS else [{"role": "user", "content": text}]
        return [("prompt" if prompt_file is None else prompt_file.name, "prompt", content)]
    if kind is not None and kind not in known:
        raise UnknownNameError("kind of prompt", kind, known)
    kinds = known[:2] if kind is None else (kind,)
    if known is not DEMO_KINDS:
        from ..prompts.reading import instructions

        return [instructions(name)[0] for name in kinds]
    first = [models.prompts(name)[0] for name in kinds]
    return [(p.id, p.kind, p.text) for p in first]


def compilation(entries: list[Competitor]) -> str:
    """A line of text that says how many graphs were compiled, and how many seconds this took."""
    warmups = [entry.warmup for entry in entries if entry.warmup is not None and entry.method.ours]
    seconds, graphs = sum(w.compile_seconds for w in warmups), sum(w.compilations for w in warmups)
    if not graphs:
        return "nothing compiled"
    return f"compiled {amount(graphs, 'graph')} in {seconds:.1f} s, once for all calls; no figure below includes it"


def others(shown: Iterable[str]) -> str:
    """The names of the registered strategies that are not in `shown`, separated by commas."""
    from ..registry import registry

    return ", ".join(name for name in registry().strategies() if name not in shown)


def completions(entries: list[Competitor], tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """The text that the baseline (the first of `entries`) wrote for each prompt, by prompt."""
    checks = entries[0].checks
    return {name: str(tokenizer.decode(check.tokens[0], skip_special_tokens=True)) for name, check in checks.items()}


def overview(records: list[Record]) -> Table:
    """The table of the demo: the speed of every strategy on every kind of prompt."""
    from rich.text import Text

    from ..bench.tables import loops, summary_table

    kinds = {kind: [r for r in records if r.kind == kind] for kind in dict.fromkeys(r.kind for r in records)}
    table = summary_table({f"{kind} prompt": of_kind for kind, of_kind in kinds.items()})
    lines = [f"{kind} prompt{loops(of_kind)}" for kind, of_kind in kinds.items() if loops(of_kind)]
    below = [table.caption] if isinstance(table.caption, Text) else []
    table.caption, table.caption_justify = Text("\n").join([*map(Text, lines), *below]), "left"
    return table
