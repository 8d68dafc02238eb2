"""A vocabulary sorted by spelling, as a trie, with the *rest* of each token. Computed once per vocabulary.

A *plain* character needs no escape in a JSON string. The rest of a token is what follows the plain characters at its beginning.
Inside a string nearly the whole vocabulary is legal, and the automaton need not read every token: where any n plain characters are
legal, all tokens of up to n plain characters are legal. The automaton reads only the rest of other tokens, and many have the same rest.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from ..vocabulary import Vocabulary

Ints = NDArray[np.int32]


@dataclass(frozen=True)
class TokenPaths:
    """The ``n`` paths on which an automaton reads tokens, or the beginnings of tokens, from some start states.

    Attributes:
        row: ``[n]`` int32, for each path the index of its start state.
        node: ``[n]`` int32, the trie's node at the end of each path.
        state: ``[n]`` int32, the automaton's state at the end of each path.
        token: ``[n]`` int32, the token that ends at this node; -1 if :meth:`Trie.walk` cut the path off inside a string.
        deep: ``[starts]`` int64, for each start state the greatest number of bytes that a path reads outside of strings.
    """

    row: Ints
    node: Ints
    state: Ints
    token: Ints
    deep: NDArray[np.int64]


@dataclass(frozen=True)
class Trie:
    """A trie of texts with ``M`` nodes. Node 0 is the root. The children of a node have consecutive indices.

    Attributes:
        byte: ``[M]`` uint8, the byte that leads to each node.
        first: ``[M]`` int32, the first child of each node.
        count: ``[M]`` int32, the number of children of each node.
        token: ``[M]`` int32, the token that ends at each node, -1 if none.
        low: ``[M]`` int32, index of the first text that begins with the bytes from the root to each node.
        high: ``[M]`` int32, index after the last text that begins with these bytes.
        characters: ``[M]`` int32, the number of plain characters that these bytes spell; -1 if they spell anything else.
    """

    byte: NDArray[np.uint8]
    first: Ints
    count: Ints
    token: Ints
    low: Ints
    high: Ints
    characters: Ints

    @staticmethod
    def of(texts: Sequence[bytes], tokens: Ints, plain: NDArray[np.int64]) -> Trie:
        """The trie of `texts`, distinct, not empty and sorted. plain: for each text, the number of bytes before its rest."""
        lengths = np.fromiter(map(len, texts), np.int64, len(texts))
        begins = np.cumsum(lengths) - lengths
        flat = np.frombuffer(b"".join(texts) + b"\0", np.uint8)
        names = np.asarray(tokens, np.int32)
        node = np.zeros(len(texts), np.int64)  # the node of each text at the current depth
        byte, count, token = [np.zeros(1, np.uint8)], [], [np.full(1, -1, np.int32)]
        low, high, characters = [np.zeros(1, np.int64)], [np.full(1, len(texts))], [np.zeros(1, np.int64)]
        leads = np.zeros(len(texts), np.int64)  # the number of characters of each text down to the current depth
        alive, width, depth = np.arange(len(texts)), 1, 0
        while len(alive):
            key = node * 256 + flat[begins[alive] + depth]
            new = np.r_[True, key[1:] != key[:-1]]
            node = np.cumsum(new) - 1
            byte.append((key[new] & 255).astype(np.uint8))
            count.append(np.bincount(key[new] >> 8, minlength=width).astype(np.int32))
            width, depth = int(node[-1]) + 1, depth + 1
            leads[alive] += flat[begins[alive] + depth - 1] & 0xC0 != 0x80
            low.append(alive[new])
            high.append(alive[np.r_[np.flatnonzero(new)[1:], len(alive)] - 1] + 1)
            one = low[-1]
            cut = (flat[begins[one] + depth] & 0xC0 == 0x80) & (depth < lengths[one])  # within a character
            characters.append(np.where((depth <= plain[one]) & ~cut, leads[one], -1))
            ends = lengths[alive] == depth
            ending = np.full(width, -1, np.int32)
            ending[node[ends]] = names[alive[ends]]
            token.append(ending)
            alive, node = alive[~ends], node[~ends]
        count.append(np.zeros(width, np.int32))
        counts = np.concatenate(count)
        first = np.cumsum(counts) - counts + 1
        parts = [np.concatenate(part).astype(np.int32) for part in (token, low, high, characters)]
        return Trie(np.concatenate(byte), first.astype(np.int32), counts, *parts)

    def walk(
        self, transitions: Ints, byte_class: NDArray[np.int64], starts: NDArray[np.integer[Any]],
        strings: NDArray[np.bool_] | None = None,
    ) -> TokenPaths:  # fmt: skip
        """The paths of all tokens that an automaton can read from some of its states.

        Args:
            transitions: ``[S, C]``, 0 is dead.
            byte_class: ``[256]``, the column of each byte.
            starts: the start states.
            strings: ``[S]`` bool, which states are inside strings. Inside strings a path of only plain characters is cut off.
        """
        columns = transitions.shape[1]
        table = transitions.ravel()
        column = byte_class.astype(np.int32)[self.byte]
        row = np.arange(len(starts), dtype=np.int32)
        state, node = starts.astype(np.int32), np.zeros(len(starts), np.int32)
        outside = np.ones(len(starts), np.bool_)
        deep = np.zeros(len(starts), np.int64)
        paths: list[tuple[Ints, Ints, Ints, Ints]] = []
        while len(row):
            deep[row[outside]] += 1
            count = self.count[node]
            total = int(count.sum())
            came = np.repeat(np.arange(len(row), dtype=np.int32), count)
            offset = self.first[node] - (np.cumsum(count) - count).astype(np.int32)
            node = np.arange(total, dtype=np.int32) + offset[came]
            state = table[(state * columns)[came] + column[node]]
            live = np.flatnonzero(state)
            came, node, state = came[live], node[live], state[live]
            row, outside = row[came], outside[came]
            token = self.token[node]
            inside = self.count[node] > 0
            if strings is not None:
                entered = strings[state]
                outside &= ~entered
                halted = entered & (self.characters[node] > 0)
                token[halted] = -1
                inside &= ~halted
                ends = np.flatnonzero((token >= 0) | halted)
            else:
                ends = np.flatnonzero(token >= 0)
            paths.append((row[ends], node[ends], state[ends], token[ends]))
            inner = np.flatnonzero(inside)
            row, node, state, outside = row[inner], node[inner], state[inner], outside[inner]
        rows, nodes, states, tokens = (np.concatenate(part) for part in zip(*paths, strict=True))
        return TokenPaths(rows, nodes, states, tokens, deep)


@dataclass(frozen=True)
class Lexicon:
    """The ``T`` distinct spellings of tokens: each consists of plain characters, which need no escape in JSON, and a rest.

    Attributes:
        size: ``V``, the size of the vocabulary.
        stops: tokens that end a text.
        texts: the spellings in ascending order.
        tokens: ``[T]`` int64, the first token of each spelling.
        length: ``[T]`` int64, how many plain characters each spelling begins with.
        longest: greatest number of plain characters with which a spelling, or a suffix of a spelling's rest, begins (a string may begin
            within a token). The number of plain characters that may follow a state is counted up to this bound.
        rests: the rests of all spellings, and the rests of all suffixes of these rests; in ascending order, the empty rest first.
        rest: ``[T]`` int64, index of each spelling's rest.
        twins: ``[2, K]`` int64, the first token of a spelling, and a later token of the same spelling.
    """

    size: int
    stops: tuple[int, ...]
    texts: list[bytes]
    tokens: NDArray[np.int64]
    length: NDArray[np.int64]
    longest: int
    rests: list[bytes]
    rest: NDArray[np.int64]
    twins: NDArray[np.int64]

    @staticmethod
    def of(vocabulary: Vocabulary) -> Lexicon:
        """The lexicon of a vocabulary, cached as long as the vocabulary lives."""
        lexicon = _LEXICONS.get(vocabulary)
        if lexicon is None:
            ids = vocabulary.ids
            texts = sorted(ids)
            tokens = np.fromiter((ids[text] for text in texts), np.int64, len(texts))
            parts = [split(text) for text in texts]
            # A string may begin in the middle of a token, at any character after the token's plain characters.
            rests = {rest for _, rest in parts}
            later = [split(rest[i:]) for rest in rests for i in range(1, len(rest)) if rest[i] & 0xC0 != 0x80]
            ordered = sorted(rests | {rest for _, rest in later} | {b""})
            number = {rest: place for place, rest in enumerate(ordered)}
            twins = [(ids[text], t) for t, text in enumerate(vocabulary.tokens) if text is not None and ids[text] != t]
            lexicon = _LEXICONS[vocabulary] = Lexicon(
                len(vocabulary), vocabulary.stops, texts, tokens,
                np.array([length for length, _ in parts], np.int64),
                max((length for length, _ in (*parts, *later)), default=0),
                ordered, np.array([number[rest] for _, rest in parts], np.int64),
                np.array(twins, np.int64).reshape(-1, 2).T,
            )  # fmt: skip
        return lexicon

    @property
    def words(self) -> int:
        """``W``, number of words of a packed mask."""
        return -(-self.size // 32)

    @cached_property
    def single(self) -> NDArray[np.bool_]:
        """``[256]`` bool: which bytes have their own token."""
        have = np.zeros(256, np.bool_)
        have[[text[0] for text in self.texts if len(text) == 1]] = True
        return have

    @cached_property
    def plain(self) -> NDArray[np.int32]:
        """``[longest + 1, W]``: packed masks; row n allows the tokens that consist of 1 to n plain characters only."""
        rows = np.zeros((self.longest + 1, self.words), np.int32)
        some = self.rest == 0
        for length in range(1, self.longest + 1):
            rows[length] = rows[length - 1] | self.mask(self.tokens[some & (self.length == length)])
        return rows

    @cached_property
    def trie(self) -> Trie:
        """A trie of the bytes of all tokens."""
        plain = [len(text) - len(self.rests[rest]) for text, rest in zip(self.texts, self.rest.tolist(), strict=True)]
        return Trie.of(self.texts, self.tokens.astype(np.int32), np.array(plain, np.int64))

    @cached_property
    def ends(self) -> Trie:
        """A trie of the rests that are not empty, with their indices in :attr:`rests` as tokens."""
        count = len(self.rests)
        return Trie.of(self.rests[1:], np.arange(1, count, dtype=np.int32), np.zeros(count - 1, np.int64))

    @cached_property
    def beginning(self) -> NDArray[np.int64]:
        """``[256]``: how many spellings begin with each byte."""
        return np.bincount([text[0] for text in self.texts], minlength=256)

    def mask(self, tokens: NDArray[np.integer[Any]] | tuple[int, ...]) -> NDArray[np.int32]:
        """``[W]``: the packed mask of `tokens`, each the first token of its spelling, and of their twins."""
        return self.packed(1, 0, list(tokens) if isinstance(tokens, tuple) else tokens)[0]

    def packed(
        self, count: int, row: NDArray[np.integer[Any]] | int, token: NDArray[np.integer[Any]] | list[int]
    ) -> NDArray[np.int32]:
        """``[count, W]``: masks that allow, for each pair of `row` and `token`, the token and its twins in this row."""
        allowed = np.zeros((count, 32 * self.words), np.uint8)
        allowed[row, token] = 1
        allowed[:, self.twins[1]] = allowed[:, self.twins[0]]
        return np.packbits(allowed, axis=1, bitorder="little").view("<i4")


_LEXICONS: WeakKeyDictionary[Vocabulary, Lexicon] = WeakKeyDictionary()


#: UTF-8 of plain characters: ranges of the first and of the further bytes (Unicode 15, table 3-7).
_RANGES = (
    ((0x20, 0x21),), ((0x23, 0x5B),), ((0x5D, 0x7E),),
    ((0xC2, 0xC2), (0xA0, 0xBF)), ((0xC3, 0xDF), (0x80, 0xBF)),
    ((0xE0, 0xE0), (0xA0, 0xBF), (0x80, 0xBF)), ((0xE1, 0xEC), (0x80, 0xBF), (0x80, 0xBF)),
    ((0xED, 0xED), (0x80, 0x9F), (0x80, 0xBF)), ((0xEE, 0xEF), (0x80, 0xBF), (0x80, 0xBF)),
    ((0xF0, 0xF0), (0x90, 0xBF), (0x80, 0xBF), (0x80, 0xBF)), ((0xF1, 0xF3), (0x80, 0xBF), (0x80, 0xBF), (0x80, 0xBF)),
    ((0xF4, 0xF4), (0x80, 0x8E), (0x80, 0xBF), (0x80, 0xBF)), ((0xF4, 0xF4), (0x8F, 0x8F), (0x80, 0xBE), (0x80, 0xBF)),
    ((0xF4, 0xF4), (0x8F, 0x8F), (0xBF, 0xBF), (0x80, 0xBE)),
)  # fmt: skip


#: One plain character.
_PLAIN = re.compile(
    b"|".join(b"".join(b"[\\x%02x-\\x%02x]" % pair for pair in ranges) for ranges in _RANGES), re.DOTALL
)
_BEGIN = re.compile(b"(?:%s)*" % _PLAIN.pattern, re.DOTALL)


def split(text: bytes) -> tuple[int, bytes]:
    """How many plain characters a token begins with, and the token's rest."""
    begin = _BEGIN.match(text)
    end = begin.end() if begin else 0
    # Every character has one byte that is not a continuation byte.
    return sum(byte & 0xC0 != 0x80 for byte in text[:end]), text[end:]


