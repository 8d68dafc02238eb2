"""The group ``decoders train``, and its command for n-gram tables. :mod:`.train_drafters` defines the other commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..common.files import write_whole
from ..errors import SettingsError, amount
from ..training.recipes import SEEDS
from .benches import check_writable
from .catalogue import ExtensibleGroup
from .console import plain_console, waiting
from .models import CompiledSteps, Device, Dtype, Threads
from .training_options import AsJson

app = typer.Typer(
    no_args_is_help=True,
    help="Train draft models, draft heads, and n-gram tables.",
    cls=ExtensibleGroup,
    rich_markup_mode=None,
)


@app.callback()
def train() -> None:
    """Train draft models, draft heads, and n-gram tables."""


@app.command()
def ngram(
    out: Annotated[Path, typer.Argument(help="File to write, usually *.safetensors.", dir_okay=False)],
    model: Annotated[str, typer.Option(help='Folder or Hub name of a causal language model, "demo" or "demo:draft".')],
    prompts: Annotated[list[Path] | None, typer.Option(help="Text file to cut prompts from. Repeatable.")] = None,
    prompt_length: Annotated[
        int, typer.Option(min=1, help="Number of tokens of each prompt that is cut from --prompts.")
    ] = 32,
    tokens: Annotated[int, typer.Option(min=3, help="Number of tokens to sample and count.")] = 200_000,
    seed: Annotated[int, typer.Option(**SEEDS, help="Seed of the sampling and of the choice of prompts.")] = 0,
    temperature: Annotated[float, typer.Option(help="Sampling temperature.")] = 1.0,
    rows: Annotated[int, typer.Option(min=1, help="Number of texts sampled at once (batch size).")] = 16,
    length: Annotated[int, typer.Option(min=3, help="Maximum number of tokens per text.")] = 256,
    followers: Annotated[
        int, typer.Option(min=1, max=256, help="Maximum number of next tokens kept for each context.")
    ] = 16,
    dtype: Dtype = "float32",
    device: Device = None,
    threads: Threads = None,
    compile: CompiledSteps = True,
    as_json: AsJson = False,
) -> None:
    """Count the n-grams of texts that a model samples, for strategy ngram. Without --prompts, texts begin with the BOS token alone."""
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
                raise SettingsError(f"OUT {out} exists, and only an n-gram table is overwritten: {error}") from error
        loaded, tokenizer = models.load(model, dtype, device)
        decoders.enable(loaded, tokenizer=tokenizer)
    starts = [start for text in texts for start in excerpts(tokenizer(text, verbose=False)["input_ids"], prompt_length)]
    if not texts and tokenizer.bos_token_id is None:
        raise SettingsError(f"the tokenizer of {model} has no BOS token: give files with --prompts")
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
