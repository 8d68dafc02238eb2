"""What earlier calls wrote, as far as it is remembered: the global tree of suffix decoding."""

from __future__ import annotations

import threading
from array import array
from bisect import bisect_right
from typing import Any

from .followed_text import FollowedText
from .suffix_index import ChainedText

#: Tokens of the prompt that are remembered with an output: its beginning is found by them.
LEAD = 16
SEPARATOR = -1
#: The index may hold so many times the remembered tokens before the dropped ones are cleared out.
SLACK = 1.25
#: Of a remembered token: itself and its places in the chains of every order, which are mostly Python's dictionaries.
BYTES_PER_TOKEN = 400


class RowText(FollowedText[ChainedText]):
    """The text of one row of a call, with its own occurrences."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(ChainedText())

    def output(self) -> array[int]:
        """What was generated, with a little of the prompt; empty if nothing was."""
        text = self.index.tokens
        return text[max(self.prompt - LEAD, 0) :] if len(text) > self.prompt else array("i")


class TextMemory:
    """Outputs of earlier calls, the least recently used of them dropped where they would exceed `capacity`.

    Hold `lock` while several threads may use it.

    Args:
        capacity: most tokens that are remembered.

    Attributes:
        index: the texts, one after the other, some of them dropped already.
        tokens: how many are remembered.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.lock = threading.RLock()
        self.index = ChainedText()
        self._begins: list[int] = []  # of every text, in order
        self._ends: list[int] = []
        self._used: dict[int, None] = {}  # the numbers of the texts that are remembered, the least recently used first
        self.tokens = 0
        self._numbers: dict[int, int] = {}  # of texts by the hash of their bytes

    @property
    def nbytes(self) -> int:
        """About: tokens, the links between their occurrences, and what Python adds."""
        return len(self.index) * BYTES_PER_TOKEN

    @property
    def texts(self) -> int:
        """Remembered texts."""
        return len(self._used)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, lock=threading.RLock())

    def add(self, text: array[int]) -> None:
        """Remembers a text, of a long one the end; one that is known already counts as used."""
        with self.lock:
            text = text[-self.capacity :] if self.capacity else text[:0]
            if len(text) < 2:  # nothing follows anything
                return
            digest = hash(text.tobytes())
            known = self._numbers.get(digest)
            if known is not None and known in self._used and self._text(known) == text:
                self.use(known)
                return
            while self.tokens + len(text) > self.capacity:
                self._drop(next(iter(self._used)))
            if len(self.index) + len(text) > SLACK * self.capacity:
                self._rebuild()
            self._numbers[digest] = len(self._begins)
            self._append(text)

    def text_at(self, place: int) -> int | None:
        """The number of the text that this place of the index belongs to, None if it was dropped."""
        number = bisect_right(self._begins, place) - 1
        return number if number in self._used else None

    def end_of(self, number: int) -> int:
        """Where a text ends in the index."""
        return self._ends[number]

    def use(self, number: int) -> None:
        """A text was of use: it is now the last to be dropped."""
        del self._used[number]
        self._used[number] = None

    def _text(self, number: int) -> array[int]:
        return self.index.tokens[self._begins[number] : self._ends[number]]

    def _append(self, text: array[int]) -> None:
        number = len(self._begins)
        self._begins.append(len(self.index))
        self.index.extend(text)
        self._ends.append(len(self.index))
        self.index.extend((SEPARATOR,))
        self._used[number] = None
        self.tokens += len(text)

    def _drop(self, number: int) -> None:
        del self._used[number]
        self.tokens -= self._ends[number] - self._begins[number]

    def _rebuild(self) -> None:
        """Without the texts that were dropped."""
        texts = [self._text(number) for number in self._used]
        self.index = ChainedText()
        self._begins, self._ends, self._used, self.tokens, self._numbers = [], [], {}, 0, {}
        for text in texts:
            self._numbers[hash(text.tobytes())] = len(self._begins)
            self._append(text)
