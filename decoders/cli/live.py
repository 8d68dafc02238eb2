"""Shows a text while it is generated: as plain text, or in a panel that shows accepted draft tokens in another colour."""

from __future__ import annotations

import time
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
#: The time for preparing and compiling a model is shown if it is at least this number of seconds.
SHOWN_SECONDS = 0.5


class ColouredStream(BaseStreamer):
    """A streamer of one row that records which of its tokens were accepted draft tokens.

    All tokens of a step except the last are accepted draft tokens. The target chose the last token. (At the end of a row, a step may
    be incomplete. Then its last token may also be a draft token.)

    Attributes:
        pieces: (text, accepted) for each token. If the text depends on later tokens, it is "" here, and the later tokens' text
            contains it. :meth:`end` may add one more piece.
        steps: number of steps so far.
        drawing: seconds spent in `on_change`. This function is called after each step to draw the text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, on_change: Any = lambda: None) -> None:
        self.tokenizer, self.on_change = tokenizer, on_change
        self.pieces: list[tuple[str, bool]] = []
        self.steps, self.drawing = 0, 0.0
        self._tokens: list[int] = []
        self._accepted: deque[bool] = deque()
        self._texts: TextPieces | None = None  # once the prompt is known

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
        if not self._accepted:  # the step is complete, or the method does not report steps
            self._draw()

    def end(self) -> None:
        if self._texts is not None and (rest := self._texts.next(self._tokens, ended=True)):
            self.pieces.append((rest, self.pieces[-1][1]))
        self._draw()

    def text(self) -> Text:
        """The text so far, with accepted draft tokens in another colour."""
        return Text.assemble(*((piece, ACCEPTED if accepted else OWN) for piece, accepted in self.pieces))

    def _draw(self) -> None:
        started = time.perf_counter()
        self.on_change()
        self.drawing += time.perf_counter() - started


def show(
    console: Console, method: Method, workload: Workload, tokenizer: PreTrainedTokenizerBase, name: str, prompt: str,
    new_tokens: int,
) -> None:  # fmt: skip
    """Decodes `workload` (one row) and shows the text while it grows.

    The shown speed excludes the time for drawing. At the end it also excludes the time for preparing and compiling the model. This
    time is shown beside the speed.
    """
    started, ready = time.perf_counter(), 0.0
    stream = ColouredStream(tokenizer)

    def panel() -> Panel:
        seconds = time.perf_counter() - started - stream.drawing - ready
        count = len(stream.pieces)
        figures = f"{count / seconds:.0f} tokens/s" if seconds > 0 else ""
        title = Text.assemble(name, " · ", (method.name, "bold"))
        if stream.steps:
            figures += f" · {count / stream.steps:.2f} tokens per step"
            title = Text.assemble(title, "   ", ("drafted ahead", ACCEPTED), " · ", ("the target's own", OWN))
        if ready >= SHOWN_SECONDS:
            figures += f" · {ready:.0f} s of compiling, apart"
        return Panel(
            Text.assemble(*_tail(prompt, stream.text(), console)),
            title=title, title_align="left", subtitle=figures, subtitle_align="right", expand=console.is_terminal,
        )  # fmt: skip

    with nullcontext() if not console.is_terminal else Live(panel(), console=console, auto_refresh=False) as view:
        if view is not None:
            stream.on_change = lambda: view.update(panel(), refresh=True)
        report = decode(method, workload, new_tokens, stream).report
        if report is not None:
            ready = report.timings.ready + report.timings.compile
        stream.on_change()
    if view is None:
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
        self._pieces: TextPieces | None = None  # once the prompt is known

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
