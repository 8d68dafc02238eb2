"""``decoders train draft``: a small model that drafts for a target."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, cast

import typer

from ..training.recipes import DraftTraining
from .console import plain_console
from .training_options import (
    AsJson,
    Bf16,
    CheckpointMinutes,
    Data,
    Epochs,
    Held,
    Length,
    Output,
    Patience,
    Rate,
    Resume,
    RowsPerStep,
    Seed,
    Tokens,
    command_line,
    indices,
    texts_of,
)

DEFAULTS = DraftTraining()


def draft(
    model: Annotated[str, typer.Option(help='Path or hub name of the target, or "demo".')],
    data: Data = None,
    out: Output = Path("draft-model"),
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
    held: Held = None,
    test: Annotated[
        list[Path] | None,
        typer.Option(help="Text that acceptance is measured on, for the card. Default: that held out."),
    ] = None,
    tokens: Tokens = DEFAULTS.tokens,
    length: Length = DEFAULTS.length,
    own_share: Annotated[
        float, typer.Option(min=0, max=1, help="Share of the rows that the target continues itself.")
    ] = DEFAULTS.own_share,
    epochs: Epochs = DEFAULTS.epochs,
    rows: RowsPerStep = DEFAULTS.rows,
    rate: Rate = DEFAULTS.rate,
    checks: Annotated[int, typer.Option(min=1, help="Checks of held-out agreement per epoch.")] = DEFAULTS.checks,
    patience: Patience = DEFAULTS.patience,
    seed: Seed = DEFAULTS.seed,
    dtype: Annotated[str, typer.Option(help="Of the target: float32, bfloat16, float16 or auto.")] = "float32",
    bf16: Bf16 = DEFAULTS.bf16,
    resume: Resume = True,
    checkpoint_minutes: CheckpointMinutes = 1.0,
    as_json: AsJson = False,
) -> None:
    """Make a draft model for a target: some of its layers, or a smaller model, taught by its texts and distributions."""
    import json

    training = DraftTraining(
        origin=cast(Any, origin), count=layers, keep=indices(keep), hidden=hidden, tokens=tokens, length=length,
        own_share=own_share, epochs=epochs, rows=rows, rate=rate, bf16=bf16, checks=checks, patience=patience, seed=seed,
    )  # fmt: skip

    from ..training.draft import train_draft
    from .demo_texts import EDIT_TASKS
    from .models import load

    texts = texts_of(model, data, held, test, EDIT_TASKS)
    loaded, tokenizer = load(model, dtype)
    figures = train_draft(
        loaded, tokenizer, texts.texts, out, run=training, held=texts.held, test=texts.test,
        command=command_line(), resume=resume, checkpoint_minutes=checkpoint_minutes,
        console=None if as_json else plain_console(),
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
