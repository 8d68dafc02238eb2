"""``decoders train eagle3``: a head that drafts from a model's hidden states."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, cast

import typer

from ..errors import UnknownNameError
from ..training.recipes import HeadTraining
from .console import plain_console
from .training_options import (
    AsJson,
    Bf16,
    CheckpointMinutes,
    Data,
    Epochs,
    Held,
    Length,
    ModelType,
    Output,
    OwnShare,
    Patience,
    Rate,
    Resume,
    RowsPerStep,
    Seed,
    TestText,
    Tokens,
    command_line,
    indices,
    texts_of,
)

DEFAULTS = HeadTraining()
FORMATS = ("speculators", "authors")


def eagle3(
    model: Annotated[str, typer.Option(help='Path or hub name of the model that gets the head, or "demo".')],
    data: Data = None,
    out: Output = Path("eagle3-head"),
    held: Held = None,
    test: TestText = None,
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
    tokens: Tokens = DEFAULTS.tokens,
    length: Length = DEFAULTS.length,
    own_share: OwnShare = DEFAULTS.own_share,
    epochs: Epochs = DEFAULTS.epochs,
    rows: RowsPerStep = DEFAULTS.rows,
    rate: Rate = DEFAULTS.rate,
    chains: Annotated[
        float,
        typer.Option(
            min=0,
            max=1,
            help="Share of the positions at which more than one token is simulated; a third is twice as fast.",
        ),
    ] = DEFAULTS.chains,
    decay: Annotated[
        float, typer.Option(min=0, max=1, help="Weight of the loss of one simulated token over the one before.")
    ] = DEFAULTS.decay,
    checks: Annotated[int, typer.Option(min=1, help="Checks of held-out acceptance per epoch.")] = DEFAULTS.checks,
    patience: Patience = DEFAULTS.patience,
    seed: Seed = DEFAULTS.seed,
    form: Annotated[str, typer.Option("--format", help="speculators (vLLM's) or authors.")] = "speculators",
    dtype: ModelType = "float32",
    bf16: Bf16 = DEFAULTS.bf16,
    resume: Resume = True,
    checkpoint_minutes: CheckpointMinutes = 1.0,
    as_json: AsJson = False,
) -> None:
    """Train an EAGLE-3 head for a model, which stays frozen: its own outputs are fed back as in decoding."""
    import json

    if form not in FORMATS:
        raise UnknownNameError("format of a head", form, FORMATS)
    training = HeadTraining(
        depth=depth, layers=indices(layers), intermediate=intermediate, draft_vocab=draft_vocab, tokens=tokens,
        length=length, own_share=own_share, epochs=epochs, rows=rows, rate=rate, chains=chains, decay=decay, bf16=bf16,
        checks=checks, patience=patience, seed=seed,
    )  # fmt: skip

    from ..training.eagle3 import train_eagle3
    from .demo_texts import EDIT_TASKS
    from .models import load

    texts = texts_of(model, data, held, test, EDIT_TASKS)
    loaded, tokenizer = load(model, dtype)
    figures = train_eagle3(
        loaded, tokenizer, texts.texts, out, run=training, held=texts.held, test=texts.test,
        start=start, form=cast(Any, form), command=command_line(), resume=resume, checkpoint_minutes=checkpoint_minutes,
        console=None if as_json else plain_console(),
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
