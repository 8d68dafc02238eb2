"""The model card (README.md) that trained heads carry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedModel

from .config import HeadsConfig, HeadsTraining


def text(config: HeadsConfig, model: PreTrainedModel, training: HeadsTraining | None) -> str:
    """The card of heads for `model`; `training` None: they were trained elsewhere, and only their tree is ours."""
    figures = config.figures
    projection = {
        "tied": "the model's own output head",
        "low_rank": f"the model's own output head plus a difference of rank {config.rank}",
        "full": "one of each head's own",
    }[config.projection]
    parameters = sum(_sizes(config))
    return f"""---
library_name: hf-decoders
tags: [medusa, speculative-decoding]
---
# Medusa heads

{config.heads} heads of {config.layers} residual block(s) for a {type(model).__name__} of hidden size {config.hidden_size} and
{config.vocab_size:,} tokens: {parameters:,} parameters. Vocabulary projection: {projection}. Head k predicts the token k places
behind the next one. Used by `strategy="medusa"` of hf-decoders; they change no output, only how fast it comes.

## Training
{_training(training, figures)}

## Held-out figures
How often the right token is a head's best draft token (among its five best):

{_accuracies(figures)}

"files" is the text of the files, "own" is what the model itself writes (greedily) after their beginnings.
{_trees(figures)}"""


def _sizes(config: HeadsConfig) -> list[int]:
    k, h, v, r = config.heads, config.hidden_size, config.vocab_size, config.rank
    return [k * config.layers * h * (h + 1), k * v * h if config.projection == "full" else 0, k * r * (h + v)]


def _training(training: HeadsTraining | None, figures: Mapping[str, Any]) -> str:
    if training is None:
        return "Not trained here; only the tree was searched."
    return f"""Medusa-1: the model stays frozen. {figures["tokens"]:,} tokens in rows of {training.length},
{training.own_share:.0%} of the rows continued by the model itself; {figures["steps"]} steps of {training.batch} positions,
AdamW, peak rate {training.rate:g}, cosine; losses weighted {training.decay:g}^k; the heads with the best held-out accuracy
are kept. Seed {training.seed}. {figures["seconds"] / 60:.0f} minutes of steps."""


def _accuracies(figures: Mapping[str, Any]) -> str:
    names = {("held", "text"): "held out, files", ("held", "own"): "held out, own",
             ("test", "text"): "test files, files", ("test", "own"): "test files, own"}  # fmt: skip
    rows: list[tuple[str, Sequence[str]]] = []
    for (which, kind), name in names.items():
        facts = figures.get(which, {}).get(kind)
        if facts:
            cells = [f"{a:.1%} ({b:.1%})" for a, b in zip(facts["top1"], facts["top5"], strict=True)]
            rows.append((name, cells))
    heads = len(rows[0][1]) if rows else 0
    header = ["", *(f"head {k + 1}" for k in range(heads))]
    lines = [header, ["---"] * len(header), *([name, *cells] for name, cells in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _trees(figures: Mapping[str, Any]) -> str:
    trees = figures.get("trees")
    if not trees:
        return ""
    return f"""
## Tree
Searched on the held-out text: {trees["nodes"]} nodes, {trees["searched"]:.3f} tokens a step there, where the first
{trees["nodes"]} nodes of the default tree give {trees["default"]:.3f}.
"""
