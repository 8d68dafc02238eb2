"""The model card (README.md) that every exported model carries."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from . import corpus
from .batches import EDIT_SHARE
from .edits import COPY_SHARE

if TYPE_CHECKING:
    from .learner import DemoLearner

HEADS = """
## Heads
Heads for `strategy="medusa"` and `strategy="eagle3"`, if some were trained on these files (`decoders train medusa`, `decoders train
eagle3`), lie in the folders `medusa` and `eagle3` beside this file, with cards of their own.
"""


@dataclass(frozen=True, kw_only=True)
class Leg:
    """A part of the training: on files, or against loops."""

    steps: int
    seconds: float


@dataclass(frozen=True)
class Files:
    """How many source files were trained on and how many held out."""

    train: int
    held_out: int


def text(
    name: str, learner: DemoLearner, files: Files, legs: Sequence[Leg], figures: Mapping[str, float] | None = None
) -> str:
    """The card of model `name` after `legs`, on files and against loops; without `figures` training is not finished."""
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

Licence of the data: {corpus.LICENCE} (Python Software Foundation License 2.0; a few files carry their own, compatible
notices).

About {EDIT_SHARE:.0%} of the training rows are an *edit task* made from training files: `# original`, a function,
`# rename OLD to NEW` (or, {COPY_SHARE:.0%} of the time, `# copy`), then the function with the edit made. It teaches a
model of this size to copy from its context, as large models do.

## Training
{legs[0].steps * learner.positions:,} tokens seen (seed {training.seed}; {training.rows} rows of {training.length} a step).
{legs[0].seconds / 60:.0f} minutes on a CPU. Muon for the hidden matrices, AdamW for embeddings and norms.
Peak learning rate {shape.learning_rate:g}, warm-up, stable, linear decay over the last fifth.
{_against_loops(legs[1:])}
Reproduce with `decoders train demo`.

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
