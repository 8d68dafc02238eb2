"""The model card (README.md) that a trained draft model carries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel

from ..training.cards import command_lines
from .acceptance import Measurement
from .recipe import DraftTraining


def text(
    draft: PreTrainedModel, model: PreTrainedModel, run: DraftTraining, measurement: Measurement, figures: Mapping[str, Any],
    command: str | None,
) -> str:  # fmt: skip
    """The card of `draft`, for the target `model`. command: that trained it."""
    config = draft.config.get_text_config(decoder=True)
    target = model.config.get_text_config(decoder=True)
    if run.origin == "layers":
        layers = ", ".join(map(str, run.layers_of(target.num_hidden_layers)))
        origin = (
            f"layers {layers} of the target's {target.num_hidden_layers}, counted from 0, with its embedding and head"
        )
    else:
        origin = f"from scratch: hidden size {config.hidden_size}, {config.num_attention_heads} heads"
    return f"""---
library_name: transformers
tags: [speculative-decoding, draft-model]
---
# Draft model

For a {type(model).__name__} of {figures["target_parameters"]:,} parameters, {target.num_hidden_layers} layers and hidden size
{target.hidden_size}: {figures["parameters"]:,} parameters, {config.num_hidden_layers} layers, {origin}. Same tokenizer. Pass it as
`assistant_model=`; it changes no output of hf-decoders, only how fast it comes.

## Training
Distillation: cross entropy against the target's distribution after every token. {figures["tokens"]:,} tokens in rows of
{run.length}, {run.own_share:.0%} of the rows continued by the target itself (greedily); {figures["steps"]:,} steps of {run.rows}
rows, Muon and AdamW, peak rate {run.rate:g}, linear decay; the weights with the best held-out agreement are kept. Seed {run.seed}.
{figures["seconds"] / 60:.0f} minutes of steps.
{command_lines(command)}
## Acceptance
`speculative` with {measurement.length} drafted tokens a step, on {figures["prompts"]} beginnings of held-out text,
{measurement.new_tokens} tokens each. Tokens per step include the target's own; plain decoding has 1.

{_acceptance(figures, measurement.length)}

| | same token as the target | 1 - total variation |
| --- | --- | --- |
{_agreement(figures["agreement"])}

Before training the same token was chosen {figures["agreement_before"]:.1%} of the time.
"""


def _acceptance(figures: Mapping[str, Any], length: int) -> str:
    header = ["", "tokens per step", *(f"token {k + 1} accepted" for k in range(length))]
    lines = [header, ["---"] * len(header)]
    for name, title in (("greedy", "greedy"), ("sampled", "sampled, temperature 1")):
        facts = figures[name]
        lines.append([title, f"{facts['tokens_per_step']:.2f}", *(f"{share:.1%}" for share in facts["reached"])])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _agreement(agreement: Mapping[str, Any]) -> str:
    titles = {"text": "held out, files", "own": "held out, the target's own text"}
    return "\n".join(
        f"| {titles[kind]} | {facts['same']:.1%} | {facts['overlap']:.1%} |" for kind, facts in agreement.items()
    )
