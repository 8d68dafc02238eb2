"""The next states of a :class:`Tabulated` grammar as a table on a device, and arrays whose rows are computed on first use."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .base import Tables, Tabulated, unpack
from .vocabulary import Vocabulary

#: Greatest number of entries of a table; the next states of a larger grammar are computed on the host, token by token.
ENTRIES = 1 << 24
#: Number of table entries computed at once: 32 MB of states.
CHUNK = 1 << 22


@dataclass(frozen=True)
class TokenTable:
    """The next state of a grammar for each of its ``S`` states and each token. Tokens with the same next states share a column.

    Attributes:
        next: ``[S, K]`` int64, the next state for each state and each column of tokens; 0 if the token is illegal. Tokens of column 0
            are never legal.
        columns: ``[V]`` int64, column of each token.
    """

    next: Tensor
    columns: Tensor
    _forced: list[Tensor] = field(default_factory=list)

    @staticmethod
    def of(grammar: Tabulated, device: torch.device) -> TokenTable | None:
        """The table of a grammar, cached per device as long as the grammar lives; None if it would be too large."""
        known = _TABLES.setdefault(grammar, {})
        if device not in known:
            known[device] = _made(grammar.tables(), grammar.vocabulary, device)
        return known[device]

    def forced(self, grammar: Tabulated) -> Tensor:
        """``[S, 3]`` int64 on the CPU, for each state of `grammar` (the grammar of this table): the number of forced bytes, the first
        forced byte (-1: none), and the first token by which the tokenizer encodes the forced bytes (-1: none).
        """
        if not self._forced:
            rows = torch.tensor([[0, -1, -1]], device="cpu").repeat(len(self.next), 1)
            for state in {grammar.first, *self.next.unique().tolist()} - {0}:
                if text := grammar.forced_bytes(state):
                    token = (*grammar.forced_tokens(state, 1), -1)[0]
                    rows[state] = torch.tensor([len(text), text[0], token], device="cpu")
            self._forced.append(rows)
        return self._forced[0]


_TABLES: WeakKeyDictionary[Tabulated, dict[torch.device, TokenTable | None]] = WeakKeyDictionary()


def _made(tables: Tables, vocabulary: Vocabulary, device: torch.device) -> TokenTable | None:
    states = len(tables.next)
    # Columns are compared by two randomly weighted sums of their states; different columns collide with a probability of 2^-100.
    chance = torch.Generator().manual_seed(0)
    weights = (
        torch.randint(-(1 << 62), 1 << 62, (2, states, 1), generator=chance, device="cpu").mul(2).add(1).to(device)
    )
    numbers = {(0, 0): 0}
    distinct = [torch.zeros(states, 1, dtype=torch.int64, device=device)]
    columns = torch.zeros(len(vocabulary), dtype=torch.int64, device="cpu")
    for tokens, reached in _walked(tables, vocabulary, device):
        new, mine = [], []
        for place, key in enumerate(map(tuple, (weights * reached).sum(1).T.tolist())):
            if key not in numbers:
                numbers[key] = len(numbers)
                new.append(place)
            mine.append(numbers[key])
        columns[tokens] = torch.tensor(mine, device="cpu")
        if len(numbers) * states > ENTRIES:
            return None
        distinct.append(reached[:, new])
    return TokenTable(torch.cat(distinct, dim=1), columns.to(device))


def _walked(tables: Tables, vocabulary: Vocabulary, device: torch.device) -> Iterator[tuple[list[int], Tensor]]:
    """Yields batches of tokens, each with the next states ``[S, tokens]`` for each state and token; 0 if the token is illegal."""
    states = len(tables.next)
    every = torch.arange(states, device="cpu")
    # The states that need entries. States with the dead state's mask are unreachable, and after a stop token no token is legal.
    living = (tables.mask_of != tables.mask_of[0]) & (every != tables.stopped)
    some = np.bitwise_or.reduce(tables.masks[tables.mask_of[living].unique()].numpy(), axis=0, initial=0)
    used = set(unpack(torch.from_numpy(some), len(vocabulary)).nonzero().flatten().tolist())
    stops = [token for token in vocabulary.stops if token in used]
    spelled = sorted(used.difference(stops), key=lambda token: len(vocabulary.tokens[token] or b""))
    # One more column, for the padding after a token's end, leads back to the same state.
    after = torch.cat([tables.next.long()[:, tables.classes], every[:, None]], dim=1).to(device)
    every, living, masks, mask_of = (t.to(device) for t in (every, living, tables.masks, tables.mask_of))

    def legal(tokens: list[int], reached: Tensor) -> Tensor:
        token = torch.tensor(tokens, device=device)
        bits = (masks[:, token >> 5] >> (token & 31).int() & 1).bool()
        return torch.where(bits[mask_of] & living[:, None], reached, 0)

    if stops:
        yield stops, legal(stops, torch.full((states, len(stops)), tables.stopped, device=device))
    size = min(max(CHUNK // states, 1), 1 << 14)  # tokens per batch; tokens are sorted by length
    for begin in range(0, len(spelled), size):
        tokens = spelled[begin : begin + size]
        texts = [vocabulary.tokens[token] or b"" for token in tokens]
        length = np.array([len(text) for text in texts])
        spelling = np.full((len(texts), length[-1]), 256, np.int16)
        spelling[np.arange(length[-1]) < length[:, None]] = np.frombuffer(b"".join(texts), np.uint8)
        reached = every[:, None].expand(-1, len(tokens))
        for byte in torch.from_numpy(spelling).to(device).long().T:
            reached = after[reached, byte]
        yield tokens, legal(tokens, reached)


class LazyMasks:
    """An array whose rows are computed on first use. All held rows are dropped when a new row would exceed `most`.

    Attributes:
        most: greatest number of rows that are held at once.
    """

    def __init__(
        self, width: int, dtype: type[np.generic], most: int, make: Callable[[int, NDArray[Any]], None]
    ) -> None:
        """make: ``make(number, out)`` writes the row of `number` to the array `out`, ``[width]``."""
        self.most, self._make = most, make
        # Replaced as a pair, because another thread may still read the previous pair.
        self._held: tuple[dict[int, int], NDArray[Any]] = {}, np.empty((0, width), dtype)
        self._making = Lock()

    @property
    def nbytes(self) -> int:
        return self._held[1].nbytes

    def places(self, numbers: Sequence[int]) -> tuple[list[int], NDArray[Any]] | None:
        """Returns where the rows `numbers` stand in a read-only array, and the array ``[R, width]``; None for more than `most` rows."""
        places, rows = self._held
        try:
            return [places[number] for number in numbers], rows
        except KeyError:
            wanted = {*numbers}
        if len(wanted) > self.most:
            return None
        with self._making:
            places, rows = self._held
            missing = wanted - places.keys()
            needed = len(places) + len(missing)
            if needed > len(rows):
                if needed > self.most:
                    places, missing = {}, wanted
                places, before = {**places}, rows
                rows = np.empty((min(2 * needed, self.most), before.shape[1]), before.dtype)
                rows[: len(places)] = before[: len(places)]
            for number in missing:
                self._make(number, rows[len(places)])
                places[number] = len(places)
            self._held = places, rows
        return [places[number] for number in numbers], rows
