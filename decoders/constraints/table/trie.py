"""The tokens of a vocabulary as a trie in arrays, level by level: what a byte automaton is walked along."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]


@dataclass(frozen=True)
class TokenPaths:
    """Tokens that an automaton can take from some states.

    Attributes:
        row: ``[n]`` int32, the start from which each path goes.
        node: ``[n]`` int32, the node of the trie that it has come to.
        state: ``[n]`` int32, the automaton's state there.
        token: ``[n]`` int32, the token that ends there; -1 where the walk stopped without one.
        deep: ``[starts]`` int64, how many bytes were read outside of strings.
    """

    row: Ints
    node: Ints
    state: Ints
    token: Ints
    deep: NDArray[np.int64]


@dataclass(frozen=True)
class Trie:
    """Node 0 is the root. The children of a node stand side by side.

    Attributes:
        byte: ``[M]`` uint8, the byte that leads to each node.
        first: ``[M]`` int32, its first child.
        count: ``[M]`` int32, how many children it has.
        token: ``[M]`` int32, the token that ends at each node, -1 if none.
        low: ``[M]`` int32, the first of the texts that begin with the bytes down to each node.
        high: ``[M]`` int32, the one after the last of them.
        characters: ``[M]`` int32, how many plain characters these bytes are; -1 if they are anything else.
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
        """The trie of `texts`, all different and none empty, in ascending order; each begins with `plain` plain bytes."""
        lengths = np.fromiter(map(len, texts), np.int64, len(texts))
        begins = np.cumsum(lengths) - lengths
        flat = np.frombuffer(b"".join(texts) + b"\0", np.uint8)
        names = np.asarray(tokens, np.int32)
        node = np.zeros(len(texts), np.int64)  # of each text, as deep as it has been read
        byte, count, token = [np.zeros(1, np.uint8)], [], [np.full(1, -1, np.int32)]
        low, high, characters = [np.zeros(1, np.int64)], [np.full(1, len(texts))], [np.zeros(1, np.int64)]
        leads = np.zeros(len(texts), np.int64)  # characters of each text, as deep as it has been read
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
        self,
        transitions: Ints,
        byte_class: NDArray[np.int64],
        starts: NDArray[np.integer[Any]],
        strings: NDArray[np.bool_] | None = None,
    ) -> TokenPaths:
        """All tokens that an automaton can take from some of its states.

        Args:
            transitions: ``[S, C]``, 0 is dead.
            byte_class: ``[256]``, the column of each byte.
            starts: states.
            strings: ``[S]``: states inside strings. They are not gone on from where plain characters have led to them.
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
