"""Texts that are kept from call to call, with an index that finds earlier occurrences of a text's last tokens."""

from __future__ import annotations

import copy
import threading
from array import array
from bisect import bisect_right
from collections.abc import Iterable
from typing import Any, NamedTuple

__all__ = ["ChainedText", "Occurrence", "TextMemory"]

#: Lengths of the n-grams in the index, the longest first. If a longer n-gram matches, shorter n-grams are not looked up.
ORDERS = (4, 2, 1)
#: Number of bits per token in the key of an n-gram.
BITS = 22

SEPARATOR = -1
#: The index is rebuilt without dropped texts before it holds more tokens than SLACK times the capacity.
SLACK = 1.25
#: Estimated bytes of a remembered token: the token, and its entries in the index. Most of it is for Python's dictionaries.
BYTES_PER_TOKEN = 400

_MASKS = tuple((1 << BITS * order) - 1 for order in ORDERS)


class Occurrence(NamedTuple):
    """An earlier occurrence of a suffix.

    Attributes:
        length: number of matching tokens.
        end: index of the last matching token.
    """

    length: int
    end: int


class ChainedText:
    """A text that grows and shrinks at its end. Each n-gram of a length in :data:`ORDERS` is linked to its previous occurrence.

    Attributes:
        tokens: the text. Negative tokens separate texts, and no n-gram contains them.
    """

    __slots__ = ("_chains", "_heads", "_key", "_run", "tokens")

    def __init__(self) -> None:
        self.tokens = array("i")
        self._heads: tuple[dict[int, int], ...] = tuple({} for _ in ORDERS)
        self._chains = tuple(array("i") for _ in ORDERS)
        self._key, self._run = 0, 0  # the key of the last tokens; number of tokens since the last separator

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Adds `tokens` at the end, in about a microsecond per token."""
        key, run, position = self._key, self._run, len(self.tokens)
        text = self.tokens
        parts = tuple(zip(ORDERS, _MASKS, self._heads, self._chains, strict=True))
        for token in tokens:
            text.append(token)
            if token < 0:
                key = run = 0
            else:
                key, run = (key << BITS | token) & _MASKS[0], run + 1
            for order, mask, heads, chain in parts:
                if run < order:
                    chain.append(-1)
                else:
                    gram = key & mask
                    chain.append(heads.get(gram, -1))
                    heads[gram] = position
            position += 1
        self._key, self._run = key, run

    def truncate(self, length: int) -> None:
        """Keeps the first `length` tokens, and removes all others."""
        text = self.tokens
        while len(text) > length:
            for order, mask, heads, chain in zip(ORDERS, _MASKS, self._heads, self._chains, strict=True):
                earlier = chain.pop()
                if self._run >= order:
                    if earlier < 0:
                        del heads[self._key & mask]
                    else:
                        heads[self._key & mask] = earlier
            text.pop()
            self._restore()

    def _restore(self) -> None:
        """Recomputes `_key` and `_run`, which describe the last tokens, after tokens were removed."""
        key = run = 0
        for token in self.tokens[-ORDERS[0] :]:
            if token < 0:
                key = run = 0
            else:
                key, run = key << BITS | token, run + 1
        self._key, self._run = key, run

    def occurrences(self, suffix: array[int], most: int, before: int) -> list[Occurrence]:
        """Looks up the longest n-gram at the end of `suffix` that occurs in the text. Returns its latest occurrences, the latest
        first.

        Args:
            suffix: the last tokens of the text to look up. A match has at most this many tokens.
            most: greatest number of occurrences.
            before: only occurrences that end before this index are returned.
        """
        text = self.tokens
        occurrences: list[Occurrence] = []
        for order, heads, chain in zip(ORDERS, self._heads, self._chains, strict=True):
            if len(suffix) < order:
                continue
            key = 0
            for token in suffix[-order:]:
                key = key << BITS | token
            end = heads.get(key, -1)
            while end >= before:
                end = chain[end]
            while end >= 0 and len(occurrences) < most:
                occurrences.append(Occurrence(_matching(text, end, suffix, order), end))
                end = chain[end]
            if occurrences:
                break
        return occurrences


def _matching(text: array[int], end: int, suffix: array[int], known: int) -> int:
    """How many tokens of `text` up to index `end` (included) equal the last tokens of `suffix`. known: number known to be equal."""
    length, longest = known, min(len(suffix), end + 1)
    if longest > length and text[end - length] != suffix[-length - 1]:
        return length  # the usual case
    if text[end + 1 - longest : end + 1] == suffix[len(suffix) - longest :]:
        return longest  # the usual case if more than `known` tokens match
    # Binary search, because comparing slices is faster than comparing token by token.
    while longest - length > 1:
        middle = (length + longest) // 2
        if text[end + 1 - middle : end + 1 - length] == suffix[len(suffix) - middle : len(suffix) - length]:
            length = middle
        else:
            longest = middle
    return length


class TextMemory:
    """Remembered texts, from earlier calls or from the user. Drops the least recently used texts beyond `capacity`.

    If several threads use the object, a thread must hold `lock` while it reads or changes the object.

    Args:
        capacity: greatest number of remembered tokens.

    Attributes:
        index: the texts, one after the other, with dropped texts until the index is rebuilt.
        tokens: number of remembered tokens.
        dropped: number of tokens of dropped texts, and of tokens that were cut off from texts longer than `capacity`.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.lock = threading.RLock()
        self.index = ChainedText()
        self._begins: list[int] = []  # the position of each text's first token in `index`, by serial number
        self._ends: list[int] = []
        self._used: dict[int, None] = {}  # serial numbers of the remembered texts, the least recently used first
        self.tokens = self.dropped = 0
        self._numbers: dict[int, int] = {}  # the serial number of each text, by the hash of its bytes

    @property
    def nbytes(self) -> int:
        """The estimated size in bytes: tokens, the links between their occurrences, and Python's overhead."""
        return len(self.index) * BYTES_PER_TOKEN

    @property
    def texts(self) -> int:
        """The number of remembered texts."""
        return len(self._used)

    def __getstate__(self) -> dict[str, Any]:
        with self.lock:  # returns a copy, because pickle reads the state after this method has released the lock
            return copy.deepcopy({name: value for name, value in vars(self).items() if name != "lock"})

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, lock=threading.RLock())

    def add(self, text: array[int]) -> None:
        """Remembers `text`, or its last `capacity` tokens. If the text is remembered already, it is only marked as used."""
        with self.lock:
            self.dropped += max(len(text) - self.capacity, 0)
            text = text[-self.capacity :] if self.capacity else text[:0]
            if len(text) < 2:  # a text of one token has no continuations
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
        """The serial number of the text that contains the token at `place` of :attr:`index`. None if this text was dropped."""
        number = bisect_right(self._begins, place) - 1
        return number if number in self._used else None

    def end_of(self, number: int) -> int:
        """The index after the last token of the text with the serial number `number`."""
        return self._ends[number]

    def use(self, number: int) -> None:
        """Marks a text as the most recently used, so that it is dropped last."""
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
        length = self._ends[number] - self._begins[number]
        self.tokens -= length
        self.dropped += length

    def _rebuild(self) -> None:
        """Rebuilds the index without dropped texts."""
        texts = [self._text(number) for number in self._used]
        self.index = ChainedText()
        self._begins, self._ends, self._used, self.tokens, self._numbers = [], [], {}, 0, {}
        for text in texts:
            self._numbers[hash(text.tobytes())] = len(self._begins)
            self._append(text)
