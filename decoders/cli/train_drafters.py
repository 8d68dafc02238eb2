"""``decoders train medusa``, ``eagle3``, ``dflash`` and ``draft``: train networks that draft for a model."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from ..errors import UnknownNameError, amount
from ..training.recipes import BlockTraining, DraftTraining, HeadsTraining, HeadTraining
from .benches import with_options_of
from .training_options import (
    SEEDS,
    Bf16,
    DraftVocab,
    Epochs,
    Intermediate,
    Length,
    Output,
    OwnShare,
    Patience,
    Rate,
    ReadLayers,
    RowsPerStep,
    Seed,
    Tokens,
    indices,
    prepared,
)

if TYPE_CHECKING:
    from ..training.texts import Job

MEDUSA, EAGLE3, DFLASH, DRAFT = HeadsTraining(), HeadTraining(), BlockTraining(), DraftTraining()
FORMATS = ("speculators", "authors")


@with_options_of(prepared, without=["edit_tasks"])
def medusa(
    model: Annotated[str, typer.Option(help='Folder or Hub name of the target, which gets the heads, or "demo".')],
    out: Output = Path("medusa-heads"),
    held: Annotated[
        list[Path] | None,
        typer.Option(
            help="Held-out text file, for early stopping and the tree search. Repeatable. Default: a twentieth of the "
            "data."
        ),
    ] = None,
    heads: Annotated[
        int, typer.Option(min=1, max=8, help="Number of heads: tokens drafted beyond the next one.")
    ] = MEDUSA.heads,
    layers: Annotated[int, typer.Option(min=1, max=8, help="Number of residual blocks per head.")] = MEDUSA.layers,
    projection: Annotated[
        str,
        typer.Option(
            help="Output projection of a head. tied: the target's output head. low_rank: the same plus a trained low-rank "
            "difference. full: one of its own."
        ),
    ] = MEDUSA.projection,
    rank: Annotated[int, typer.Option(min=0, help="Rank of the difference of --projection low_rank.")] = MEDUSA.rank,
    tokens: Annotated[
        int,
        typer.Option(
            min=1, help="Maximum number of training tokens; their hidden states are kept on disk during training."
        ),
    ] = MEDUSA.tokens,
    length: Length = MEDUSA.length,
    own_share: OwnShare = MEDUSA.own_share,
    epochs: Epochs = MEDUSA.epochs,
    batch: Annotated[int, typer.Option(min=1, help="Number of token positions per training step.")] = MEDUSA.batch,
    rate: Rate = MEDUSA.rate,
    patience: Annotated[
        int,
        typer.Option(
            min=1, help="Number of evaluations of held-out accuracy without improvement after which training stops."
        ),
    ] = MEDUSA.patience,
    seed: Annotated[int, typer.Option(**SEEDS, help="Random seed of the data order.")] = MEDUSA.seed,
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
    bf16: Annotated[
        bool, typer.Option(help="Compute and store hidden states in bfloat16 instead of float32.")
    ] = MEDUSA.bf16,
    **options: Any,
) -> None:
    """Train Medusa heads for a frozen target, and search their draft tree."""
    from ..heads.medusa import load_heads
    from ..training.medusa import train_medusa

    present = load_heads(given) if given is not None else None
    training = HeadsTraining(
        heads=heads, layers=layers, projection=cast(Any, projection), rank=rank, tokens=tokens, length=length,
        own_share=own_share, epochs=epochs, batch=batch, rate=rate, bf16=bf16, patience=patience, seed=seed,
    )  # fmt: skip
    loaded, tokenizer, job = prepared(model, out, held=held, edit_tasks=0, **options)
    figures = train_medusa(
        loaded, tokenizer, texts=job.texts, out=out, run=training, held=job.held, test=job.test, tree=tree, nodes=nodes,
        given=present, resume=job.resume, checkpoint_minutes=job.checkpoint_minutes, console=job.console,
    )  # fmt: skip
    conclude(figures, job)


@with_options_of(prepared, without=["edit_tasks"])
def eagle3(
    model: Annotated[str, typer.Option(help='Folder or Hub name of the target, which gets the head, or "demo".')],
    out: Output = Path("eagle3-head"),
    start: Annotated[
        Path | None,
        typer.Option(
            "--from", help="Folder of a head to train further, such as a published one. Default: train a new head."
        ),
    ] = None,
    depth: Annotated[
        int,
        typer.Option(
            min=1, max=16, help="Number of draft tokens that training simulates (the paper's training-time test)."
        ),
    ] = EAGLE3.depth,
    layers: ReadLayers = None,
    intermediate: Intermediate = None,
    draft_vocab: DraftVocab = None,
    tokens: Tokens = EAGLE3.tokens,
    length: Length = EAGLE3.length,
    own_share: OwnShare = EAGLE3.own_share,
    epochs: Epochs = EAGLE3.epochs,
    rows: RowsPerStep = EAGLE3.rows,
    rate: Rate = EAGLE3.rate,
    chains: Annotated[
        float,
        typer.Option(
            min=0,
            max=1,
            help="Fraction of the positions at which more than one draft token is simulated; with a third, training is "
            "twice as fast.",
        ),
    ] = EAGLE3.chains,
    decay: Annotated[
        float, typer.Option(min=0, max=1, help="Loss weight of each simulated token, relative to the token before.")
    ] = EAGLE3.decay,
    checks: Annotated[
        int, typer.Option(min=1, help="Number of evaluations of held-out acceptance per epoch.")
    ] = EAGLE3.checks,
    patience: Patience = EAGLE3.patience,
    seed: Seed = EAGLE3.seed,
    form: Annotated[
        str, typer.Option("--format", help="Checkpoint format: speculators (vLLM's) or authors (of EAGLE-3).")
    ] = "speculators",
    bf16: Bf16 = EAGLE3.bf16,
    **options: Any,
) -> None:
    """Train an EAGLE-3 head for a frozen target. The head reads its own outputs in training, as in decoding."""
    if form not in FORMATS:
        raise UnknownNameError("format of a head", form, FORMATS)
    training = HeadTraining(
        depth=depth, layers=indices(layers), intermediate=intermediate, draft_vocab=draft_vocab, tokens=tokens,
        length=length, own_share=own_share, epochs=epochs, rows=rows, rate=rate, chains=chains, decay=decay, bf16=bf16,
        checks=checks, patience=patience, seed=seed,
    )  # fmt: skip

    from ..training.eagle3 import train_eagle3

    loaded, tokenizer, job = prepared(model, out, **options)
    conclude(train_eagle3(loaded, tokenizer, job, run=training, start=start, form=cast(Any, form)), job)


@with_options_of(prepared, without=["edit_tasks"])
def dflash(
    model: Annotated[str, typer.Option(help='Folder or Hub name of the target, or "demo".')],
    out: Output = Path("dflash-model"),
    start: Annotated[
        Path | None,
        typer.Option("--from", help="Folder of a draft model to train further. Default: train a new one."),
    ] = None,
    block: Annotated[
        int, typer.Option(min=2, max=64, help="Number of tokens drafted in one forward pass.")
    ] = DFLASH.block,
    depth: Annotated[
        int, typer.Option(min=1, max=16, help="Number of decoder layers of the draft model.")
    ] = DFLASH.depth,
    layers: ReadLayers = None,
    intermediate: Intermediate = None,
    rank: Annotated[
        int,
        typer.Option(
            min=0, help="Rank of the head, which scores each draft token by the tokens before it (DSpark). 0: no head."
        ),
    ] = DFLASH.rank,
    head: Annotated[
        str,
        typer.Option(
            help="Kind of head. vanilla: scores by the previous token. rnn: by all previous tokens and the hidden state at "
            "the position."
        ),
    ] = DFLASH.head,
    draft_vocab: DraftVocab = None,
    tokens: Tokens = DFLASH.tokens,
    length: Length = DFLASH.length,
    own_share: OwnShare = DFLASH.own_share,
    epochs: Epochs = DFLASH.epochs,
    rows: RowsPerStep = DFLASH.rows,
    rate: Rate = DFLASH.rate,
    blocks: Annotated[
        float,
        typer.Option(
            min=0,
            max=1,
            help="Fraction of the positions at which a block begins; the positions are drawn anew in every step.",
        ),
    ] = DFLASH.blocks,
    decay: Annotated[
        float, typer.Option(min=0, max=1, help="Loss weight of each token of a block, relative to the token before.")
    ] = DFLASH.decay,
    checks: Annotated[
        int, typer.Option(min=1, help="Number of evaluations of held-out acceptance per epoch.")
    ] = DFLASH.checks,
    patience: Patience = DFLASH.patience,
    seed: Seed = DFLASH.seed,
    bf16: Bf16 = DFLASH.bf16,
    **options: Any,
) -> None:
    """Train a DFlash draft model, which drafts a block of tokens in one forward pass, for a frozen target."""
    training = BlockTraining(
        block=block, depth=depth, layers=indices(layers), intermediate=intermediate, rank=rank,
        head=cast(Any, head), draft_vocab=draft_vocab, tokens=tokens, length=length, own_share=own_share, epochs=epochs,
        rows=rows, rate=rate, blocks=blocks, decay=decay,
        bf16=bf16, checks=checks, patience=patience, seed=seed,
    )  # fmt: skip

    from ..training.dflash import train_dflash

    loaded, tokenizer, job = prepared(model, out, **options)
    conclude(train_dflash(loaded, tokenizer, job, run=training, start=start), job)


@with_options_of(prepared, without=["edit_tasks"])
def draft(
    model: Annotated[str, typer.Option(help='Folder or Hub name of the target, or "demo".')],
    out: Output = Path("draft-model"),
    origin: Annotated[
        str,
        typer.Option(
            "--from",
            help="What to start from. layers: some of the target's own layers. scratch: a smaller, untrained model of the "
            "same class.",
        ),
    ] = DRAFT.origin,
    layers: Annotated[
        int | None, typer.Option(min=1, help="Number of layers of the draft model. Default: a sixth of the target's.")
    ] = None,
    keep: Annotated[
        str | None,
        typer.Option(help="Target layers to keep, such as 0,1,29; -1 is the last. Default: evenly spread."),
    ] = None,
    hidden: Annotated[
        int | None,
        typer.Option(min=1, help="Hidden size, with --from scratch. Default: about a quarter of the target's."),
    ] = None,
    test: Annotated[
        list[Path] | None,
        typer.Option(
            help="Test text file, for the acceptance in the model card. Repeatable. Default: the held-out text."
        ),
    ] = None,
    tokens: Tokens = DRAFT.tokens,
    length: Length = DRAFT.length,
    own_share: OwnShare = DRAFT.own_share,
    epochs: Epochs = DRAFT.epochs,
    rows: RowsPerStep = DRAFT.rows,
    rate: Rate = DRAFT.rate,
    checks: Annotated[
        int, typer.Option(min=1, help="Number of evaluations of held-out agreement per epoch.")
    ] = DRAFT.checks,
    patience: Patience = DRAFT.patience,
    seed: Seed = DRAFT.seed,
    bf16: Bf16 = DRAFT.bf16,
    **options: Any,
) -> None:
    """Train a draft model by distillation: some of the target's layers, or a smaller model from scratch."""
    training = DraftTraining(
        origin=cast(Any, origin), count=layers, keep=indices(keep), hidden=hidden, tokens=tokens, length=length,
        own_share=own_share, epochs=epochs, rows=rows, rate=rate, bf16=bf16, checks=checks, patience=patience, seed=seed,
    )  # fmt: skip

    from ..training.draft_model import train_draft

    loaded, tokenizer, job = prepared(model, out, test=test, **options)
    conclude(train_draft(loaded, tokenizer, job, run=training), job)


