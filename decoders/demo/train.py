"""`train_demo`: the two demo models from nothing but this Python's own sources."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ..training import Trainer, TrainingError
from . import card, corpus
from .batches import Batches
from .evaluate import agreement, evaluate
from .learner import DemoLearner, DemoTraining
from .shapes import SHAPES, TOKENS, DemoShape
from .tokenizer import train_tokenizer

if TYPE_CHECKING:
    from rich.console import Console


def train_demo(
    out_dir: str | os.PathLike[str],
    *,
    seed: int = 0,
    target_tokens: int = TOKENS["target"],
    draft_tokens: int = TOKENS["draft"],
    resume: bool = True,
    compile: bool = True,
    bf16: bool = True,
    checkpoint_minutes: float = 2.0,
    rows: int = 8,
    length: int = 512,
    shapes: Mapping[str, DemoShape] = SHAPES,
    sources: list[corpus.Source] | None = None,
    console: Console | None = None,
) -> dict[str, dict[str, float]]:
    """Trains tokenizer, draft and target, writes them to `out_dir/{draft,target}`, and returns each model's figures.

    The figures are those of `decoders.demo.evaluate.evaluate` on the held-out files, and `agreement`.

    At every checkpoint the model is also written as it stands, so that it can be tried while training goes on. With
    `resume`, checkpoints under `out_dir/checkpoints` are continued, and the result is that of a run that was never
    interrupted. The same seed, settings, thread count and CPU give the same weights.

    With a `console`, shows a progress bar and a line at each checkpoint; without one, prints nothing.

    Raises:
        TrainingError: there are no sources, or a checkpoint was made with other settings or other sources.
    """
    out_dir = Path(out_dir)
    checkpoints = out_dir / "checkpoints"
    checkpoints.mkdir(parents=True, exist_ok=True)
    train, held_out = corpus.split(corpus.read_sources() if sources is None else sources)
    if not train or not held_out:
        raise TrainingError(f"no Python sources under {corpus.stdlib_root()}: this Python ships without them")
    tokenizer = train_tokenizer(
        (source.text for source in train), vocabulary=max(shape.vocabulary for shape in shapes.values())
    )
    batches = Batches(train, tokenizer, seed=seed, rows=rows, length=length)
    files = card.Files(train=len(train), held_out=len(held_out))

    trainers: dict[str, Trainer] = {}
    learners: dict[str, DemoLearner] = {}
    for name, tokens in (("draft", draft_tokens), ("target", target_tokens)):
        training = DemoTraining(shape=shapes[name], tokens=tokens, seed=seed, rows=rows, length=length)
        learner = learners[name] = DemoLearner(training, tokenizer, batches, compile=compile, bf16=bf16)
        trainer = trainers[name] = Trainer(learner, training.run(corpus.digest(train)))
        export = partial(_export, out_dir / name, name, trainer, learner, files)
        trainer.train(
            name, checkpoints / f"{name}.pt", resume=resume, checkpoint_minutes=checkpoint_minutes, console=console,
            on_checkpoint=export,
        )  # fmt: skip
        export()

    # Figures are of the rounded weights, the ones that are shipped.
    models = {name: learner.rounded().float().eval() for name, learner in learners.items()}
    agreed = agreement(models["draft"], models["target"], tokenizer, held_out)
    figures = {}
    for name, learner in learners.items():
        figures[name] = {**evaluate(models[name], tokenizer, held_out), "agreement": agreed}
        _export(out_dir / name, name, trainers[name], learner, files, figures[name])
    return figures


def _export(
    directory: Path, name: str, trainer: Trainer, learner: DemoLearner, files: card.Files,
    figures: Mapping[str, float] | None = None,
) -> None:  # fmt: skip
    """Writes a model as it stands, with a card that says how far its training got."""
    learner.export(
        directory, card.text(name, learner, files, step=trainer.step, seconds=trainer.seconds, figures=figures)
    )
