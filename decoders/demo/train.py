"""`train_demo`: the two demo models from nothing but this Python's own sources."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ..training import Learner, Run, Trainer, TrainingError
from . import card, corpus
from .batches import Batches
from .evaluate import agreement, evaluate, looping
from .learner import DemoLearner, DemoTraining
from .shapes import LOOP_STEPS, SHAPES, TOKENS, DemoShape
from .tokenizer import train_tokenizer
from .unlikelihood import UnlikelihoodLearner, UnlikelihoodTraining

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import LlamaForCausalLM


def train_demo(
    out_dir: str | os.PathLike[str],
    *,
    seed: int = 0,
    target_tokens: int = TOKENS["target"],
    draft_tokens: int = TOKENS["draft"],
    loop_steps: int = LOOP_STEPS,
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

    Each learns from `target_tokens` or `draft_tokens` of files, and then for `loop_steps` not to go round in circles
    (:class:`UnlikelihoodLearner`). The figures are those of `decoders.demo.evaluate.evaluate` on the held-out files,
    `agreement`, and `looping` after and before those steps.

    At every checkpoint the model is also written as it stands, so that it can be tried while training goes on. With
    `resume`, checkpoints under `out_dir/checkpoints` are continued, and the result is that of a run that was never
    interrupted; with other numbers of tokens the training on files goes on, too. The same seed, settings, thread count
    and CPU give the same weights.

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

    courses: dict[str, _Course] = {}
    for name, tokens in (("draft", draft_tokens), ("target", target_tokens)):
        training = DemoTraining(shape=shapes[name], tokens=tokens, seed=seed, rows=rows, length=length)
        learner = DemoLearner(training, tokenizer, batches, compile=compile, bf16=bf16)
        course = courses[name] = _Course(name, learner, out_dir / name, files)
        train_leg = partial(course.train, resume=resume, checkpoint_minutes=checkpoint_minutes, console=console)
        train_leg(name, learner, training.run(corpus.digest(train)), checkpoints / f"{name}.pt")
        course.looping = looping(course.model(), tokenizer, held_out)
        against = UnlikelihoodLearner(learner, UnlikelihoodTraining(steps=loop_steps), first_step=training.steps)
        # A run that is resumed with other numbers keeps what it has learnt from files, and begins this leg anew.
        stem = f"{name}-loops-{training.steps}-{loop_steps}"
        train_leg(f"{name} against loops", against, against.run(), checkpoints / f"{stem}.pt")
        course.export()

    models = {name: course.model() for name, course in courses.items()}
    agreed = agreement(models["draft"], models["target"], tokenizer, held_out)
    figures = {}
    for name, model in models.items():
        figures[name] = {
            **evaluate(model, tokenizer, held_out),
            "agreement": agreed,
            "looping": looping(model, tokenizer, held_out),
            "looping_before": courses[name].looping,
        }
        courses[name].export(figures[name])
    return figures


@dataclass
class _Course:
    """The training of one model: on files, then against loops.

    Attributes:
        name: "draft" or "target".
        learner: holds the model.
        directory: where it is written.
        files: what it learns from.
        looping: of the model when it had learnt from files alone.
        legs: trained so far, the one that runs included.
    """

    name: str
    learner: DemoLearner
    directory: Path
    files: card.Files
    looping: float = math.nan
    legs: list[Trainer] = field(default_factory=list)

    def train(
        self, title: str, learner: Learner, run: Run, checkpoint: Path, *,
        resume: bool, checkpoint_minutes: float, console: Console | None,
    ) -> None:  # fmt: skip
        """Trains one more leg to its end; at every checkpoint the model is written as it stands."""
        leg = Trainer(learner, run)
        self.legs.append(leg)
        leg.train(
            title, checkpoint, resume=resume, checkpoint_minutes=checkpoint_minutes, console=console,
            on_checkpoint=self.export,
        )  # fmt: skip

    def export(self, figures: Mapping[str, float] | None = None) -> None:
        """Writes the model as it stands, with a card that says how far its training got."""
        legs = [card.Leg(steps=leg.step, seconds=leg.seconds) for leg in self.legs]
        self.learner.export(self.directory, card.text(self.name, self.learner, self.files, legs, figures))

    def model(self) -> LlamaForCausalLM:
        """The model to measure: with the rounded weights, the ones that are written, in float32."""
        return self.learner.rounded().float().eval()
