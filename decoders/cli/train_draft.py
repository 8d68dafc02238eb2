"""``decoders train draft``: a small model that drafts for a target."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, cast

import typer

from ..distillation.recipe import DraftTraining
from .train_eagle3 import command_line, indices

DEFAULTS = DraftTraining()


def draft(
    model: Annotated[str, typer.Option(help='Path or hub name of the target, or "demo".')],
    data: Annotated[
        list[Path] | None,
        typer.Option(help="Text file, or folder of them; may be repeated. For the demo model: its own."),
    ] = None,
    out: Annotated[
        Path, typer.Option("--output", "--out", help="Folder to write to; continued if a run was interrupted.")
    ] = Path("draft-model"),
    origin: Annotated[
        str,
        typer.Option("--from", help="layers: some of the target's own, kept. scratch: a smaller model of its kind."),
    ] = DEFAULTS.origin,
    layers: Annotated[
        int | None, typer.Option(min=1, help="Layers of the draft model. Default: a sixth of the target's.")
    ] = None,
    keep: Annotated[
        str | None,
        typer.Option(help="Which of the target's layers, such as 0,1,29; -1 is the last. Default: spread evenly."),
    ] = None,
    hidden: Annotated[
        int | None, typer.Option(min=1, help="Hidden size from scratch. Default: about a quarter of the target's.")
    ] = None,
    held: Annotated[
        list[Path] | None,
        typer.Option(help="Text to judge by (early stop); may be repeated. Default: a twentieth of the data."),
    ] = None,
    test: Annotated[
        list[Path] | None,
        typer.Option(help="Text that acceptance is measured on, for the card. Default: that held out."),
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Most tokens of text.")] = DEFAULTS.tokens,
    length: Annotated[int, typer.Option(min=16, help="Tokens per row.")] = DEFAULTS.length,
    own_share: Annotated[
        float, typer.Option(min=0, max=1, help="Share of the rows that the target continues itself.")
    ] = DEFAULTS.own_share,
    epochs: Annotated[int, typer.Option(min=1, help="Most passes over the text.")] = DEFAULTS.epochs,
    rows: Annotated[int, typer.Option(min=1, help="Rows per step.")] = DEFAULTS.rows,
    rate: Annotated[float, typer.Option(min=0, help="Peak learning rate.")] = DEFAULTS.rate,
    checks: Annotated[int, typer.Option(min=1, help="Checks of held-out agreement per epoch.")] = DEFAULTS.checks,
    patience: Annotated[
        int, typer.Option(min=1, help="Checks without a gain before training stops.")
    ] = DEFAULTS.patience,
    seed: Annotated[int, typer.Option(help="Seed of the weights and of the data order.")] = DEFAULTS.seed,
    dtype: Annotated[str, typer.Option(help="Of the target: float32, bfloat16, float16 or auto.")] = "float32",
    bf16: Annotated[bool, typer.Option(help="Compute in bfloat16 instead of float32.")] = DEFAULTS.bf16,
    resume: Annotated[bool, typer.Option(help="Continue what lies under the folder.")] = True,
    checkpoint_minutes: Annotated[float, typer.Option(min=0, help="Minutes between checkpoints.")] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON, no progress.")] = False,
) -> None:
    """Make a draft model for a target: some of its layers, or a smaller model, taught by its texts and distributions."""
    import json

    from rich.console import Console

    training = DraftTraining(
        origin=cast(Any, origin), count=layers, keep=indices(keep), hidden=hidden, tokens=tokens, length=length,
        own_share=own_share, epochs=epochs, rows=rows, rate=rate, bf16=bf16, checks=checks, patience=patience, seed=seed,
    )  # fmt: skip

    from ..distillation.train import train_draft
    from ..training.texts import read_files
    from .models import load
    from .train_medusa import EDIT_TASKS, demo_texts

    texts = demo_texts(EDIT_TASKS) if data is None and model == "demo" else {"texts": read_files(data or [])}
    texts |= {name: read_files(paths) for name, paths in (("held", held), ("test", test)) if paths}
    loaded, tokenizer = load(model, dtype)
    figures = train_draft(
        loaded, tokenizer, texts["texts"], out, run=training, held=texts.get("held", ()), test=texts.get("test", ()),
        command=command_line(), resume=resume, checkpoint_minutes=checkpoint_minutes,
        console=None if as_json else Console(),
    )  # fmt: skip
    if as_json:
        typer.echo(json.dumps(figures, indent=2))
        return
    typer.echo(f"{figures['parameters']:,} parameters, the target has {figures['target_parameters']:,}")
    for name in ("greedy", "sampled"):
        shares = ", ".join(f"{share:.1%}" for share in figures[name]["reached"])
        typer.echo(
            f"{name}: {figures[name]['tokens_per_step']:.2f} tokens per step; accepted up to token 1, 2, …: {shares}"
        )
    typer.echo(f"Written to {out}.")
