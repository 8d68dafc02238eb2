"""A vocabulary sorted for automata: short and long tokens, plain and other ones. Made once per vocabulary."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from ..vocabulary import Vocabulary
from .plain import plain_length
from .trie import Trie

#: Bytes of a short token. States that cannot be told apart in as many steps share a walk.
SHORT = 16


@dataclass(frozen=True)
class Lexicon:
    """Tokens with a spelling, each spelling once.

    Attributes:
        size: ``V``. stops: tokens that end a text.
        texts, tokens: spellings in ascending order, and the first token of each.
        length: ``[T]`` int64, plain characters of each; 0 for tokens that are not plain.
        twins: ``[2, K]``, tokens that spell what an earlier one spells, behind that one.
    """

    size: int
    stops: tuple[int, ...]
    texts: list[bytes]
    tokens: NDArray[np.int64]
    length: NDArray[np.int64]
    twins: NDArray[np.int64]

    @staticmethod
    def of(vocabulary: Vocabulary) -> Lexicon:
        """The lexicon of a vocabulary; kept as long as that lives."""
        found = _LEXICONS.get(vocabulary)
        if found is None:
            ids = vocabulary.ids
            texts = sorted(ids)
            tokens = np.fromiter((ids[text] for text in texts), np.int64, len(texts))
            length = np.fromiter(map(plain_length, texts), np.int64, len(texts))
            twins = [(ids[text], t) for t, text in enumerate(vocabulary.tokens) if text is not None and ids[text] != t]
            pairs = np.array(twins, np.int64).reshape(-1, 2).T
            found = _LEXICONS[vocabulary] = Lexicon(
                len(vocabulary), vocabulary.stops, texts, tokens, length, pairs
            )
        return found

    @property
    def words(self) -> int:
        """``W``, words of a packed mask."""
        return -(-self.size // 32)

    @cached_property
    def longest(self) -> int:
        """Plain characters of the longest plain token."""
        return int(self.length.max(initial=0))

    @cached_property
    def single(self) -> NDArray[np.bool_]:
        """``[256]``: which bytes are tokens."""
        have = np.zeros(256, np.bool_)
        have[[text[0] for text in self.texts if len(text) == 1]] = True
        return have

    @cached_property
    def plain(self) -> NDArray[np.int32]:
        """``[longest + 1, W]`` packed: the tokens of up to as many plain characters, and at least one."""
        allowed = np.zeros((self.longest + 1, 32 * self.words), np.uint8)
        some = self.length > 0
        allowed[self.length[some], self.tokens[some]] = 1
        return self.pack(np.maximum.accumulate(allowed))

    @cached_property
    def tries(self) -> dict[tuple[bool, bool], Trie]:
        """Tries by (of short tokens or of long ones, of all tokens or of those that are not plain)."""
        short = np.fromiter((len(text) <= SHORT for text in self.texts), np.bool_, len(self.texts))
        found = {}
        for is_short in (True, False):
            for every in (True, False):
                chosen = np.flatnonzero((short == is_short) & (every | (self.length == 0)))
                found[is_short, every] = Trie.of([self.texts[i] for i in chosen], self.tokens[chosen])
        return found

    def pack(self, allowed: NDArray[np.uint8]) -> NDArray[np.int32]:
        """``[R, 32·W]`` zeros and ones, of first tokens, as masks ``[R, W]`` of all tokens."""
        allowed[:, self.twins[1]] = allowed[:, self.twins[0]]
        return np.packbits(allowed, axis=1, bitorder="little").view("<i4")


_LEXICONS: WeakKeyDictionary[Vocabulary, Lexicon] = WeakKeyDictionary()
