"""Tokens as text while they come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: What stands for bytes that are no whole character yet.
UNFINISHED = "\N{REPLACEMENT CHARACTER}"
#: Tokens that are decoded again before they are left behind: to leave them behind is to decode once more.
AGAIN = 12


class TextPieces:
    """Cuts a growing list of tokens into pieces of text; joined they are the text of the whole list.

    Each piece is what decoding a few tokens more adds: a tokenizer may write a token in another way at the beginning of a text,
    so some tokens before it are decoded along with it. One object is for one text.

    Args:
        tokenizer: decodes them; special tokens are left out.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self._shown, self._before = 0, 0  # tokens whose text has been given, and from where on they are decoded again
        self._known = ""  # the text of these

    def next(self, tokens: Sequence[int], ended: bool) -> str:
        """The text that is new in `tokens`, the whole list; a character that is not whole is held back until it `ended`."""
        now = self._text(tokens[self._before :])
        if not ended and (len(now) <= len(self._known) or now.endswith(UNFINISHED)):
            return ""
        piece, last, self._shown = now[len(self._known) :], self._shown, len(tokens)
        if last - self._before >= AGAIN:
            self._before, now = last, self._text(tokens[last:])
        self._known = now
        return piece

    def _text(self, tokens: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(list(tokens), skip_special_tokens=True)  # type: ignore[assignment]
        return text