def conclude(figures: dict[str, Any], job: Job) -> None:
    """Prints the results of a training as lines of text, or as JSON if the job has no console (``--json``)."""
    if job.console is None:
        typer.echo(json.dumps(figures, indent=2))
        return
    for line in lines_of(figures):
        job.console.print(line)
    job.console.print(f"Written to {job.out}.", soft_wrap=True)


def lines_of(figures: dict[str, Any]) -> Iterator[str]:
    """Yields lines of text about the network: its size, how many draft tokens are accepted or right, and its draft tree."""
    if "parameters" in figures:
        beside = f", the target has {figures['target_parameters']:,}" if "target_parameters" in figures else ""
        yield f"{figures['parameters']:,} parameters{beside}"
    texts = {f"{which}, {kind}": facts for which in ("held", "test") for kind, facts in figures.get(which, {}).items()}
    for name, facts in (texts | {name: figures[name] for name in ("greedy", "sampled") if name in figures}).items():
        if "top1" in facts:
            yield f"{name}: heads right {_shares(facts['top1'])}"
        else:
            reached = f"accepted up to token 1, 2, …: {_shares(facts['reached'])}"
            yield f"{name}: {facts['tokens_per_step']:.2f} tokens per step; {reached}"
    if (trees := figures.get("trees")) is not None:
        nodes, searched = trees["nodes"], trees["searched"]
        default = f"the default's first {nodes}: {trees['default']:.3f}"
        yield f"tree of {amount(nodes, 'node')}: {searched:.3f} tokens a step; {default}"


def _shares(values: Iterable[float]) -> str:
    return ", ".join(f"{share:.1%}" for share in values)
