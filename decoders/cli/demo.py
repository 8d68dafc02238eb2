"""``decoders demo``: the demo model completes a prompt under a few strategies, live, then in a table of figures."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import SettingsError, UnknownNameError

if TYPE_CHECKING:
    from rich.table import Table
    from transformers import PreTrainedTokenizerBase

    from ..bench import Entry, Record, Workload

#: Kinds of prompt shown unless others are asked for.
KINDS = ("copy", "code")
#: Strategies shown unless others are asked for: each further one would add its compilation to the wait.
STRATEGIES = ("autoregressive", "prompt_lookup", "speculative")


def demo(
    prompt: Annotated[str | None, typer.Option(help="Complete this instead of a held-out prompt.")] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, readable=True, help="Complete the text of a file.")
    ] = None,
    kind: Annotated[
        str | None, typer.Option(help="copy, code or docstring. Default: a copy, then a code prompt.")
    ] = None,
    strategies: Annotated[
        list[str] | None,
        typer.Option(
            "--strategy",
            "-s",
            help="Strategy, a+b merges; may be repeated. Default: autoregressive, prompt_lookup and speculative, beside "
            "transformers' assisted generation.",
        ),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", min=1, help="Most tokens to write.")] = 96,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds for the table.")] = 3,
    live: Annotated[bool, typer.Option("--live/--no-live", help="Show the text as it is written.")] = True,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    device: Annotated[str | None, typer.Option(help="cpu, cuda …; default: CUDA if there is one.")] = None,
    compile: Annotated[bool, typer.Option("--compile/--no-compile", help="Compile the core of the loop.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON, nothing else.")] = False,
) -> None:
    """Show strategies at work on the model that comes with this package; nothing is downloaded.

    Exits with 1 if a strategy that promises transformers' own output writes anything else.
    """
    from rich.console import Console

    progress = Console(stderr=True, quiet=as_json)
    console = Console(quiet=as_json)
    texts = choose_prompts(prompt, prompt_file, kind)
    with progress.status("loading the demo models"):
        from .. import bench as b
        from ..bench import machine
        from ..bench.contestants import ASSISTED
        from .bench import load, progress_bar

        model, tokenizer, draft = load("demo", None, dtype, device)
        config: dict[str, Any] = {} if compile else {"compile": False}
        contestants = b.transformers_contestants(model, draft, names=[] if strategies else [ASSISTED])
        contestants += b.strategy_contestants(model, strategies or STRATEGIES, draft, None, config, tokenizer)
        workloads = b.workloads(tokenizer, texts)
        facts = machine.facts(model.device)
    runs = b.calls(len(contestants), len(workloads), repeats)
    with progress_bar(progress, len(contestants)) as advance:
        entries = b.warm_up(contestants, workloads, new_tokens=max_new_tokens, progress=advance)
    console.print(f"[dim]{compilation(entries)}[/]\n")
    if live and not as_json:
        from ..bench.live import show

        for entry, (name, _, text), workload in show_order(entries, texts, workloads, console.is_terminal):
            show(console, entry.contestant, workload, tokenizer, name, text, max_new_tokens)
    with progress_bar(progress, runs - len(contestants)) as advance:
        b.take_turns(
            entries, workloads, new_tokens=max_new_tokens, repeats=repeats, progress=advance, first_tokens=False
        )
    records = b.summarise(entries)
    wrong = [r for r in records if r.ours and r.exact and (r.identical is False or r.status == "failed")]
    if as_json:
        result = {
            "machine": facts, "prompts": [name for name, _, _ in texts], "max_new_tokens": max_new_tokens,
            "identical": not wrong, "completions": completions(entries, tokenizer),
            "records": [r.as_dict() for r in records],
        }  # fmt: skip
        typer.echo(json.dumps(result, indent=2, default=str))
    else:
        from ..bench.tables import noise

        console.print(overview(records))
        if warning := noise(records):
            console.print(warning, style="yellow")
        console.print(f"{facts['cpu']}, {facts['threads']} threads, device {facts['device']}, {dtype}", style="dim")
        for record in wrong if dtype != "float32" else []:
            console.print(f"{record.contestant}: {dtype} rounds near-ties, which may flip a token; float32 does not.")
            break
        if not strategies and (rest := others(STRATEGIES)):
            console.print(f"There are also {rest}: decoders bench measures all, with settings of your choice.")
    if wrong:
        raise typer.Exit(1)


def choose_prompts(prompt: str | None, prompt_file: Path | None, kind: str | None) -> list[tuple[str, str, str]]:
    """(name, kind, text) of what is to be completed: the user's own, one of a kind, or one of each of `KINDS`.

    Raises:
        SettingsError: two were given, or the prompt is empty. UnknownNameError: no such kind.
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
        return [("prompt" if prompt_file is None else prompt_file.name, "prompt", text)]
    if kind is not None and kind not in models.KINDS:
        raise UnknownNameError("kind of prompt", kind, models.KINDS)
    kinds = KINDS if kind is None else (kind,)
    first = [models.prompts(name)[0] for name in kinds]
    return [(p.id, p.kind, p.text) for p in first]


def compilation(entries: list[Entry]) -> str:
    """What was compiled, for how long, in a line."""
    warmups = [entry.warmup for entry in entries if entry.warmup is not None and entry.contestant.ours]
    seconds, graphs = sum(w.compile_seconds for w in warmups), sum(w.compilations for w in warmups)
    if not graphs:
        return "nothing compiled"
    return f"compiled {graphs} graphs in {seconds:.1f} s, once for all calls; no figure below includes it"


def show_order(
    entries: list[Entry], texts: list[tuple[str, str, str]], workloads: list[Workload], terminal: bool
) -> Iterator[tuple[Entry, tuple[str, str, str], Workload]]:
    """Prompt by prompt, every contestant that runs; where nothing moves on the screen, one of them says it all."""
    runnable = [entry for entry in entries if entry.status == "ok"]
    for text, workload in zip(texts, workloads, strict=True):
        for entry in runnable if terminal else runnable[-1:]:
            yield entry, text, workload


def others(shown: Iterable[str]) -> str:
    """The registered strategies that were not shown, in a line."""
    from ..plugins import registry

    return ", ".join(name for name in registry().strategies() if name not in shown)


def completions(entries: list[Entry], tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """What the yardstick wrote, by prompt."""
    checks = entries[0].checks
    return {name: str(tokenizer.decode(check.tokens[0], skip_special_tokens=True)) for name, check in checks.items()}


def overview(records: list[Record]) -> Table:
    """The one table: every strategy on every kind of prompt."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    from ..bench.tables import identical, ranged, ratio_style, reason, shown

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("", no_wrap=True)
    for header in ("tokens/s", "ratio", "tokens per step", "identical output"):
        table.add_column(header, justify="right")
    for kind in dict.fromkeys(r.kind for r in records):
        table.add_section()
        table.add_row(Text(f"{kind} prompt", style="italic"))
        for r in [r for r in records if r.kind == kind and r.status == "ok"]:
            table.add_row(
                Text(r.contestant, style="bold" if r.ours else ""), ranged(r.tokens_per_second, ".0f"),
                ranged(r.ratio, ".2f", ratio_style(r.ratio)), shown(r.accepted_length, ".2f"), identical(r),
            )  # fmt: skip
    absent = {r.contestant: r for r in records if r.status != "ok"}
    if absent:
        lines = (Text.assemble(f"{name}: ", reason(r)) for name, r in absent.items())
        table.caption, table.caption_justify = Text("\n").join(lines), "left"
    return table
