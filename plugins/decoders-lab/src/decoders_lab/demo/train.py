"""`train_demo`: trains the two demo models on this Python's own sources, and writes their cards (README.md)."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from decoders.demo.data import COPY_SHARE, Source, read_sources, split, stdlib_root
from decoders.errors import TrainingError
from decoders.training.trainer import Learner, Run, Trainer

from .batches import EDIT_SHARE, LICENCE, Batches, digest
from .evaluate import agreement, evaluate, looping
from .learner import DemoLearner, DemoTraining, UnlikelihoodLearner, UnlikelihoodTraining
from .shapes import LOOP_STEPS, SHAPES, TOKENS, DemoShape, train_tokenizer

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import LlamaForCausalLM

HEADS = """
## Heads
Heads for `strategy="medusa"` and `strategy="eagle3"`, if some were trained on these files (`decoders train medusa`, `decoders train
eagle3`), lie in the folders `medusa` and `eagle3` beside this file, with cards of their own.
"""


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
    sources: list[Source] | None = None,
    console: Console | None = None,
) -> dict[str, dict[str, float]]:
    """Trains tokenizer, draft and target, writes them to `out_dir/{draft,target}`, and returns each model's figures.

    Each model first learns from `target_tokens` or `draft_tokens` tokens of files, and then for `loop_steps` steps not to loop
    (:class:`UnlikelihoodLearner`). The figures are the results of `decoders_lab.demo.evaluate.evaluate` on the held-out files,
    `agreement`, and the share of looping tokens after (`looping`) and before (`looping_before`) the steps against loops.

    At every checkpoint the model is also written, so that it can be tried during training. With `resume`, training continues from
    the checkpoints in `out_dir/checkpoints`, with the result of an uninterrupted run. Training on files may be continued with
    another number of tokens. The same seed, settings, thread count and CPU give the same weights.

    With a `console`, shows a progress bar and a line at each checkpoint; without a console, prints nothing.

    Raises:
        TrainingError: there are no sources, or a checkpoint was made with other settings or other sources.
    """
    out_dir = Path(out_dir)
    checkpoints = out_dir / "checkpoints"
    checkpoints.mkdir(parents=True, exist_ok=True)
    train, held_out = split(read_sources() if sources is None else sources)
    if not train or not held_out:
        raise TrainingError(f"no Python sources under {stdlib_root()}: this Python ships without them")
    tokenizer = train_tokenizer(
        (source.text for source in train), vocabulary=max(shape.vocabulary for shape in shapes.values())
    )
    batches = Batches(train, tokenizer, seed=seed, rows=rows, length=length)
    files = Files(train=len(train), held_out=len(held_out))

    courses: dict[str, _Course] = {}
    for name, tokens in (("draft", draft_tokens), ("target", target_tokens)):
        training = DemoTraining(shape=shapes[name], tokens=tokens, seed=seed, rows=rows, length=length)
        learner = DemoLearner(training, tokenizer, batches, compile=compile, bf16=bf16)
        course = courses[name] = _Course(name, learner, out_dir / name, files)
        train_leg = partial(course.train, resume=resume, checkpoint_minutes=checkpoint_minutes, console=console)
        train_leg(name, learner, training.run(digest(train)), checkpoints / f"{name}.pt")
        course.looping = looping(course.model(), tokenizer, held_out)
        against = UnlikelihoodLearner(learner, UnlikelihoodTraining(steps=loop_steps), first_step=training.steps)
        # The checkpoint's name contains `loop_steps`: if it has changed, a resumed run begins this stage anew, but does not repeat the
        # training on files.
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
    """The training of one model in stages (legs): on files, then against loops.

    Attributes:
        name: "draft" or "target".
        learner: the learner of the first stage, which holds the model.
        directory: the folder to which the model is written.
        files: numbers of training and held-out files.
        looping: share of looping tokens after the training on files.
        legs: the stages so far, including the running one.
    """

    name: str
    learner: DemoLearner
    directory: Path
    files: Files
    looping: float = math.nan
    legs: list[Trainer] = field(default_factory=list)

    def train(
        self, title: str, learner: Learner, run: Run, checkpoint: Path, *,
        resume: bool, checkpoint_minutes: float, console: Console | None,
    ) -> None:  # fmt: skip
        """Trains one more stage; writes the model at every checkpoint."""
        leg = Trainer(learner, run)
        self.legs.append(leg)
        leg.train(
            title, checkpoint, resume=resume, checkpoint_minutes=checkpoint_minutes, console=console,
            on_checkpoint=self.export,
        )  # fmt: skip

    def export(self, figures: Mapping[str, float] | None = None) -> None:
        """Writes the present model with a card."""
        legs = [Leg(steps=leg.step, seconds=leg.seconds) for leg in self.legs]
        self.learner.export(self.directory, card_of(self.name, self.learner, self.files, legs, figures))

    def model(self) -> LlamaForCausalLM:
        """The model to measure: the rounded weights that are written, in float32."""
        return self.learner.rounded().float().eval()


@dataclass(frozen=True, kw_only=True)
class Leg:
    """A stage of the training: on files, or against repetition."""

    steps: int
    seconds: float


@dataclass(frozen=True)
class Files:
    """The numbers of training files and of held-out files."""

    train: int
    held_out: int


def card_of(
    name: str, learner: DemoLearner, files: Files, legs: Sequence[Leg], figures: Mapping[str, float] | None = None
) -> str:
    """The card of the model `name` after the stages `legs`. figures: None if training is not finished."""
    training, shape = learner.training, learner.training.shape
    parameters = sum(parameter.numel() for parameter in learner.model.parameters())
    other = "draft" if name == "target" else "target"
    return f"""---
