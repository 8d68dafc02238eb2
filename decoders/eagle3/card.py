"""The model card (README.md) that a trained head carries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel

from ..training.cards import command_lines
from .head import Eagle3Config
from .recipe import HeadTraining

NAMES = {
    ("held", "text"): "held out, files", ("held", "own"): "held out, own",
    ("test", "text"): "test files, files", ("test", "own"): "test files, own",
}  # fmt: skip


def text(
    config: Eagle3Config, model: PreTrainedModel, run: HeadTraining, figures: Mapping[str, Any], command: str | None
) -> str:
    """The card of a head for `model`. command: that trained it."""
    layer = config.layer
    layers = ", ".join(map(str, config.layers or ()))
    return f"""---
library_name: hf-decoders
tags: [eagle3, speculative-decoding]
---
# EAGLE-3 head

One decoder layer for a {type(model).__name__} of hidden size {config.target_hidden_size} and {layer.vocab_size:,} tokens:
{figures["parameters"]:,} parameters. It reads what the model's layers {layers} give (counted from 0) and can propose
{config.draft_vocab_size:,} of the model's tokens. Used by `strategy="eagle3"` of hf-decoders; it changes no output, only how fast
it comes.

## Training
Training-time test (Li et al. 2025, arXiv 2503.01840) with the model frozen: {run.depth} tokens are drafted at every position, each on
what the head gave for the one before; cross entropy against the model's distribution, weighted {run.decay:g}^k.
{figures["tokens"]:,} tokens in rows of {run.length}, {run.own_share:.0%} of the rows continued by the model itself (greedily);
{figures["steps"]:,} steps of {run.rows} rows, Muon and AdamW, peak rate {run.rate:g}, linear decay; the weights with the best held-out
acceptance are kept. Seed {run.seed}. {figures["seconds"] / 60:.0f} minutes of steps.
{command_lines(command)}
## Held-out figures
Of chains that are drafted at every position: the share whose first tokens are all accepted when greedy, up to the token named.

{_table(figures, run.depth, "reached", sums=True)}

How likely a drafted token is accepted when sampling at temperature 1 with the best coupling (1 - total variation):

{_table(figures, run.depth, "overlaps")}

"files" is the text of the files, "own" is what the model itself writes (greedily) after their beginnings. Only there are the
chains those of decoding; in other text a draft is judged after tokens that the model would not have written.
"""


def _table(figures: Mapping[str, Any], depth: int, name: str, sums: bool = False) -> str:
    header = ["", *(f"token {k + 1}" for k in range(depth)), *(["tokens a step"] if sums else [])]
    lines = [header, ["---"] * len(header)]
    for (which, kind), title in NAMES.items():
        facts = figures.get(which, {}).get(kind)
        if facts:
            cells = [f"{share:.1%}" for share in facts[name]]
            lines.append([title, *cells, *([f"{facts['tokens_per_step']:.2f}"] if sums else [])])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
