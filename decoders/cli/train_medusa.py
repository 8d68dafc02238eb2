"""``decoders train medusa``: heads for a model, and the tree that suits them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, cast

import typer

from ..training.recipes import HeadsTraining
from .console import plain_console
from .training_options import (
    AsJson,
    CheckpointMinutes,
    Data,
    Epochs,
    Length,
    ModelType,
    OwnShare,
    Rate,
    Resume,
    TestText,
    texts_of,
)

DEFAULTS = HeadsTraining()


def medusa(
    model: Annotated[str, typer.Option(help='Path or hub name of the model that gets the heads, or "demo".')],
    data: Data = None,
    out: Annotated[Path, typer.Option(help="Folder to write to; continued if a run was interrupted.")] = Path(
        "medusa-heads"
    ),
    held: Annotated[
        list[Path] | None,
        typer.Option(help="Text to judge by (early stop, tree); may be repeated. Default: a twentieth of the data."),
    ] = None,
    test: TestText = None,
    heads: Annotated[
        int, typer.Option(min=1, max=8, help="Heads: tokens predicted beyond the next one.")
    ] = DEFAULTS.heads,
    layers: Annotated[int, typer.Option(min=1, max=8, help="Residual blocks of each head.")] = DEFAULTS.layers,
    projection: Annotated[
        str, typer.Option(help="tied: the model's output head. low_rank: plus a small difference. full: one per head.")
    ] = DEFAULTS.projection,
    rank: Annotated[int, typer.Option(min=0, help="Rank of projection low_rank.")] = DEFAULTS.rank,
    tokens: Annotated[
        int, typer.Option(min=1, help="Most tokens of text; their hidden states are kept on disk meanwhile.")
    ] = DEFAULTS.tokens,
    length: Length = DEFAULTS.length,
    own_share: OwnShare = DEFAULTS.own_share,
    epochs: Epochs = DEFAULTS.epochs,
    batch: Annotated[int, typer.Option(min=1, help="Positions per step.")] = DEFAULTS.batch,
    rate: Rate = DEFAULTS.rate,
    patience: Annotated[
        int, typer.Option(min=1, help="Checks of held-out accuracy without a gain before training stops.")
    ] = DEFAULTS.patience,
    seed: Annotated[int, typer.Option(help="Seed of the data order.")] = DEFAULTS.seed,
    tree: Annotated[bool, typer.Option(help="Search the tree that suits the heads, and save it with them.")] = True,
    nodes: Annotated[int, typer.Option(min=1, max=1024, help="Node budget of that tree.")] = 63,
    given: Annotated[
        Path | None,
        typer.Option("--from", help="Heads to take as they are (ours or the authors'): only the tree is new."),
    ] = None,
    dtype: ModelType = "float32",
    bf16: Annotated[
        bool, typer.Option(help="Compute, and keep hidden states, in bfloat16 instead of float32.")
    ] = DEFAULTS.bf16,
    resume: Resume = True,
    checkpoint_minutes: CheckpointMinutes = 1.0,
    as_json: AsJson = False,
) -> None:
    """Train Medusa heads for a model, which stays frozen, and find their tree."""
    import json

    from ..heads.medusa import load_heads
    from ..training.medusa import train_medusa
    from .models import load

    loaded, tokenizer = load(model, dtype)
    texts = texts_of(model, data, held, test, edit_tasks=0)
    training = HeadsTraining(
        heads=heads, layers=layers, projection=cast(Any, projection), rank=rank, tokens=tokens, length=length,
        own_share=own_share, epochs=epochs, batch=batch, rate=rate, bf16=bf16, patience=patience, seed=seed,
    )  # fmt: skip
    figures = train_medusa(
        loaded, tokenizer, out=out, run=training, tree=tree, nodes=nodes,
        texts=texts.texts, held=texts.held, test=texts.test,
        given=load_heads(given) if given is not None else None, resume=resume,
        checkpoint_minutes=checkpoint_minutes, console=None if as_json else plain_console(),
    )  # fmt: skip
    if as_json:
        typer.echo(json.dumps(figures, indent=2))
        return
    for which in ("held", "test"):
        for kind, facts in figures.get(which, {}).items():
            shares = ", ".join(f"{share:.1%}" for share in facts["top1"])
            typer.echo(f"{which}, {kind}: heads right {shares}")
    if "trees" in figures:
        trees = figures["trees"]
        typer.echo(
            f"tree of {trees['nodes']} nodes: {trees['searched']:.3f} tokens a step; the default's first "
            f"{trees['nodes']}: {trees['default']:.3f}"
        )
    typer.echo(f"Written to {out}.")
