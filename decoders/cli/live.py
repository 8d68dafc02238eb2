"""Shows a text while it is generated: as plain text, or in a panel that shows accepted draft tokens in another colour."""

from __future__ import annotations

from collections import deque
from contextlib import nullcontext
from typing import Any

import typer
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.text import Text
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from ..bench import Method, Workload, decode
from ..common.pieces import TextPieces

ACCEPTED, OWN = "bold green", "white"
#: Number of lines of the prompt that stay in view.
PROMPT_LINES = 4


class ColouredStream(BaseStreamer):
    """A streamer of one row that records which of its tokens were accepted draft tokens.

    All tokens of a step except the last are accepted draft tokens. The target chose the last token. (At the end of a row, a step may
    be incomplete. Then its last token may also be a draft token.)

    Attributes:
        pieces: (text, accepted) for each token. The text of a token that later tokens complete, such as half of a character, is "";
            the last of these tokens has the whole text. :meth:`end` may add one more piece.
        steps: number of steps so far.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer, self.steps = tokenizer, 0
        self.pieces: list[tuple[str, bool]] = []
        self._tokens: list[int] = []
        self._accepted: deque[bool] = deque()
        self._texts: TextPieces | None = None  # None until `put` gets the prompt

    def on_step(self, new: list[list[int]]) -> None:
        """Records the number of new tokens of a step. Called before `put`. new: the new tokens of each row."""
        self.steps += 1
        self._accepted.extend([True] * (len(new[0]) - 1) + [False] * bool(new[0]))

    def put(self, value: Tensor) -> None:
        if self._texts is None:
            self._texts = TextPieces(self.tokenizer, value.flatten().tolist())
            return
        for token in value.flatten().tolist():
            self._tokens.append(token)
            accepted = self._accepted.popleft() if self._accepted else False
            self.pieces.append((self._texts.next(self._tokens, ended=False), accepted))

    def end(self) -> None:
        if self._texts is not None and (rest := self._texts.next(self._tokens, ended=True)):
            self.pieces.append((rest, self.pieces[-1][1]))

    def text(self) -> Text:
        """The text so far, with accepted draft tokens in another colour."""
        return Text.assemble(*((piece, ACCEPTED if accepted else OWN) for piece, accepted in self.pieces))


def show(
    console: Console, method: Method, workload: Workload, tokenizer: PreTrainedTokenizerBase, name: str, prompt: str,
    new_tokens: int,
) -> None:  # fmt: skip
    """Decodes `workload` (one row) with one of our methods and shows the text, on a terminal while it grows.

    The report's speed is shown at the end. It leaves out the time for preparing and compiling the model.
    """
    stream, report = ColouredStream(tokenizer), None

    def panel() -> Panel:
        figures = [] if report is None else [f"{report.tokens_per_second:.0f} tokens/s"]
        if stream.steps:
            figures.append(f"{len(stream.pieces) / stream.steps:.2f} tokens per step")
        colours = Text.assemble(("drafted ahead", ACCEPTED), " · ", ("the target's own", OWN))
        return Panel(
            Text.assemble(*_tail(prompt, stream.text(), console)),
            title=Text.assemble(name, " · ", (method.name, "bold"), "   ", colours), title_align="left",
            subtitle=" · ".join(figures), subtitle_align="right", expand=console.is_terminal,
        )  # fmt: skip

    with Live(get_renderable=panel, console=console) if console.is_terminal else nullcontext():
        report = decode(method, workload, new_tokens, stream).report
    if not console.is_terminal:
        console.print(panel())


def _tail(prompt: str, written: Text, console: Console) -> list[Any]:
    """The prompt's last lines, dimmed, and as much of the end of `written` as fits on the screen."""
    width, room = max(console.width - 4, 20), max(console.height - 5 - PROMPT_LINES, 5)
    shown = (
        Text("\n").join(written.wrap(console, width, no_wrap=None)[-room:])
        if written.plain.count("\n") > room
        else written
    )
    prompt_lines = prompt.split("\n")[-PROMPT_LINES:]
    return [
        ("…\n" if len(prompt_lines) < prompt.count("\n") + 1 else "", "dim"),
        ("\n".join(prompt_lines), "dim"),
        shown,
    ]


class PrintedPieces(BaseStreamer):
    """A streamer that prints the text of one row while it is generated."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer, self._tokens = tokenizer, list[int]()
        self._pieces: TextPieces | None = None  # None until `put` gets the prompt

    def put(self, value: Tensor) -> None:
        tokens = value.flatten().tolist()
        if self._pieces is None:
            self._pieces = TextPieces(self.tokenizer, tokens)
            return
        self._tokens += tokens
        typer.echo(self._pieces.next(self._tokens, ended=False), nl=False)

    def end(self) -> None:
        rest = self._pieces.next(self._tokens, ended=True) if self._pieces is not None else ""
        typer.echo(rest)
