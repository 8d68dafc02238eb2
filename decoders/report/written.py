"""The tokens of a call for display: the text coloured by drafter, and the draft tree of a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from ..common.pieces import TextPieces

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

#: The colours of drafters, in order of first appearance.
COLOURS = ("#2e7d32", "#1565c0", "#ad1457", "#e65100", "#6a1b9a", "#00838f")


@dataclass(frozen=True)
class TracedStep:
    """The nodes of one row that a step verified, and the accepted path.

    Attributes:
        tokens: token of every node; node 0 is the last token before the step, -1 is not a token.
        parents: parent of every node; -1 for node 0 and for nodes that are never accepted.
        path: the accepted nodes, node 0 included.
        own: the target's token after the path; None if the row ended before this token.
        drafters: the drafter of each node, "" for node 0.
    """

    tokens: list[int]
    parents: list[int]
    path: list[int]
    own: int | None
    drafters: list[str]


@dataclass
class Written:
    """The tokens of a call, by row. The lists are shared with the call and grow with it.

    Attributes:
        prompts: the prompts, 1-D int64, without padding; -1 at positions without a token id.
        tokens: the new tokens.
        drafters: the drafter of each new token, "" for the target's own tokens.
        steps: every step of each row; an empty list for a row without the setting ``trace``.
        tokenizer: the call's tokenizer or None. Pickles leave out the tokenizer; token ids then stand for texts.
    """

    prompts: Sequence[Tensor]
    tokens: list[list[int]]
    drafters: list[list[str]]
    steps: list[list[TracedStep]]
    tokenizer: PreTrainedTokenizerBase | None = None

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"tokenizer": None}

    def text_of(self, token: int) -> str:
        """The text of a token, escaped as in a ``repr``; its id without a tokenizer."""
        return str(token) if self.tokenizer is None else repr(self.tokenizer.decode([token]))[1:-1]

    def pieces(self, row: int = 0) -> list[tuple[str, str]]:
        """A row's new text as pieces ``(text, drafter of its last token)``; "" is the target. Ids without a tokenizer."""
        tokens, drafters = self.tokens[row], self.drafters[row]
        if self.tokenizer is None:
            return [(f"{token} ", who) for token, who in zip(tokens, drafters, strict=True)]
        texts = TextPieces(self.tokenizer, [token for token in self.prompts[row].tolist() if token >= 0])
        cut = (
            (texts.next(tokens[:end], ended=end == len(tokens)), drafters[end - 1]) for end in range(1, len(tokens) + 1)
        )
        return [(text, who) for text, who in cut if text]

    def colours(self) -> dict[str, str]:
        names = dict.fromkeys(who for row in self.drafters for who in row if who)
        return {name: COLOURS[place % len(COLOURS)] for place, name in enumerate(names)}

    def html(self) -> str:
        """The new text of every row as HTML, drafted tokens in colour, below a legend."""
        colours = self.colours()

        def span(text: str, who: str) -> str:
            style = f" style='color:{colours[who]};font-weight:600'" if who else ""
            return f"<span{style}>{escape(text)}</span>"

        legend = ", ".join(span(name, name) for name in colours) or "nothing"
        rows = ("".join(span(text, who) for text, who in self.pieces(row)) for row in range(len(self.tokens)))
        return f"<p>drafted by {legend}</p>" + "".join(f"<pre style='white-space:pre-wrap'>{row}</pre>" for row in rows)

    def tree(self, step: int, row: int) -> Tree:
        """The draft tree of a step. Requires the setting ``trace``."""
        traced = self.steps[row][step]
        texts = [self.text_of(token) if token >= 0 else "" for token in traced.tokens]
        return Tree(traced, texts, self.text_of(traced.own) if traced.own is not None else "")


@dataclass(frozen=True, repr=False)
class Tree:
    """The draft tree of a step, which ``print`` and notebooks draw as text.

    Attributes:
        step: the step to draw.
        texts: the texts of the step's nodes.
        own: the text of the target's token after the path; "" if there is no such token.
    """

    step: TracedStep
    texts: list[str]
    own: str

    def _children(self, node: int) -> list[int]:
        return [n for n, parent in enumerate(self.step.parents) if parent == node and n and self.step.tokens[n] >= 0]

    def __str__(self) -> str:
        return "\n".join(self._lines(0, "", ""))

    __repr__ = __str__

    def _lines(self, node: int, lead: str, below: str) -> Iterator[str]:
        """The lines of a node and its descendants. A chain of accepted tokens is one line, and so is a chain of rejected tokens."""
        chain, path = [node], self.step.path
        while len(children := self._children(chain[-1])) == 1 and node and (children[0] in path) == (node in path):
            chain.append(children[0])
        mark = "" if not node else "+ " if node in path else "- "
        who = f"  ({self.step.drafters[node]})" if node and self.step.parents[node] == 0 else ""
        yield lead + mark + " ".join(f"[{self.texts[n]}]" for n in chain) + who
        ends = chain[-1] == path[-1] and self.own != ""
        for place, child in enumerate(children):
            last = place == len(children) - 1 and not ends
            yield from self._lines(child, below + ("└─" if last else "├─"), below + ("  " if last else "│ "))
        if ends:
            yield f"{below}└─= [{self.own}]  (the model's own)"


def bars(histogram: Sequence[int]) -> str:
    """A bar chart as SVG: how many steps committed 1, 2, … tokens. "" for an empty histogram."""
    if not histogram:
        return ""
    most, width, drawn = max(histogram), 26, ""
    for place, count in enumerate(histogram):
        left, height = place * width, 48 * count / most
        drawn += (
            f'<rect x="{left + 4}" y="{64 - height:.0f}" width="{width - 8}" height="{height:.0f}" fill="#2e7d32"/>'
            f'<text x="{left + width // 2}" y="{60 - height:.0f}">{count}</text><text x="{left + width // 2}" y="78">{place + 1}</text>'
        )
    size = f'width="{len(histogram) * width + 8}" height="84" viewBox="0 -4 {len(histogram) * width + 8} 88"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="number of steps by committed tokens" '
        f'font-size="10" text-anchor="middle" fill="currentColor">{drawn}</svg>'
    )
