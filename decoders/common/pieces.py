"""Incremental detokenization: the text of tokens after a prompt, in pieces as the tokens come."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from os.path import commonprefix
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: Matches the name of a byte-fallback token.
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
#: The text to which tokenizers decode an incomplete character.
UNFINISHED = "\N{REPLACEMENT CHARACTER}"
#: New tokens are decoded with a window of earlier tokens. Once the window has this many tokens, the new tokens become the window.
AGAIN = 12


class TextPieces:
    """Cuts a growing list of tokens into pieces of text for streaming. The joined pieces are the text after the prompt. Each object
    serves one text.

    The prompt is decoded with the tokens and without them, and the text is the difference. The tokens are not decoded alone, because
    many tokenizers drop a blank at the beginning. A character that begins in the prompt belongs to the text. Special tokens are left
    out. Blanks are not cleaned up (``clean_up_tokenization_spaces``), because this would change text that was already returned.

    A piece ends after a token whose text no later token can change. New text is held back while it ends within a character, or with a
    byte-fallback token (``<0x0A>``): a tokenizer decodes a run of byte-fallback tokens at once, and a wrong byte turns the whole run
    into replacement characters. To find a piece, only a window of earlier tokens is decoded again.

    Args:
        prompt: the tokens before the text.
        shown: special tokens whose names are written into the text. Each name ends a piece; the text around names does not change.

    Attributes:
        held: the text held back; the next piece begins with it, unless later tokens change it.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int] = (), shown: frozenset[int] = frozenset()
    ) -> None:
        self.tokenizer, self.held, self._special = tokenizer, "", shown
        self._shown = 0  # number of tokens whose text was returned
        self._window = self._end_of(prompt)  # tokens that are decoded again with the next tokens
        self._known = self._decoded(self._window)

    def next(self, tokens: Sequence[int], ended: bool) -> str:
        """The next piece; an empty string if the new text is held back.

        tokens: all tokens after the prompt; ended: whether the text has ended, so that nothing is held back.
        """
        new = list(tokens[self._shown :])
        window = self._window + new
        text = self._decoded(window)
        # The last known character may be incomplete only at first: the prompt may end within a character, but no piece does.
        cut = self._known.endswith(UNFINISHED)
        begin = len(commonprefix((self._known, text)) if cut else self._known)  # noqa: RUF071 -- no files
        piece = text[begin:]
        if not ended and (not piece or self._may_change(window, text, self._decoded)):
            self.held = piece
            return ""
        # Byte-fallback tokens or a character may continue after a special token, so the text without the names is checked, too.
        if len(self._window) >= AGAIN and (plain := self._plain(new)) and not self._may_change(new, plain, self._plain):
            window, text = new, self._decoded(new)
        self._window, self._known, self._shown, self.held = window, text, len(tokens), ""
        return piece

    def _end_of(self, prompt: Sequence[int]) -> list[int]:
        """The last tokens of a prompt, at least :data:`AGAIN` of them with text. The first with text is not a byte-fallback token."""
        begin, count, in_bytes = len(prompt), 0, False
        while begin and (count < AGAIN or in_bytes):
            begin -= 1
            if (is_byte := self._is_byte(prompt[begin])) or self._plain([prompt[begin]]):
                count, in_bytes = count + 1, is_byte
        return list(prompt[begin:])

    def _may_change(self, tokens: list[int], text: str, decode: Callable[[list[int]], str]) -> bool:
        """Whether later tokens may change `text`, the result of ``decode(tokens)``."""
        if text.endswith(UNFINISHED):
            return True
        for token in reversed(tokens):
            if (is_byte := self._is_byte(token)) or decode([token]):
                return is_byte
        return False

    def _is_byte(self, token: int) -> bool:
        return bool(BYTE_TOKEN.fullmatch(self.tokenizer.convert_ids_to_tokens([token])[0] or ""))

    def name(self, token: int) -> str:
        """The name of a special token in `shown`; an empty string for other tokens."""
        name: str = self.tokenizer.convert_ids_to_tokens([token])[0] if token in self._special else ""
        return name

    def _decoded(self, tokens: list[int]) -> str:
        """The text of `tokens`, with the names of the special tokens in `shown`."""
        text, before, known = "", list[int](), ""
        marks = (place for place, token in enumerate(tokens) if token in self._special)
        for mark, end in pairwise([-1, *marks, len(tokens)]):
            part = tokens[mark + 1 : end]
            whole = self._plain(before + part)
            if not whole.startswith(known):  # the special token is between the bytes of one character
                before, known, whole = [], "", self._plain(part)
            text += whole[len(known) :] + "".join(map(self.name, tokens[end : end + 1]))
            before, known = before + part, whole
        return text

    def _plain(self, tokens: list[int]) -> str:
        """The text of `tokens` without special tokens."""
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)  # type: ignore[assignment]
        return text


def text_behind(tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], tokens: Sequence[int]) -> str:
    """The text of `tokens` after `prompt`, see :class:`TextPieces`."""
    return TextPieces(tokenizer, prompt).next(tokens, ended=True)


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Maps the names of a tokenizer's special tokens to their ids. Takes milliseconds for thousands of added tokens."""
    added = tokenizer.added_tokens_decoder
    ids = sorted({*tokenizer.all_special_ids, *(token for token, entry in added.items() if entry.special)})
    return dict(zip(tokenizer.convert_ids_to_tokens(ids), ids, strict=True))


def unfinished(text: str, markers: Sequence[str]) -> int:
    """The number of characters at the end of `text` that may be the beginning of one of `markers`."""
    longest = min(max(map(len, markers), default=1) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if any(m.startswith(text[-n:]) for m in markers)), 0)
