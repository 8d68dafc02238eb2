"""Tokens as text while they come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: What stands for bytes that are no whole character yet.
UNFINISHED = "\N{REPLACEMENT CHARACTER}"


class TextPieces:
    """Cuts a growing list of tokens into pieces of text; joined they are the text of the whole list.

    Each piece is what decoding a few tokens more adds: a tokenizer may write a token in another way at the beginning of a text,
    so the tokens of the piece before are decoded along with it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self._shown, self._before = 0, 0  # tokens whose text has been given, and where the last piece began

    def next(self, tokens: Sequence[int], ended: bool) -> str:
        """The text that is new in `tokens`, the whole list; a character that is not whole is held back until it `ended`."""
        known, now = self._text(tokens[self._before : self._shown]), self._text(tokens[self._before :])
        if not ended and (len(now) <= len(known) or now.endswith(UNFINISHED)):
            return ""
        self._before, self._shown = self._shown, len(tokens)
        return now[len(known) :]

    def _text(self, tokens: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(list(tokens), skip_special_tokens=True)  # type: ignore[assignment]
        return text