language: en
library_name: transformers
pipeline_tag: text-generation
license: other
license_name: psf-2.0
license_link: https://docs.python.org/3/license.html
tags: [code, python, speculative-decoding]
---
# {name}: one of two demo models of hf-decoders

A Llama-style model of {parameters:,} parameters for Python code, made to show and measure decoding strategies on a
laptop CPU. Its partner, `{other}`, has the same tokenizer. It is far too small to write code anyone should run.

| | |
|---|---|
| Layers, hidden, intermediate | {shape.layers}, {shape.hidden}, {shape.intermediate} |
| Heads, key-value heads | {shape.heads}, {shape.kv_heads} |
| Vocabulary | {len(learner.tokenizer):,} (byte-level BPE, lossless on any text) |
| Context | trained on {training.length} tokens; accepts up to {learner.model.config.max_position_embeddings} |
| Weights | bf16 safetensors, tied embeddings |

## Data
The standard library's own sources as installed with Python {platform.python_version()}: {files.train} files for
training, {files.held_out} held out and never trained on, neither by the tokenizer nor by the models. The split is a
hash of the file's path. Generated tables, invalid-on-purpose test files and per-machine files are left out.

Licence of the data: {LICENCE} (Python Software Foundation License 2.0; a few files carry their own, compatible
notices).

About {EDIT_SHARE:.0%} of the training rows are an *edit task* made from training files: `# original`, a function,
`# rename OLD to NEW` (or, {COPY_SHARE:.0%} of the time, `# copy`), then the function with the edit made. It teaches a
model of this size to copy from its context, as large models do.

## Training
{legs[0].steps * learner.positions:,} tokens seen (seed {training.seed}; {training.rows} rows of {training.length} a step).
{legs[0].seconds / 60:.0f} minutes on a CPU. Muon for the hidden matrices, AdamW for embeddings and norms.
Peak learning rate {shape.learning_rate:g}, warm-up, stable, linear decay over the last fifth.
{_against_loops(legs[1:])}
Reproduce with `decoders train demo`, of decoders-lab.

## Held-out figures
{_figures(figures)}
{HEADS if name == "target" else ""}"""


def _against_loops(legs: Sequence[Leg]) -> str:
    if not legs:
        return "Not yet trained against loops."
    steps, minutes = legs[0].steps, legs[0].seconds / 60
    return f"""Then {steps} steps, {minutes:.0f} minutes, in which loops in what the model itself writes greedily were made
unlikely beside the likelihood of the files (unlikelihood training, Welleck et al. 2020, arXiv 1908.04319).
Without them a model of this size soon writes the same lines for ever, which flatters every strategy that drafts
from the text so far."""


def _figures(figures: Mapping[str, float] | None) -> str:
    if figures is None:
        return "Training is not finished: this is a snapshot."
    return f"""| | |
|---|---|
| Loss | {figures["loss"]:.3f} nats per token |
| Bits per byte | {figures["bits_per_byte"]:.3f} |
| Greedy next-token accuracy | {figures["accuracy"]:.1%} |
| Draft and target choose the same greedy token | {figures["agreement"]:.1%} |
| Greedy text that goes on with a loop | {figures["looping"]:.1%} ({figures["looping_before"]:.1%} before the steps against loops) |
| Measured on | {figures["tokens"]:,.0f} tokens, {figures["bytes"]:,.0f} bytes of the held-out files |

Loops: of 192 tokens after each of 64 places in the held-out files, those that repeat a passage for the second time or more."""
