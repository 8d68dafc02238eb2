"""Markers, which end free text, and the automaton that finds them (Aho and Corasick 1975).

The alphabet consists of bytes, and one symbol for each special token, because other tokens never spell a special token. A marker of
text is found however it is split into tokens, even if it begins or ends within a token.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from ...errors import GrammarError, shortened
from ..vocabulary import Vocabulary

#: Symbols below this number are bytes; symbol ``TOKEN + t`` is token ``t``.
TOKEN = 256

Symbols = tuple[int, ...]
#: Greatest number of cached effects of tokens (:class:`Found`), per automaton of markers.
REMEMBERED = 1 << 14


def symbols_of(marker: str | int, vocabulary: Vocabulary) -> Symbols:
    """The symbols (bytes, special tokens) of `marker`, a text or a token's id. Names of special tokens in a text stand for the tokens.

    Raises:
        GrammarError: `marker` is an id that no token has.
    """
    if isinstance(marker, int):
        if not 0 <= marker < len(vocabulary):
            raise GrammarError(
                f"marker {marker}: there is no such token, ids go from 0 to {len(vocabulary) - 1}", "marker"
            )
        return (TOKEN + marker,)
    special = vocabulary.special
    if not special:
        return tuple(marker.encode())
    parts = re.split("(" + "|".join(map(re.escape, sorted(special, key=len, reverse=True))) + ")", marker)
    return tuple(
        symbol for part in parts for symbol in ((TOKEN + special[part],) if part in special else part.encode())
    )


def shown(symbols: Sequence[int], vocabulary: Vocabulary) -> str:
    """`symbols` as text, for messages."""
    names = {token: name for name, token in vocabulary.special.items()}
    parts = (
        bytes([s]) if s < TOKEN else (vocabulary.tokens[s - TOKEN] or names.get(s - TOKEN, f"<{s - TOKEN}>").encode())
        for s in symbols
    )
    return b"".join(part if isinstance(part, bytes) else part.encode() for part in parts).decode(errors="replace")


@dataclass(frozen=True)
class Found:
    """The effect of a token on free text.

    Attributes:
        node: the node of the longest prefix of a marker with which the text ends; 0 if a marker is complete.
        marker: index of the marker that the token completes; None if it completes no marker.
        rest: bytes of the token after the complete marker.
    """

    node: int
    marker: int | None = None
    rest: bytes = b""


class Markers:
    """The automaton of a few markers. A node stands for the longest prefix of a marker with which the text ends; node 0: no prefix.

    Args:
        markers: the symbols of each marker.

    Raises:
        GrammarError: a marker is empty, or can never be found because another marker ends within it.
    """

    def __init__(self, markers: Sequence[Symbols], vocabulary: Vocabulary) -> None:
        self.markers, self.vocabulary = tuple(markers), vocabulary
        self._atomic = {symbol - TOKEN for marker in markers for symbol in marker if symbol >= TOKEN}
        #: Cached :meth:`_effect`, because drafting and verification need the same effects again.
        self.found = lru_cache(REMEMBERED)(self._effect)
        self._next: list[dict[int, int]] = [{}]
        self.paths: list[Symbols] = [()]
        #: For each node, the index of the first marker that begins with the node's symbols.
        self.toward: list[int] = [0]
        for number, marker in enumerate(markers):
            if not marker:
                raise GrammarError("a marker is empty: give a text or a token", "marker")
            node = 0
            for symbol in marker:
                if symbol not in self._next[node]:
                    self._next[node][symbol] = len(self._next)
                    self._next.append({})
                    self.paths.append((*self.paths[node], symbol))
                    self.toward.append(number)
                node = self._next[node][symbol]
        whole = {marker: number for number, marker in reversed([*enumerate(markers)])}
        self._shorter = [0] * len(self._next)  # failure links: the node of the longest proper suffix
        self._complete: list[int | None] = [None] * len(self._next)
        for node in sorted(range(1, len(self._next)), key=lambda node: len(self.paths[node])):
            path = self.paths[node]
            if len(path) > 1:
                parent = self._node_of(path[:-1])
                self._shorter[node] = self.step(self._shorter[parent], path[-1])
            ended = whole.get(path)
            self._complete[node] = ended if ended is not None else self._complete[self._shorter[node]]
            if self._complete[node] is not None and self._next[node]:
                first, second = self._complete[node], self.toward[next(iter(self._next[node].values()))]
                raise GrammarError(
                    f"the marker {self._shown(second)} contains {self._shown(first or 0)}, which is a marker too and would be found "
                    "first: choose markers that do not contain each other",
                    "marker",
                )

    def _shown(self, number: int) -> str:
        return repr(shortened(shown(self.markers[number], self.vocabulary)))

    def _node_of(self, path: Symbols) -> int:
        node = 0
        for symbol in path:
            node = self._next[node][symbol]
        return node

    def step(self, node: int, symbol: int) -> int:
        """The node to which `symbol` leads from `node`."""
        while (after := self._next[node].get(symbol)) is None:
            if not node:
                return 0
            node = self._shorter[node]
        return after

    def symbols(self, token: int) -> Symbols | bytes:
        """The symbols of `token` in this automaton: its bytes, or one symbol for a special token or a token of a marker."""
        text = self.vocabulary.tokens[token]
        return (TOKEN + token,) if text is None or token in self._atomic else text

    def _effect(self, node: int, token: int) -> Found:
        """The effect of `token` after a text that ended at `node`."""
        return self.read(node, self.symbols(token))

    def read(self, node: int, symbols: Symbols | bytes) -> Found:
        """The effect of `symbols` after a text that ended at `node`."""
        for place, symbol in enumerate(symbols, start=1):
            node = self.step(node, symbol)
            if (complete := self._complete[node]) is not None:
                return Found(0, complete, bytes(symbols[place:]))
        return Found(node)

    def completing(self, node: int) -> list[int]:
        """Tokens that complete a marker after a text that ended at `node`."""
        vocabulary, completing = self.vocabulary, set[int]()
        while True:
            path = self.paths[node]
            for marker in self.markers:
                rest = marker[len(path) :]
                if marker[: len(path)] != path or not rest:
                    continue
                if rest[0] >= TOKEN and len(rest) == 1:
                    completing.add(rest[0] - TOKEN)
                elif max(rest) < TOKEN:
                    text = bytes(rest)
                    texts = vocabulary.beginning_with(text) if path else vocabulary.holding(text)
                    completing.update(token for token in texts if token not in self._atomic)
            if not node:
                return sorted(completing)
            node = self._shorter[node]
