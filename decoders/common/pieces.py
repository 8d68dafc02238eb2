"""Incremental detokenization: the text of tokens behind a prompt, in pieces as the tokens come."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: A byte-fallback token.
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
#: How tokenizers decode bytes that are no whole character.
UNFINISHED = "\N{REPLACEMENT CHARACTER}"
#: Tokens that are decoded again with the next ones. The window starts anew after so many, which costs one more decoding.
AGAIN = 12


class TextPieces:
    """Cuts a growing list of tokens into pieces of text; joined they are the text of the whole list behind its prompt.

    That text is what decoding prompt and tokens together adds to the text of the prompt, since many tokenizers drop a blank at the
    beginning of what they decode. A character that the prompt begins and the tokens end belongs to the tokens. Special tokens are
    left out, and blanks are not cleaned up (``clean_up_tokenization_spaces``), which would change text that was already returned.

    A piece ends behind a token whose text no later token can change. It is held back while it ends in bytes that are no whole
    character, and behind a byte-fallback token (``<0x0A>``): a tokenizer decodes a run of these at once, and one wrong
    byte makes all of them replacement characters.

    Each piece is the text that the new tokens add to a window of earlier tokens. One object is for one text.

    Args:
        prompt: the tokens in front.
        shown: special tokens that are written by their names. Each ends a piece, and the rest of the text is what it is without them.

    Attributes:
        held: the text that was held back; the next piece begins with it, possibly changed by later tokens.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int] = (), shown: frozenset[int] = frozenset()
    ) -> None:
        self.tokenizer, self.held, self._special = tokenizer, "", shown
        self._shown = 0  # tokens whose text was returned
        self._window = self._end_of(prompt)  # tokens that are decoded again with the next ones
        self._known = self._decoded(self._window)

    def next(self, tokens: Sequence[int], ended: bool) -> str:
        """The text that is new in `tokens`, the whole list without the prompt. Nothing is held back if they have `ended`."""
        new = list(tokens[self._shown :])
        window = self._window + new
        text = self._decoded(window)
        # Only a prompt can end within a character.
        begin = common(self._known, text) if self._known.endswith(UNFINISHED) else len(self._known)
        piece = text[begin:]
        if not ended and (not piece or text.endswith(UNFINISHED) or self._ends_in_bytes(window)):
            self.held = piece
            return ""
        if len(self._window) >= AGAIN and self._plain(new):
            window, text = new, self._decoded(new)
        self._window, self._known, self._shown, self.held = window, text, len(tokens), ""
        return piece

    def _end_of(self, prompt: Sequence[int]) -> list[int]:
        """The last :data:`AGAIN` tokens of a prompt that have a text, more if the first would cut a run of bytes."""
        begin, count, in_bytes = len(prompt), 0, False
        while begin and (count < AGAIN or in_bytes):
            begin -= 1
            if (is_byte := self._is_byte(prompt[begin])) or self._plain([prompt[begin]]):
                count, in_bytes = count + 1, is_byte
        return list(prompt[begin:])

    def _ends_in_bytes(self, tokens: Sequence[int]) -> bool:
        """Whether the last token that has a text is one of byte fallback."""
        for token in reversed(tokens):
            if (is_byte := self._is_byte(token)) or self._decoded([token]):
                return is_byte
        return False

    def _is_byte(self, token: int) -> bool:
        return bool(BYTE_TOKEN.fullmatch(self.tokenizer.convert_ids_to_tokens([token])[0] or ""))

    def name(self, token: int) -> str:
        """The name of a special token in `shown`; "" for other tokens."""
        name: str = self.tokenizer.convert_ids_to_tokens([token])[0] if token in self._special else ""
        return name

    def _decoded(self, tokens: list[int]) -> str:
        """The text of `tokens`; a name stands where the text in front of it ends."""
        text, before, known = "", list[int](), ""
        marks = (place for place, token in enumerate(tokens) if token in self._special)
        for mark, end in pairwise([-1, *marks, len(tokens)]):
            part = tokens[mark + 1 : end]
            whole = self._plain(before + part)
            if not whole.startswith(known):  # the name cuts a character
                before, known, whole = [], "", self._plain(part)
            text += whole[len(known) :] + "".join(map(self.name, tokens[end : end + 1]))
            before, known = before + part, whole
        return text

    def _plain(self, tokens: list[int]) -> str:
        """The text of `tokens`, special ones left out."""
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)  # type: ignore[assignment]
        return text


def text_behind(tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], tokens: Sequence[int]) -> str:
    """The whole text of `tokens` behind `prompt`, see :class:`TextPieces`."""
    return TextPieces(tokenizer, prompt).next(tokens, ended=True)


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """The tokens that are no text, by their names. Takes milliseconds where thousands were added."""
    added = tokenizer.added_tokens_decoder
    ids = sorted({*tokenizer.all_special_ids, *(token for token, entry in added.items() if entry.special)})
    return dict(zip(tokenizer.convert_ids_to_tokens(ids), ids, strict=True))


def named_tokens(special: Mapping[str, int], texts: Iterable[str]) -> frozenset[int]:
    """The tokens of `special` whose full names occur in one of `texts`."""
    texts = tuple(texts)
    return frozenset(token for name, token in special.items() if name and any(name in text for text in texts))


def common(one: str, other: str) -> int:
    """Length of the longest common prefix."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (here, there) in pairs if here != there), min(len(one), len(other)))
