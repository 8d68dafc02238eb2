"""``decoders train medusa``, ``eagle3``, ``dflash`` and ``draft``: train networks that draft for a model."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from ..errors import amount
from ..training.recipes import BlockTraining, DraftTraining, HeadsTraining, HeadTraining, Recipe
from .benches import with_options_of
from .training_options import Output, prepared

if TYPE_CHECKING:
    from ..training.texts import Job

R = TypeVar("R", bound=Recipe)
Target = Annotated[str, typer.Option(help='Folder or Hub name of the target, which the network drafts for, or "demo".')]


def training(kind: type[Recipe]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator for a command ``f(own…, **options)``. Its further options are the fields of the recipe `kind`, and the options of
    :func:`~.training_options.prepared`.
    """

    return lambda command: with_options_of(prepared)(with_options_of(kind)(command))


def taken(kind: type[R], options: dict[str, Any]) -> R:
    """The recipe that `options` describe. Removes its fields from `options`."""
    return kind(**{field.name: options.pop(field.name) for field in dataclasses.fields(kind)})


@training(HeadsTraining)
def medusa(
    model: Target,
    out: Output = Path("medusa-heads"),
    tree: Annotated[
        bool, typer.Option(help="Search the draft tree that suits the heads, and save it with them.")
    ] = True,
    nodes: Annotated[int, typer.Option(min=1, max=1024, help="Maximum number of nodes of that tree.")] = 63,
    given: Annotated[
        Path | None,
        typer.Option(
            "--from",
            help="Folder of trained heads, in this package's format or the authors': skip training, only search their "
            "draft tree.",
        ),
    ] = None,
    **options: Any,
) -> None:
    """Train Medusa heads for a frozen target, and search their draft tree."""
    from ..heads.medusa import load_heads
    from ..training.medusa import train_medusa

    present, run = load_heads(given) if given is not None else None, taken(HeadsTraining, options)
    loaded, tokenizer, job = prepared(model, out, **options)
    conclude(train_medusa(loaded, tokenizer, job, run=run, tree=tree, nodes=nodes, given=present), job)


@training(HeadTraining)
def eagle3(
    model: Target,
    out: Output = Path("eagle3-head"),
    start: Annotated[
        Path | None,
        typer.Option(
            "--from", help="Folder of a head to train further, such as a published one. Default: train a new head."
        ),
    ] = None,
    form: Annotated[
        Literal["speculators", "authors"],
        typer.Option("--format", help="Checkpoint format: speculators (vLLM's) or authors (of EAGLE-3)."),
    ] = "speculators",
    **options: Any,
) -> None:
    """Train an EAGLE-3 head for a frozen target. The head reads its own outputs in training, as in decoding."""
    run = taken(HeadTraining, options)

    from ..training.eagle3 import train_eagle3

    loaded, tokenizer, job = prepared(model, out, **options)
    conclude(train_eagle3(loaded, tokenizer, job, run=run, start=start, form=form), job)


@training(BlockTraining)
def dflash(
    model: Target,
    out: Output = Path("dflash-model"),
    start: Annotated[
        Path | None,
        typer.Option("--from", help="Folder of a draft model to train further. Default: train a new one."),
    ] = None,
    **options: Any,
) -> None:
    """Train a DFlash draft model, which drafts a block of tokens in one forward pass, for a frozen target."""
    run = taken(BlockTraining, options)

    from ..training.dflash import train_dflash

    loaded, tokenizer, job = prepared(model, out, **options)
    conclude(train_dflash(loaded, tokenizer, job, run=run, start=start), job)


@training(DraftTraining)
def draft(model: Target, out: Output = Path("draft-model"), **options: Any) -> None:
    """Train a draft model by distillation: some of the target's layers, or a smaller model from scratch."""
    run = taken(DraftTraining, options)

    from ..training.draft_model import train_draft

    loaded, tokenizer, job = prepared(model, out, **options)
    conclude(train_draft(loaded, tokenizer, job, run=run), job)


def conclude(figures: dict[str, Any], job: Job) -> None:
    """Prints the results of a training as lines of text, or as JSON if the job has no console (``--json``)."""
    if job.console is None:
        typer.echo(json.dumps(figures, indent=2))
        return
    for line in lines_of(figures):
        job.console.print(line)
    job.console.print(f"Written to {job.out}.", soft_wrap=True)


def lines_of(figures: dict[str, Any]) -> Iterator[str]:
    """Yields lines of text about the network: its size, how many draft tokens are accepted, and its draft tree."""
    if "parameters" in figures:
        beside = f", the target has {figures['target_parameters']:,}" if "target_parameters" in figures else ""
        yield f"{figures['parameters']:,} parameters{beside}"
    texts = {f"{which}, {kind}": facts for which in ("held", "test") for kind, facts in figures.get(which, {}).items()}
    for name, facts in (texts | {name: figures[name] for name in ("greedy", "sampled") if name in figures}).items():
        reached = ", ".join(f"{share:.1%}" for share in facts["reached"])
        yield f"{name}: {facts['tokens_per_step']:.2f} tokens per step; accepted up to token 1, 2, …: {reached}"
    if (trees := figures.get("trees")) is not None:
        nodes, searched = trees["nodes"], trees["searched"]
        default = f"the default's first {nodes}: {trees['default']:.3f}"
        yield f"tree of {amount(nodes, 'node')}: {searched:.3f} tokens a step; {default}"
