"""The text of a choice while it grows: in pieces that never end within a character or within what may become a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..constraints import Vocabulary
from ..errors import UnsupportedError
from ..serving.pieces import TextPieces, common

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Span:
    """A piece of text that one token, or several alike, brought.

    Attributes:
        text: the piece.
        drafted: whether a draft had the token.
    """

    text: str
    drafted: bool


class Spelling:
    """The bytes of every token by itself."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer, self._tokens = tokenizer, tuple[bytes | None, ...]()
        with suppress(UnsupportedError):  # its tokens are characters, or nobody knows
            self._tokens = Vocabulary.of(tokenizer, len(tokenizer), ()).tokens

    def of(self, token: int) -> bytes:
        """Of special tokens, their names."""
        data = self._tokens[token] if token < len(self._tokens) else None
        if data is None:
            name: str = self.tokenizer.decode([token], clean_up_tokenization_spaces=False)  # type: ignore[assignment]
            return name.encode()
        return data

    def within(self, token: int, text: str) -> bytes:
        """Of a token that brought, or has a share in, the characters `text`: what a tokenizer drops is not among them.

        That may be a blank at the beginning of a text, the sign of a word that goes on, or a special token.
        """
        data = self.of(token)
        try:
            same = data.decode() == text
        except UnicodeDecodeError:  # it cuts a character, or is none
            same = data.decode(errors="ignore") in text
        return data if same else text.encode()


def named(data: bytes) -> str:
    """`data` as text, bytes that are no whole character as ``\\xf0``: OpenAI's way to show them."""
    return data.decode(errors="backslashreplace")


class ChoiceText:
    """Tokens in, text out, up to the first stop string.

    Args:
        prompt: token ids in front of the text.

    Attributes:
        stopped: whether a stop string has come.
        shown: the text that was given out.
        written: all text that tokens have brought, cut or not.
        places: for each token whose text is known, where in `written` it begins and ends. Tokens that share a character begin and
            end where it does.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, stops: Sequence[str] = (), prompt: Sequence[int] = ()
    ) -> None:  # fmt: skip
        self.stops, self.stopped, self.shown = tuple(stops), False, ""
        self.written, self.places = "", list[tuple[int, int]]()
        self._pieces, self._tokens = TextPieces(tokenizer, prompt), list[int]()
        # What the text that is held back was with each of its tokens, and whether a draft had that token.
        self._unsettled: list[tuple[str, bool]] = []
        self._held: list[Span] = []

    def add(self, tokens: Sequence[int], drafted: Sequence[bool], ended: bool = False) -> list[Span]:
        """The text that may be shown now, in spans of tokens.

        Args:
            drafted: for each of the tokens.
            ended: whether no more will come.
        """
        for token, flag in zip(tokens, drafted, strict=True):
            self._tokens.append(token)
            piece = self._pieces.next(self._tokens, False)
            self._unsettled.append((piece or self._pieces.held, flag))
            if piece:
                self._settle(piece)
        if ended:
            self._settle(self._pieces.next(self._tokens, True))
        return self._released(ended)

    def _settle(self, piece: str) -> None:
        """`piece` is the text of the open tokens: one begins where their text was right before it came."""
        before, begin = len(self.written), 0
        self.written += piece
        for place, (text, flag) in enumerate(self._unsettled, 1):
            last = place == len(self._unsettled)
            end = len(piece) if last else max(common(text, piece), begin)
            self.places.append((before + begin, before + max(min(len(text), len(piece)), end)))
            if end > begin and not self.stopped:
                self._held.append(Span(piece[begin:end], flag))
            begin = end
        self._unsettled = []

    def _released(self, ended: bool) -> list[Span]:
        text = "".join(span.text for span in self._held)
        places = [place for stop in self.stops if (place := text.find(stop)) >= 0]
        if places:
            self.stopped, count = True, min(places)
        else:
            count = len(text) if ended else len(text) - self._open(text)
        spans, left = [], []
        for span in self._held:
            now, later = span.text[:count], span.text[count:]
            count = max(count - len(span.text), 0)
            spans += [Span(now, span.drafted)] if now else []
            left += [Span(later, span.drafted)] if later else []
        self._held = [] if self.stopped else left
        self.shown += "".join(span.text for span in spans)
        return spans

    def _open(self, text: str) -> int:
        """Characters at the end of `text` that may be the beginning of a stop string."""
        longest = min(max((len(stop) for stop in self.stops), default=1) - 1, len(text))
        ends = (size for size in range(longest, 0, -1) if any(stop.startswith(text[-size:]) for stop in self.stops))
        return next(ends, 0)
