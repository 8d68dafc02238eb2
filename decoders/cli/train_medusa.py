"""``decoders train medusa``: heads for a model, and the tree that suits them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from ..medusa.config import HeadsTraining

if TYPE_CHECKING:
    from ..demo.corpus import Source

DEFAULTS = HeadsTraining()
#: So many make about a quarter of the demo models' text, as in their own training.
EDIT_TASKS = 8000


def medusa(
    model: Annotated[str, typer.Option(help='Path or hub name of the model that gets the heads, or "demo".')],
    data: Annotated[
        list[Path] | None,
        typer.Option(help="Text file, or folder of them; may be repeated. For the demo model: its own."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder to write to; continued if a run was interrupted.")] = Path(
        "medusa-heads"
    ),
    held: Annotated[
        list[Path] | None,
        typer.Option(help="Text to judge by (early stop, tree); may be repeated. Default: a twentieth of the data."),
    ] = None,
    test: Annotated[
        list[Path] | None, typer.Option(help="Text to measure on at the end, for the card; may be repeated.")
    ] = None,
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
    length: Annotated[int, typer.Option(min=16, help="Tokens per row.")] = DEFAULTS.length,
    own_share: Annotated[
        float, typer.Option(min=0, max=1, help="Share of the rows that the model continues itself.")
    ] = DEFAULTS.own_share,
    epochs: Annotated[int, typer.Option(min=1, help="Most passes over the text.")] = DEFAULTS.epochs,
    batch: Annotated[int, typer.Option(min=1, help="Positions per step.")] = DEFAULTS.batch,
    rate: Annotated[float, typer.Option(min=0, help="Peak learning rate.")] = DEFAULTS.rate,
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
    dtype: Annotated[str, typer.Option(help="Of the model: float32, bfloat16, float16 or auto.")] = "float32",
    bf16: Annotated[
        bool, typer.Option(help="Compute, and keep hidden states, in bfloat16 instead of float32.")
    ] = DEFAULTS.bf16,
    resume: Annotated[bool, typer.Option(help="Continue what lies under the folder.")] = True,
    checkpoint_minutes: Annotated[float, typer.Option(min=0, help="Minutes between checkpoints.")] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON, no progress.")] = False,
) -> None:
    """Train Medusa heads for a model, which stays frozen, and find their tree."""
    import json

    from rich.console import Console

    from ..medusa.files import load_heads
    from ..medusa.train import train_medusa
    from ..training.texts import read_files
    from .models import load

    loaded, tokenizer = load(model, dtype)
    if data is None and model == "demo":
        texts = demo_texts()
    else:
        texts = {"texts": read_files(data or [])}
    texts |= {name: read_files(paths) for name, paths in (("held", held), ("test", test)) if paths}
    training = HeadsTraining(
        heads=heads, layers=layers, projection=cast(Any, projection), rank=rank, tokens=tokens, length=length,
        own_share=own_share, epochs=epochs, batch=batch, rate=rate, bf16=bf16, patience=patience, seed=seed,
    )  # fmt: skip
    figures = train_medusa(
        loaded, tokenizer, out=out, run=training, tree=tree, nodes=nodes,
        texts=texts["texts"], held=texts.get("held", ()), test=texts.get("test", ()),
        given=load_heads(given) if given is not None else None, resume=resume,
        checkpoint_minutes=checkpoint_minutes, console=None if as_json else Console(),
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


def demo_texts(edit_tasks: int = 0) -> dict[str, list[str]]:
    """The demo models' training files to learn from; of the files that no model has seen those that the prompts come from to
    test on, the others to judge by.

    Args:
        edit_tasks: of them, as the demo models' training has, beside the files to learn from; a twentieth as many beside the others.
    """
    from ..demo import corpus, prompts

    learnt, unseen = corpus.split(corpus.read_sources())
    prompted = {prompt.source for prompt in prompts()}
    sets = {
        "texts": learnt,
        "held": [source for source in unseen if source.path not in prompted],
        "test": [source for source in unseen if source.path in prompted],
    }
    counts = {"texts": edit_tasks, "held": edit_tasks // 20, "test": edit_tasks // 20}
    return {
        name: [source.text for source in sources] + _edit_tasks(sources, counts[name]) for name, sources in sets.items()
    }


def _edit_tasks(sources: list[Source], count: int) -> list[str]:
    """Tasks about functions of `sources`, the same in every run."""
    import random

    from ..demo import edits

    functions, rng = edits.functions(sources) if count else [], random.Random(0)
    names = edits.new_names(functions)
    return [edits.edit_task(rng.choice(functions), names, rng).text for _ in range(count if functions and names else 0)]
