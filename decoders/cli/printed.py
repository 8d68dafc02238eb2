"""Text on standard output while it is written."""

from __future__ import annotations

import typer
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from ..serving.pieces import TextPieces


class PrintedPieces(BaseStreamer):
    """A streamer that prints the text of one row as it comes."""

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
