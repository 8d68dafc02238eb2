"""The text of the model card (README.md) of a trained network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

#: Titles of the rows in a card's tables. The keys are pairs of a set of texts (held, test) and a kind of text (:meth:`.Texts.kinds`).
NAMES = {
    ("held", "text"): "held out, files", ("held", "own"): "held out, own",
    ("test", "text"): "test files, files", ("test", "own"): "test files, own",
}  # fmt: skip


def card(
    title: str, tag: str, about: str, training: str, run: Any, figures: Mapping[str, Any], command: str | None, after: str = "",
    library: str = "hf-decoders",
) -> str:  # fmt: skip
    """The card of a network that drafts.

    Args:
        title: what the network is. tag: the method, for the Hub's search.
        about: what the network consists of, and how it is used.
        training: what the network learned, as sentences.
        run: the recipe of the training.
        figures: the result of :func:`~.feature_heads.train_network`. Without "steps", the card says "Not trained here".
        command: the command line that started the training.
        after: text after the tables.
        library: the library that loads the network.
    """
    return f"""---
library_name: {library}
tags: [{tag}, speculative-decoding]
---
# {title}

{about} The network has {figures["parameters"]:,} parameters. It changes the speed of decoding, not its output.

## Training
{_trained(training, run, figures)}
{_command_lines(command)}
## Held-out figures
Drafts begin at positions all over the text. The share of drafts whose tokens are all accepted up to token k, in greedy decoding:

{_shares(figures, "reached", sums=True)}

The probability that a drafted token is accepted when sampling at temperature 1 with the best coupling (1 - total variation):

{_shares(figures, "overlaps")}

"files" is the text of the files, "own" is the text that the model itself writes (greedily) after their beginnings. Only "own" shows
the acceptance of decoding; "files" has tokens that the model would not have written.
{after}"""


def _trained(training: str, run: Any, figures: Mapping[str, Any]) -> str:
    if "steps" not in figures:
        return "Not trained here."
    return f"""{training} The model stays frozen. {figures["tokens"]:,} tokens in rows of {run.length}, {run.own_share:.0%} of the rows
continued by the model itself (greedily); {figures["steps"]:,} steps of {run.rows} rows, Muon and AdamW, peak rate {run.rate:g}, linear
decay; the weights with the best held-out acceptance are kept. Seed {run.seed}. {figures["seconds"] / 60:.0f} minutes of steps."""


def _shares(figures: Mapping[str, Any], name: str, sums: bool = False) -> str:
    """A table of the shares `name`: a row for each set and kind of text, a column for each draft token. sums: adds tokens per step."""
    found = [(title, figures.get(which, {}).get(kind)) for (which, kind), title in NAMES.items()]
    rows = [
        [title, *(f"{share:.1%}" for share in facts[name]), *([f"{facts['tokens_per_step']:.2f}"] if sums else [])]
        for title, facts in found
        if facts
    ]
    depth = len(rows[0]) - 1 - sums
    return table([*(f"token {k + 1}" for k in range(depth)), *(["tokens a step"] if sums else [])], rows)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown. Its first column has no title."""
    lines = [["", *header], ["---"] * (len(header) + 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _command_lines(command: str | None) -> str:
    """The training command as a shell block in Markdown. An empty string if no command started the training."""
    return f"\n```sh\n{command}\n```\n" if command else ""
