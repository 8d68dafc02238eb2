"""``decoders train …``: trains n-gram tables; :mod:`.train_drafters` has the other commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..common.files import write_whole
from ..errors import SettingsError, amount
from .benches import check_writable
from .catalogue import ExtensibleGroup
from .console import plain_console, waiting
from .models import Device, Dtype, Threads

app = typer.Typer(no_args_is_help=True, help="Train models.", cls=ExtensibleGroup, rich_markup_mode=None)


@app.callback()
def train() -> None:
    """Train models."""


@app.command()
def ngram(
    out: Annotated[Path, typer.Argument(help="File to write, customarily *.safetensors.", dir_okay=False)],
    model: Annotated[str, typer.Option(help='Path or hub name of a causal language model, "demo" or "demo:draft".')],
    prompts: Annotated[list[Path] | None, typer.Option(help="Text file to cut prompts from; may be repeated.")] = None,
    prompt_length: Annotated[int, typer.Option(min=1, help="Tokens per prompt from --prompts.")] = 32,
    tokens: Annotated[int, typer.Option(min=3, help="Tokens to sample and count.")] = 200_000,
    seed: Annotated[int, typer.Option(help="Seed of the sampling and of the choice of prompts.")] = 0,
    temperature: Annotated[float, typer.Option(help="Temperature to sample at.")] = 1.0,
    rows: Annotated[int, typer.Option(min=1, help="Texts sampled together.")] = 16,
    length: Annotated[int, typer.Option(min=3, help="Most tokens per text.")] = 256,
    followers: Annotated[int, typer.Option(min=1, max=256, help="Followers kept of each context.")] = 16,
    dtype: Dtype = "float32",
    device: Device = None,
    threads: Threads = None,
    compile: Annotated[bool, typer.Option("--compile/--no-compile", help="Compile the core of the loop.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON, no progress.")] = False,
) -> None:
    """Sample from a model and count its n-grams, for the strategy ngram. Without --prompts, texts follow the BOS token alone."""
    import json

    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from . import models

    # Mistakes are reported before minutes go into loading and sampling.
    check_writable("OUT", out)
    texts = [models.read_prompt(None, path) for path in prompts or ()]
    console = plain_console(stderr=True, quiet=as_json)
    with waiting(console, f"loading {model}"):
        import decoders

        from ..strategies.ngram_table import NgramTable, excerpts, train_table

        if out.exists():
            try:
                NgramTable.load(out)
            except SettingsError as error:
                raise SettingsError(f"OUT {out} is there, and only a table is replaced: {error}") from error
        loaded, tokenizer = models.load(model, dtype, device)
        decoders.enable(loaded, tokenizer=tokenizer)
    starts = [start for text in texts for start in excerpts(tokenizer(text, verbose=False)["input_ids"], prompt_length)]
    if not texts and tokenizer.bos_token_id is None:
        raise SettingsError(f"the tokenizer of {model} has no token that begins a text: give files with --prompts")
    after = ", ".join(path.name for path in prompts or ()) or "nothing"
    columns = (TextColumn("sampling"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=as_json) as bar:
        task = bar.add_task("sampling", total=tokens)
        table = train_table(
            loaded, starts or [[tokenizer.bos_token_id]], tokens=tokens, rows=rows, length=length,
            temperature=temperature, seed=seed, followers=followers,
            source=f"{model} at temperature {temperature:g}, seed {seed}, after {after}",
            on_progress=lambda counted: bar.update(task, completed=counted),
            **({} if compile else {"decoders_config": {"compile": False}}),
        )  # fmt: skip
    try:
        write_whole(out, table.dump())
    except OSError as error:
        raise SettingsError(f"{out} cannot be written: {error.strerror}") from error
    contexts, size = [order.keys.numel() for order in table.orders], out.stat().st_size
    if as_json:
        figures = {
            "path": str(out), "vocab_size": table.vocab_size, "tokens": table.tokens, "source": table.source,
            "contexts": contexts, "bytes": size,
        }  # fmt: skip
        typer.echo(json.dumps(figures, indent=2))
        return
    shown = ", ".join(f"{count} of {n}" for n, count in enumerate(contexts))
    typer.echo(f"{amount(table.tokens, 'token')}; contexts: {shown} tokens; {size / 1e6:.1f} MB. Written to {out}.")
