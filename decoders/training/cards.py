"""The texts of model cards (README.md) for trained heads and draft models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedModel

from ..errors import amount
from ..heads.dflash import DFlashConfig
from ..heads.eagle3 import Eagle3Config
from ..heads.medusa import HeadsConfig
from .recipes import BlockTraining, DraftTraining, HeadsTraining, HeadTraining, Measurement

#: Titles of the rows in a card's tables. The keys are pairs of a set of texts (held, test) and a kind of text (:meth:`.Texts.kinds`).
NAMES = {
    ("held", "text"): "held out, files", ("held", "own"): "held out, own",
    ("test", "text"): "test files, files", ("test", "own"): "test files, own",
}  # fmt: skip


def medusa_card(config: HeadsConfig, model: PreTrainedModel, training: HeadsTraining | None) -> str:
    """The card of Medusa heads for `model`. training: None if the heads were trained elsewhere and only their tree was searched."""
    figures = config.figures
    projection = {
        "tied": "the model's own output head",
        "low_rank": f"the model's own output head plus a difference of rank {config.rank}",
        "full": "each head has its own",
    }[config.projection]
    parameters = sum(_sizes(config))
    return f"""---
library_name: hf-decoders
tags: [medusa, speculative-decoding]
---
# Medusa heads

{amount(config.heads, "head")} of {amount(config.layers, "residual block")} for a {type(model).__name__} of hidden size
{config.hidden_size} and {config.vocab_size:,} tokens: {parameters:,} parameters. Vocabulary projection: {projection}.
Head k predicts the token k places after the next token. `strategy="medusa"` of hf-decoders uses the heads; they change the speed of
decoding, not its output.

## Training
{_training(training, figures)}

## Held-out figures
How often the right token is a head's best draft token (in parentheses: among its five best):

{_accuracies(figures)}

"files" is the text of the files, "own" is the text that the model itself writes (greedily) after their beginnings.
{_trees(figures)}"""


def _training(training: HeadsTraining | None, figures: Mapping[str, Any]) -> str:
    if training is None:
        return "Not trained here; only the tree was searched."
    return f"""Medusa-1: the model stays frozen. {figures["tokens"]:,} tokens in rows of {training.length},
{training.own_share:.0%} of the rows continued by the model itself; {figures["steps"]} steps of {training.batch} positions,
AdamW, peak rate {training.rate:g}, cosine; losses weighted {training.decay:g}^k; the heads with the best held-out accuracy
are kept. Seed {training.seed}. {figures["seconds"] / 60:.0f} minutes of steps."""


def _accuracies(figures: Mapping[str, Any]) -> str:
    rows = [
        [title, *(f"{a:.1%} ({b:.1%})" for a, b in zip(facts["top1"], facts["top5"], strict=True))]
        for title, facts in _by_text(figures)
    ]
    heads = len(rows[0]) - 1 if rows else 0
    return _table([f"head {k + 1}" for k in range(heads)], rows)


def _trees(figures: Mapping[str, Any]) -> str:
    trees = figures.get("trees")
    if not trees:
        return ""
    return f"""
## Tree
Searched on the held-out text: {trees["nodes"]} nodes, {trees["searched"]:.3f} tokens per step on this text. The first
{trees["nodes"]} nodes of the default tree give {trees["default"]:.3f}.
"""


def _sizes(config: HeadsConfig) -> list[int]:
    k, h, v, r = config.heads, config.hidden_size, config.vocab_size, config.rank
    return [k * config.layers * h * (h + 1), k * v * h if config.projection == "full" else 0, k * r * (h + v)]


def eagle3_card(
    config: Eagle3Config, model: PreTrainedModel, run: HeadTraining, figures: Mapping[str, Any], command: str | None
) -> str:
    """The card of an EAGLE-3 head for `model`. command: the command line that trained it."""
    layer = config.layer
    layers = ", ".join(map(str, config.layers or ()))
    return f"""---
library_name: hf-decoders
tags: [eagle3, speculative-decoding]
---
# EAGLE-3 head

One decoder layer for a {type(model).__name__} of hidden size {config.target_hidden_size} and {layer.vocab_size:,} tokens:
{figures["parameters"]:,} parameters. It reads the outputs of the model's layers {layers} (counted from 0) and can propose
{config.draft_vocab_size:,} of the model's tokens. `strategy="eagle3"` of hf-decoders uses the head; it changes the speed of decoding,
not its output.

## Training
Training-time test (Li et al. 2025, arXiv 2503.01840) with the model frozen: {run.depth} tokens are drafted at every position, each from
the head's output for the token before; cross entropy against the model's distribution, weighted {run.decay:g}^k.
{_trained(run, figures, command, run.depth)}"""


def dflash_card(
    config: DFlashConfig, model: PreTrainedModel, run: BlockTraining, figures: Mapping[str, Any], command: str | None
) -> str:
    """The card of a block draft model for `model`. command: the command line that trained it."""
    layer = config.layer
    layers = ", ".join(map(str, config.layers))
    bias = f"and a head ({run.head}) adds a bias of rank {run.rank} that depends on the tokens before (DSpark, arXiv 2607.05147)"
    head = bias if run.rank else "without a head"
    return f"""---
library_name: hf-decoders
tags: [dflash, speculative-decoding]
---
# Block draft model

