"""``decoders bench``: strategies and transformers' own ways side by side, in one run, taking turns."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..bench import Contestant


def bench(
    model: Annotated[str, typer.Option(help='Path or hub name of a causal language model, or "demo".')] = "demo",
    draft: Annotated[str | None, typer.Option(help="Draft model; the demo model has its own.")] = None,
    strategies: Annotated[
        list[str] | None, typer.Option("--strategy", "-s", help="Strategy, a+b merges; may be repeated. Default: all.")
    ] = None,
    baselines: Annotated[
        list[str] | None,
        typer.Option("--baseline", help="transformers' way to compare with; may be repeated. Default: all."),
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="STRATEGY.KEY=VALUE", help="A setting; may be repeated.")
    ] = None,
    prompts: Annotated[
        str, typer.Option(help="copy, code, docstring, all, or a file: text, or JSON lines with a field text.")
    ] = "all",
    limit: Annotated[int | None, typer.Option(min=1, help="Most prompts of a kind.")] = 4,
    batch: Annotated[str, typer.Option(help="Batch sizes, comma-separated.")] = "1",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16; comma-separated.")] = "float32",
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 …; default: CUDA if there is one.")] = None,
    new_tokens: Annotated[int, typer.Option("--new-tokens", "-n", min=1, help="Most new tokens per row.")] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds over all prompts.")] = 5,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of the CPU.")] = None,
    capacity: Annotated[int | None, typer.Option(min=1, help="Least cache slots per row.")] = None,
    check_capacity: Annotated[
        bool, typer.Option("--check-capacity", help="Only compare step times of a small and a large cache.")
    ] = False,
    compile: Annotated[bool, typer.Option("--compile/--no-compile", help="Compile the core of the loop.")] = True,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write everything as JSON; - is standard output.")
    ] = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw the speeds (PNG, SVG or PDF).")
    ] = None,
) -> None:
    """Measure strategies and transformers' own ways to generate side by side.

    All dtypes of the model are in memory at once, so that they take turns too.
    """
    from rich.console import Console

    batches = numbers(batch)
    dtypes = [name.strip() for name in dtype.split(",") if name.strip()]
    quiet = json_file is not None and str(json_file) == "-"
    progress_console, console = Console(stderr=True), Console(stderr=quiet)
    if plot_file is not None:
        from ..bench.plot import figure_class

        figure_class()  # a missing matplotlib shows before the minutes of measuring, not after

    import torch

    from .. import bench as b
    from ..bench import bandwidth, machine
    from ..bench import capacity as c
    from ..bench.tables import capacity_table, noise, tables
    from . import models

    if threads is not None:
        torch.set_num_threads(threads)
    nested = by_strategy(models.parse_assignments(settings or []))
    config: dict[str, Any] = ({} if compile else {"compile": False}) | ({"slots": capacity} if capacity else {})
    names = ["autoregressive"] if check_capacity else strategies
    contestants: list[Contestant] = []
    tokenizer: PreTrainedTokenizerBase | None = None
    for name in dtypes:
        with progress_console.status(f"loading {model} in {name}"):
            target, tokenizer, assistant = load(model, draft, name, device)
        label = str(target.dtype).removeprefix("torch.")
        if not check_capacity:
            contestants += b.transformers_contestants(target, assistant, baselines, label)
        contestants += b.strategy_contestants(target, names, assistant, nested, config, tokenizer, label)
    assert tokenizer is not None
    where = contestants[0].model.device
    with progress_console.status("measuring the memory's bandwidth"):
        speed = bandwidth.copy_bandwidth(where)
    result: dict[str, Any] = {
        "machine": machine.facts(where) | {"copy_bandwidth": speed},
        "run": {
            "model": model, "draft": draft, "new_tokens": new_tokens, "repeats": repeats, "compile": compile,
            "slots": capacity, "prompts": prompts,
        },
    }  # fmt: skip
    if check_capacity:
        with progress_bar(progress_console, len(contestants) * len(batches) * len(c.SLOTS) * (repeats + 1)) as advance:
            checked = [
                x
                for n in batches
                for x in c.check_capacity(contestants, n, slots=c.SLOTS, repeats=repeats, progress=advance)
            ]
        result["capacity"] = [x.as_dict() for x in checked]
        shown = [capacity_table(checked)]
    else:
        texts = read_prompts(prompts, limit)
        groups = [b.workloads(tokenizer, texts, rows) for rows in batches]
        total = sum(b.calls(len(contestants), len(group), repeats) for group in groups)
        records = []
        with progress_bar(progress_console, total) as advance:
            for group in groups:
                entries = b.measure(contestants, group, new_tokens=new_tokens, repeats=repeats, progress=advance)
                records += b.summarise(entries, speed)
        records.sort(key=lambda r: (dtypes_order(contestants).index(r.dtype), r.batch))
        result["records"] = [record.as_dict() for record in records]
        shown = tables(records)
    for table in shown:
        console.print(table)
    console.print(footnote(result["machine"]), style="dim")
    if not check_capacity and (warning := noise(records)):
        console.print(warning, style="yellow")
    if json_file is not None:
        write_json(result, json_file)
    if plot_file is not None and not check_capacity:
        from ..bench.plot import plot

        plot(records, plot_file)


def load(
    model: str, draft: str | None, dtype: str, device: str | None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, PreTrainedModel | None]:
    """Target, tokenizer and draft (the demo's own beside the demo model, else only if named) in `dtype` on `device`."""
    import torch

    from . import models

    target, tokenizer = models.load(model, dtype)
    assistant = models.load_assistant(draft, model, dtype, needed=True)
    if device is not None:
        try:
            target = target.to(device)  # type: ignore[arg-type]
            assistant = assistant.to(device) if assistant is not None else None  # type: ignore[arg-type]
        except (RuntimeError, AssertionError) as error:
            raise SettingsError(f"--device {device}: {str(error).splitlines()[0]}") from error
    torch.manual_seed(0)
    return target, tokenizer, assistant


def by_strategy(settings: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """`settings` if they are keyed by strategy.

    Raises:
        SettingsError: one is not.
    """
    for name, value in settings.items():
        if not isinstance(value, dict):
            raise SettingsError(f"--set {name}=…: name the strategy too, as in --set prompt_lookup.{name}=…")
    return settings


def numbers(text: str) -> list[int]:
    """``"1,4"`` as numbers.

    Raises:
        SettingsError: anything but positive whole numbers.
    """
    try:
        found = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise SettingsError(f"--batch takes batch sizes such as 1,4, not {text!r}")
    return list(dict.fromkeys(found))


def read_prompts(chosen: str, limit: int | None) -> list[tuple[str, str, str]]:
    """(name, kind, text) of the demo's prompts of a kind, or of all; or those in a file.

    Raises:
        SettingsError: no such file, or no prompt in it.
    """
    from .. import demo

    if chosen in ("all", *demo.KINDS):
        kinds = demo.KINDS if chosen == "all" else [chosen]
        return [(p.id, p.kind, p.text) for kind in kinds for p in demo.prompts(kind)[:limit]]
    path = Path(chosen)
    try:
        content = path.read_text(encoding="utf-8")
        if path.suffix == ".jsonl":
            texts = [json.loads(line)["text"] for line in content.splitlines() if line.strip()]
        else:
            texts = [content]
    except (OSError, ValueError, KeyError, TypeError) as error:
        known = ", ".join([*demo.KINDS, "all"])
        raise SettingsError(f"--prompts {chosen!r} is neither one of {known} nor a readable file: {error}") from error
    if not any(texts):
        raise SettingsError(f"--prompts {chosen}: there is no text in it")
    return [(f"{path.stem}-{number:02}", path.stem, text) for number, text in enumerate(texts[:limit], 1)]


@contextlib.contextmanager
def progress_bar(console: Console, total: int) -> Iterator[Callable[[str], None]]:
    """A progress bar of `total` calls; yields what to call after each, with what was done."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("compiling", total=total)
        yield lambda what: bar.update(task, advance=1, description=what)


def dtypes_order(contestants: Sequence[Contestant]) -> list[str]:
    """The dtypes in the order they were asked for."""
    return list(dict.fromkeys(contestant.dtype for contestant in contestants))


def footnote(machine: dict[str, Any]) -> str:
    """The machine in a line."""
    return (
        f"{machine['cpu']}, {machine['threads']} threads, device {machine['device']}, "
        f"copy bandwidth {machine['copy_bandwidth'] / 1e9:.1f} GB/s; "
        f"torch {machine['torch']}, transformers {machine['transformers']}, decoders {machine['decoders']}"
    )


def write_json(result: dict[str, Any], path: Path) -> None:
    """Writes `result` to `path`, or to standard output for ``-``.

    Raises:
        SettingsError: it cannot be written.
    """
    text = json.dumps(result, indent=2, default=str) + "\n"
    if str(path) == "-":
        sys.stdout.write(text)
        return
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"--json {path}: {error.strerror}") from error
