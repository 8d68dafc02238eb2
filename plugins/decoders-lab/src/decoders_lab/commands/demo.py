"""``decoders train demo``: trains the two models that come with hf-decoders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from decoders.cli.console import plain_console

from ..demo.shapes import LOOP_STEPS, TOKENS


def demo(
    out: Annotated[Path, typer.Argument(help="Directory to write to; continued if a run was interrupted.")] = Path(
        "demo-models"
    ),
    seed: Annotated[int, typer.Option(help="Seed of weights and data order.")] = 0,
    target_tokens: Annotated[int, typer.Option(min=1, help="Training tokens of the target.")] = TOKENS["target"],
    draft_tokens: Annotated[int, typer.Option(min=1, help="Training tokens of the draft.")] = TOKENS["draft"],
    loop_steps: Annotated[
        int,
        typer.Option(min=0, help="Further steps, for each model, that make the loops in its own text unlikely."),
    ] = LOOP_STEPS,
    resume: Annotated[bool, typer.Option(help="Continue from checkpoints under the directory.")] = True,
    compile: Annotated[bool, typer.Option(help="Compile the training step.")] = True,
    bf16: Annotated[bool, typer.Option(help="Compute in bfloat16.")] = True,
    checkpoint_minutes: Annotated[float, typer.Option(min=0, help="Minutes between checkpoints.")] = 2.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the final figures as JSON, no progress.")] = False,
) -> None:
    """Train the demo's target and draft from this Python's own sources."""
    from ..demo.train import train_demo

    figures = train_demo(
        out, seed=seed, target_tokens=target_tokens, draft_tokens=draft_tokens, loop_steps=loop_steps, resume=resume,
        compile=compile, bf16=bf16, checkpoint_minutes=checkpoint_minutes, console=None if as_json else plain_console(),
    )  # fmt: skip
    if as_json:
        typer.echo(json.dumps(figures, indent=2))
        return
    for name, values in figures.items():
        typer.echo(f"{name}: " + ", ".join(f"{key} {value:.4g}" for key, value in values.items()))
    typer.echo(f"Written to {out}.")