{layer.num_hidden_layers} decoder layers for a {type(model).__name__} of hidden size {layer.hidden_size} and {layer.vocab_size:,}
tokens: {figures["parameters"]:,} parameters. It reads the outputs of the model's layers {layers} (counted from 0) and can propose
{config.draft_vocab_size:,} of the model's tokens. {config.places} tokens are drafted in one pass (DFlash, arXiv 2602.06036),
{head}. `strategy="dflash"` of hf-decoders uses the draft model; it changes the speed of decoding, not its output.

## Training
The model stays frozen. Blocks begin at {run.blocks:.1%} of the positions; cross entropy against the model's distribution, weighted
{run.decay:g}^k.
{_trained(run, figures, command, config.places)}"""


def _trained(run: HeadTraining | BlockTraining, figures: Mapping[str, Any], command: str | None, depth: int) -> str:
    """The end of a card: facts about the training, and tables that show how chains of `depth` draft tokens are accepted."""
    return f"""\
{figures["tokens"]:,} tokens in rows of {run.length}, {run.own_share:.0%} of the rows continued by the model itself (greedily);
{figures["steps"]:,} steps of {run.rows} rows, Muon and AdamW, peak rate {run.rate:g}, linear decay; the weights with the best held-out
acceptance are kept. Seed {run.seed}. {figures["seconds"] / 60:.0f} minutes of steps.
{_command_lines(command)}
## Held-out figures
Chains are drafted at positions all over the text. The share of chains whose tokens are all accepted up to token k, in greedy decoding:

{_shares(figures, depth, "reached", sums=True)}

The probability that a drafted token is accepted when sampling at temperature 1 with the best coupling (1 - total variation):

{_shares(figures, depth, "overlaps")}

"files" is the text of the files, "own" is the text that the model itself writes (greedily) after their beginnings. Only "own" shows
the acceptance of decoding; "files" has tokens that the model would not have written.
"""


def _shares(figures: Mapping[str, Any], depth: int, name: str, sums: bool = False) -> str:
    header = [*(f"token {k + 1}" for k in range(depth)), *(["tokens a step"] if sums else [])]
    rows = [
        [title, *(f"{share:.1%}" for share in facts[name]), *([f"{facts['tokens_per_step']:.2f}"] if sums else [])]
        for title, facts in _by_text(figures)
    ]
    return _table(header, rows)


def draft_card(
    draft: PreTrainedModel, model: PreTrainedModel, run: DraftTraining, measurement: Measurement, figures: Mapping[str, Any],
    command: str | None,
) -> str:  # fmt: skip
    """The card of the draft model `draft` for the target `model`. command: the command line that trained it."""
    config = draft.config.get_text_config(decoder=True)
    target = model.config.get_text_config(decoder=True)
    if run.origin == "layers":
        layers = ", ".join(map(str, run.layers_of(target.num_hidden_layers)))
        origin = (
            f"layers {layers} of the target's {target.num_hidden_layers}, counted from 0, with its embedding and head"
        )
    else:
        origin = f"from scratch: hidden size {config.hidden_size}, {amount(config.num_attention_heads, 'head')}"
    return f"""---
library_name: transformers
tags: [speculative-decoding, draft-model]
---
# Draft model

For a {type(model).__name__} of {figures["target_parameters"]:,} parameters, {amount(target.num_hidden_layers, "layer")} and hidden size
{target.hidden_size}: {figures["parameters"]:,} parameters, {amount(config.num_hidden_layers, "layer")}, {origin}. Same tokenizer. Pass
it as `assistant_model=` to hf-decoders; it changes the speed of decoding, not its output.

## Training
Distillation: cross entropy against the target's distribution after every token. {figures["tokens"]:,} tokens in rows of
{run.length}, {run.own_share:.0%} of the rows continued by the target itself (greedily); {figures["steps"]:,} steps of {run.rows}
rows, Muon and AdamW, peak rate {run.rate:g}, linear decay; the weights with the best held-out agreement are kept. Seed {run.seed}.
{figures["seconds"] / 60:.0f} minutes of steps.
{_command_lines(command)}
## Acceptance
`speculative` with {measurement.length} drafted tokens a step, on {figures["prompts"]} beginnings of held-out text,
{figures["new_tokens"]} tokens each. Tokens per step include the target's own; plain decoding has 1.

{_acceptance(figures, measurement.length)}

{_agreement(figures["agreement"])}

Before training, both chose the same token {figures["agreement_before"]:.1%} of the time.
"""


def _acceptance(figures: Mapping[str, Any], length: int) -> str:
    rows = [
        [title, f"{figures[name]['tokens_per_step']:.2f}", *(f"{share:.1%}" for share in figures[name]["reached"])]
        for name, title in (("greedy", "greedy"), ("sampled", "sampled, temperature 1"))
    ]
    return _table(["tokens per step", *(f"token {k + 1} accepted" for k in range(length))], rows)


def _agreement(agreement: Mapping[str, Any]) -> str:
    titles = {"text": "held out, files", "own": "held out, the target's own text"}
    rows = [[titles[kind], f"{facts['same']:.1%}", f"{facts['overlap']:.1%}"] for kind, facts in agreement.items()]
    return _table(["same token as the target", "1 - total variation"], rows)


def _by_text(figures: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """The title (:data:`NAMES`) and the figures of each set and kind of text that `figures` has."""
    found = ((title, figures.get(which, {}).get(kind)) for (which, kind), title in NAMES.items())
    return [(title, facts) for title, facts in found if facts]


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown. Its first column has no title."""
    lines = [["", *header], ["---"] * (len(header) + 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _command_lines(command: str | None) -> str:
    """The training command as a shell block in Markdown. An empty string if no command started the training."""
    return f"\n```sh\n{command}\n```\n" if command else ""
