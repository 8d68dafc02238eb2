"""Keeps the texts of a call's rows in indexes on the host, for strategies that look up earlier text."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from ..strategy import Sequences

__all__ = ["FollowedText", "TextIndex", "follow_rows"]

#: Number of tokens at the end of a text that are compared with the row again, to notice that the row now holds another text.
OVERLAP = 16


class TextIndex(Protocol):
    """An index of a row's text, for lookups.

    Attributes:
        tokens: the text.
    """

    tokens: array[int]

    def extend(self, tokens: Iterable[int]) -> None:
        """Adds tokens at the end."""

    def truncate(self, length: int) -> None:
        """Keeps the first `length` tokens, and removes all others."""


Index = TypeVar("Index", bound=TextIndex)
Text = TypeVar("Text", bound="FollowedText[Any]")


class FollowedText(Generic[Index]):
    """The text of one row, prompt and output. The strategy chooses the type of the index, which holds the text.

    Attributes:
        index: the index that holds the text.
        prompt: number of prompt tokens in the text.
    """

    __slots__ = ("index", "prompt")

    def __init__(self, index: Index) -> None:
        self.index = index
        self.prompt = 0

    def follow(self, tokens: Sequence[int], begin: int) -> None:
        """Sets the text from position `begin` on to `tokens`. Keeps the text up to the first difference, and replaces the rest."""
        known = self.index.tokens[begin:]
        same = min(len(known), len(tokens))
        if known[:same] != array("i", tokens[:same]):
            same = next(i for i in range(same) if known[i] != tokens[i])
        if begin + same < len(self.index.tokens):
            self.index.truncate(begin + same)
        self.index.extend(tokens[same:])

    def goes_on(self, tokens: Sequence[int], begin: int) -> bool:
        """Whether this text, from position `begin` on, is a prefix of `tokens`, so that `tokens` can continue it."""
        known = self.index.tokens[begin:]
        return len(known) <= len(tokens) and known == array("i", tokens[: len(known)])


def follow_rows(
    rows: list[Text], sequences: Sequences, append_only: bool, another: Callable[[Text], Text]
) -> list[bool]:
    """Updates the rows' texts after a step, and returns for each row whether it has finished.

    Args:
        rows: the text of each row. An entry is replaced if its row now holds another text.
        sequences: the argument of :meth:`decoders.Strategy.propose`.
        append_only: whether texts only grow. Then the host reads only the ends of the rows.
        another: called if a row now holds another text: takes the row's old text, and returns an empty text for the row.
    """
    known = sequences.read()
    begins = [max(len(row.index.tokens) - OVERLAP, 0) if append_only else 0 for row in rows]
    # A finished row whose text is complete is skipped. Because all rows are read from one common position, a short finished row would
    # otherwise make the host read all other rows from near their beginning.
    ended = [
        append_only and over and length == len(row.index.tokens)
        for row, over, length in zip(rows, known.finished, known.lengths, strict=True)
    ]
    first = min((begin for begin, done in zip(begins, ended, strict=True) if not done), default=0)
    texts = known.tokens_from(first)
    for number, row in enumerate(rows):
        if ended[number]:
            continue
        begin = begins[number]
        tokens = texts[number][begin - first :]
        if append_only and not row.goes_on(tokens, begin):
            row, begin, tokens = another(row), 0, known.tokens_from(0)[number]
            rows[number] = row
        row.prompt = known.prompt_lengths[number]
        row.follow(tokens, begin)
    return known.finished
