"""``decoders train eagle3``: a head that drafts from a model's hidden states."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from ..eagle3.recipe import HeadTraining
from ..errors import SettingsError, UnknownNameError

DEFAULTS = HeadTraining()
FORMATS = ("speculators", "authors")


def eagle3(
    model: Annotated[str, typer.Option(help='Path or hub name of the model that gets the head, or "demo".')],
    data: Annotated[
        list[Path] | None,
        typer.Option(help="Text file, or folder of them; may be repeated. For the demo model: its own."),
    ] = None,
    out: Annotated[
        Path, typer.Option("--output", "--out", help="Folder to write to; continued if a run was interrupted.")
    ] = Path("eagle3-head"),
    held: Annotated[
        list[Path] | None,
        typer.Option(help="Text to judge by (early stop); may be repeated. Default: a twentieth of the data."),
    ] = None,
    test: Annotated[
        list[Path] | None, typer.Option(help="Text to measure on at the end, for the card; may be repeated.")
    ] = None,
    start: Annotated[
        Path | None,
        typer.Option("--from", help="Folder of a head to begin with, such as a published one. Default: a new one."),
    ] = None,
    depth: Annotated[
        int, typer.Option(min=1, max=16, help="Drafted tokens that training simulates, each on the one before.")
    ] = DEFAULTS.depth,
    layers: Annotated[
        str | None,
        typer.Option(help="Layers of the model that are read, such as 1,15,28; -1 is the last. Default: by its depth."),
    ] = None,
    intermediate: Annotated[
        int | None, typer.Option(min=1, help="Width of the layer's MLP. Default: the model's.")
    ] = None,
    draft_vocab: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens that the head can propose: the data's most frequent. Default: all."),
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Most tokens of text.")] = DEFAULTS.tokens,
    length: Annotated[int, typer.Option(min=16, help="Tokens per row.")] = DEFAULTS.length,
    own_share: Annotated[
        float, typer.Option(min=0, max=1, help="Share of the rows that the model continues itself.")
    ] = DEFAULTS.own_share,
    epochs: Annotated[int, typer.Option(min=1, help="Most passes over the text.")] = DEFAULTS.epochs,
    rows: Annotated[int, typer.Option(min=1, help="Rows per step.")] = DEFAULTS.rows,
    rate: Annotated[float, typer.Option(min=0, help="Peak learning rate.")] = DEFAULTS.rate,
    decay: Annotated[
        float, typer.Option(min=0, max=1, help="Weight of the loss of one simulated token over the one before.")
    ] = DEFAULTS.decay,
    checks: Annotated[int, typer.Option(min=1, help="Checks of held-out acceptance per epoch.")] = DEFAULTS.checks,
    patience: Annotated[
        int, typer.Option(min=1, help="Checks without a gain before training stops.")
    ] = DEFAULTS.patience,
    seed: Annotated[int, typer.Option(help="Seed of the weights and of the data order.")] = DEFAULTS.seed,
    form: Annotated[str, typer.Option("--format", help="speculators (vLLM's) or authors.")] = "speculators",
    dtype: Annotated[str, typer.Option(help="Of the model: float32, bfloat16, float16 or auto.")] = "float32",
    bf16: Annotated[bool, typer.Option(help="Compute in bfloat16 instead of float32.")] = DEFAULTS.bf16,
    resume: Annotated[bool, typer.Option(help="Continue what lies under the folder.")] = True,
    checkpoint_minutes: Annotated[float, typer.Option(min=0, help="Minutes between checkpoints.")] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON, no progress.")] = False,
) -> None:
    """Train an EAGLE-3 head for a model, which stays frozen: its own outputs are fed back as in decoding."""
    import json

    from rich.console import Console

    if form not in FORMATS:
        raise UnknownNameError("format of a head", form, FORMATS)
    training = HeadTraining(
        depth=depth, layers=indices(layers), intermediate=intermediate, draft_vocab=draft_vocab, tokens=tokens,
        length=length, own_share=own_share, epochs=epochs, rows=rows, rate=rate, decay=decay, bf16=bf16, checks=checks,
        patience=patience, seed=seed,
    )  # fmt: skip

    from ..eagle3.train import train_eagle3
    from ..training.texts import read_files
    from .models import load
    from .train_medusa import EDIT_TASKS, demo_texts

    texts = demo_texts(EDIT_TASKS) if data is None and model == "demo" else {"texts": read_files(data or [])}
    texts |= {name: read_files(paths) for name, paths in (("held", held), ("test", test)) if paths}
    loaded, tokenizer = load(model, dtype)
    figures = train_eagle3(
        loaded, tokenizer, texts["texts"], out, run=training, held=texts.get("held", ()), test=texts.get("test", ()),
        start=start, form=cast(Any, form), command=command_line(), resume=resume, checkpoint_minutes=checkpoint_minutes,
        console=None if as_json else Console(),
    )  # fmt: skip
    if as_json:
        typer.echo(json.dumps(figures, indent=2))
        return
    for which in ("held", "test"):
        for kind, facts in figures.get(which, {}).items():
            shares = ", ".join(f"{share:.1%}" for share in facts["reached"])
            typer.echo(
                f"{which}, {kind}: accepted up to token 1, 2, …: {shares}; {facts['tokens_per_step']:.2f} tokens a step"
            )
    typer.echo(f"Written to {out}.")


def indices(layers: str | None) -> tuple[int, ...] | None:
    """``"1,15,28"`` as numbers.

    Raises:
        SettingsError: it is none of the kind.
    """
    if layers is None:
        return None
    try:
        return tuple(int(layer) for layer in layers.split(","))
    except ValueError as error:
        raise SettingsError(f"layers are numbers with commas between, such as 1,15,28, not {layers!r}") from error


def command_line() -> str:
    """This command as it was typed, for a card."""
    import shlex

    return shlex.join(["decoders", *sys.argv[1:]])