@dataclass(frozen=True)
class Room:
    """How many plain characters (without an escape in JSON) may follow each state.

    Attributes:
        least: ``[S]`` int64: any sequence of up to this number of plain characters may come next.
        exact: ``[S]`` bool: whether no more than `least` plain characters may come next.
        next: ``[S]`` int64: the state after any plain character; 0 if plain characters lead to different states, or are illegal.
    """

    least: NDArray[np.int64]
    exact: NDArray[np.bool_]
    next: NDArray[np.int64]

    def reached(self, states: NDArray[np.int64]) -> NDArray[np.int64]:
        """`states` and all states reachable by plain characters."""
        known = states
        while len(states):
            states = np.setdiff1d(self.next[states], known)
            states = states[states > 0]
            known = np.union1d(known, states)
        return known


def room(transitions: NDArray[np.int32], byte_class: NDArray[np.int64], longest: int) -> Room:
    """How many plain characters may follow each state of an automaton ``[S, C]``, counted up to `longest`.

    Counting ends where plain characters lead to different states, which never happens within strings.
    """
    low = np.full(len(transitions), len(transitions), np.int64)
    high = np.zeros(len(transitions), np.int64)
    for ranges in _RANGES:
        least = most = np.arange(len(transitions))
        for first, last in reversed(ranges):
            targets = transitions[:, np.unique(byte_class[first : last + 1])]
            least, most = least[targets].min(1), most[targets].max(1)
        low, high = np.minimum(low, least), np.maximum(high, most)
    same = low == high
    count = np.zeros(len(transitions), np.int64)
    state = np.arange(len(transitions))
    for _ in range(longest):
        following = np.where(same[state], low[state], 0)
        if not following.any():
            break
        count += following > 0
        state = np.where(following > 0, following, state)
    return Room(count, (same[state] & (low[state] == 0)) | (count >= longest), np.where(count > 0, low, 0))
