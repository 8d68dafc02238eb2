"""The texts of a call's rows, followed on the host from step to step by what looks things up in them."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from ..strategy import Sequences

#: Where a text is only ever added to, so many tokens are read again to see that it is the same.
OVERLAP = 16


class TextIndex(Protocol):
    """What a text is kept in."""

    tokens: array[int]

    def extend(self, tokens: Iterable[int]) -> None:
        """Adds tokens at the end."""

    def truncate(self, length: int) -> None:
        """Takes back what was added behind the first `length` tokens."""


Index = TypeVar("Index", bound=TextIndex)
Text = TypeVar("Text", bound="FollowedText[Any]")


class FollowedText(Generic[Index]):
    """The text of one row of a call: prompt and output.

    Attributes:
        index: the text.
        prompt: how many of its tokens are prompt.
    """

    __slots__ = ("index", "prompt")

    def __init__(self, index: Index) -> None:
        self.index = index
        self.prompt = 0

    def follow(self, tokens: Sequence[int], begin: int) -> None:
        """Makes the text end with `tokens`, which stand at `begin`: what differs from there on is taken back first."""
        known = self.index.tokens[begin:]
        same = min(len(known), len(tokens))
        if known[:same] != array("i", tokens[:same]):
            same = next(i for i in range(same) if known[i] != tokens[i])
        if begin + same < len(self.index.tokens):
            self.index.truncate(begin + same)
        self.index.extend(tokens[same:])

    def goes_on(self, tokens: Sequence[int], begin: int) -> bool:
        """Whether the text is the beginning of one in which `tokens` stand at `begin`, as far as these tell."""
        known = self.index.tokens[begin:]
        return len(known) <= len(tokens) and known == array("i", tokens[: len(known)])


def follow_rows(
    rows: list[Text], sequences: Sequences, append_only: bool, another: Callable[[Text], Text]
) -> list[bool]:
    """Brings the rows' texts up to date; returns which rows have finished.

    Args:
        append_only: whether a row's text is never taken back, so that its end alone is read.
        another: gives the empty text of a row that has another text now, where that is so.
    """
    lengths, finished = sequences.length.tolist(), sequences.finished.tolist()
    prompts = sequences.prompt_length.tolist()
    begins = [max(len(row.index.tokens) - OVERLAP, 0) if append_only else 0 for row in rows]
    first = min(begins)
    texts = sequences.tokens[:, first : max(lengths)].tolist()
    for number, row in enumerate(rows):
        begin, length = begins[number], lengths[number]
        tokens = texts[number][begin - first : length - first]
        if append_only and not row.goes_on(tokens, begin):
            row, begin, tokens = another(row), 0, sequences.tokens[number, :length].tolist()
            rows[number] = row
        row.prompt = prompts[number]
        row.follow(tokens, begin)
    return finished
