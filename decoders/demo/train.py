"""`train_demo`: the two demo models from nothing but this Python's own sources."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from . import card, corpus
from .batches import Batches
from .evaluate import agreement, evaluate
from .shapes import SHAPES, TOKENS, DemoShape
from .tokenizer import train_tokenizer
from .trainer import Run, Trainer, TrainingError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID


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
    """Train tokenizer, draft and target; write them to `out_dir/{draft,target}`; return each model's figures.

    The figures are those of `decoders.demo.evaluate.evaluate` on the held-out files, and `agreement`.

    At every checkpoint the model is also written as it stands, so that it can be tried while training goes on. With
    `resume`, checkpoints under `out_dir/checkpoints` are continued, and the result is that of a run that was never
    interrupted. The same seed, settings, thread count and CPU give the same weights.

    With a `console`, shows a progress bar and a line at each checkpoint; without one, prints nothing.

    Raises TrainingError when a checkpoint was made with other settings or other sources, or there are no sources.
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
    for name, tokens in (("draft", draft_tokens), ("target", target_tokens)):
        run = Run(shape=shapes[name], tokens=tokens, seed=seed, rows=rows, length=length)
        trainer = trainers[name] = Trainer(run, tokenizer, corpus=corpus.digest(train), bf16=bf16)
        checkpoint = checkpoints / f"{name}.pt"
        if resume and checkpoint.exists():
            trainer.load(checkpoint)
        saved = time.monotonic()
        with _Bar(name, trainer, console) as bar:
            for step in trainer.steps(batches, compile=compile):
                bar.advance(step.done, step.loss, step.seconds)
                if time.monotonic() - saved > 60 * checkpoint_minutes:
                    trainer.save(checkpoint)
                    trainer.export(out_dir / name, card.text(name, trainer, files))
                    bar.log()
                    saved = time.monotonic()
        trainer.save(checkpoint)
        trainer.export(out_dir / name, card.text(name, trainer, files))

    # Figures are of the rounded weights, the ones that are shipped.
    models = {name: trainer.rounded().float().eval() for name, trainer in trainers.items()}
    agreed = agreement(models["draft"], models["target"], tokenizer, held_out)
    figures = {}
    for name, trainer in trainers.items():
        figures[name] = {**evaluate(models[name], tokenizer, held_out), "agreement": agreed}
        trainer.export(out_dir / name, card.text(name, trainer, files, figures[name]))
    return figures


class _Bar:
    """The progress bar of one run: steps, smoothed loss, tokens per second, time left."""

    def __init__(self, name: str, trainer: Trainer, console: Console | None) -> None:
        self.name, self.run, self.console = name, trainer.run, console
        self.start = self.done = trainer.step
        self.loss = self.rate = 0.0
        self.progress: Progress | None = None
        self.task: TaskID | None = None

    def __enter__(self) -> _Bar:
        if self.console is not None and self.start < self.run.steps:
            from rich.progress import (
                BarColumn,
                MofNCompleteColumn,
                Progress,
                TextColumn,
                TimeElapsedColumn,
                TimeRemainingColumn,
            )

            self.progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("loss {task.fields[loss]:.3f}  {task.fields[rate]:,.0f} tokens/s"),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=self.console,
            )
            self.task = self.progress.add_task(
                f"train {self.name}", total=self.run.steps, completed=self.start, loss=0.0, rate=0.0
            )
            self.progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self.progress is not None:
            self.progress.stop()

    def advance(self, done: int, loss: float, seconds: float) -> None:
        rate = self.run.rows * self.run.length / seconds
        first = self.loss == 0.0
        self.loss = loss if first else 0.95 * self.loss + 0.05 * loss
        self.rate = rate if first else 0.95 * self.rate + 0.05 * rate
        if self.progress is not None and self.task is not None:
            self.progress.update(self.task, completed=done, loss=self.loss, rate=self.rate)
        self.done = done

    def log(self) -> None:
        """One line for logs, where a live bar cannot be drawn."""
        if self.console is not None:
            self.console.log(
                f"{self.name}: step {self.done} of {self.run.steps}, loss {self.loss:.3f}, {self.rate:,.0f} tokens/s"
            )
