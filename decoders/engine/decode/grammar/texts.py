"""A row's grammar on the host. A position is a state number, or the tokens after the committed text; masks are rows of a table."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ....common.devices import pins
from ....constraints import CompiledGrammar, LazyMasks, Tabulated, mask_words, unpack
from ....sampling.processors import Replacements

#: In every mask table, the row with the mask that allows all tokens.
FREE = 0
#: Greatest number of bytes of unpacked masks that are kept during a call.
OPEN = 1 << 25


class MaskTable:
    """The packed masks of a call. Row 0 allows all tokens; then come the masks of grammars with tables, then masks for one step.

    It also numbers the mappings by which grammars replace drawn tokens (:class:`~decoders.sampling.processors.Replacements`).
    """

    _NEVER = torch.iinfo(torch.int64).max

    def __init__(self, vocabulary: int, device: torch.device) -> None:
        self.vocabulary, self.device = vocabulary, device
        self.words = torch.full((1, mask_words(vocabulary)), -1, dtype=torch.int32, device="cpu")
        self.fixed = self.used = 1
        self._open_rows: set[int] = {FREE}  # rows from `add` whose masks are known to allow a token
        self._kinds: dict[int, tuple[int, Mapping[int, int]]] = {}
        self._replaced = torch.empty(2, 0, dtype=torch.int64, device="cpu")
        self._last: tuple[list[list[int]], Replacements | None] = [], None
        self._open = LazyMasks(vocabulary, np.bool_, max(OPEN // vocabulary, 1), self._unpack)

    def add(self, masks: Tensor) -> int:
        """Adds `masks` as rows for the whole call, returns the first index. Do not call it between :meth:`new` and :meth:`clear`."""
        first = len(self.words)
        self.words = torch.cat([self.words, masks])
        self.used = self.fixed = len(self.words)
        return first

    def new(self) -> int:
        """Adds a row to write a mask to, and returns its index. The row is valid until :meth:`clear`."""
        if self.used == len(self.words):
            more = self.words.new_full((max(len(self.words) - self.fixed, 16), self.words.shape[1]), -1)
            self.words = torch.cat([self.words, more])
        self.used += 1
        return self.used - 1

    def empty(self, row: int) -> bool:
        """Whether the mask in `row` allows no token."""
        if row in self._open_rows:
            return False
        whole, rest = divmod(self.vocabulary, 32)
        words = self.words[row].numpy().view(np.uint32)
        some = bool(words[:whole].any()) or (rest > 0 and bool(words[whole] & np.uint32((1 << rest) - 1)))
        if some and row < self.fixed:
            self._open_rows.add(row)
        return not some

    def clear(self) -> None:
        """Frees all rows that :meth:`new` has returned."""
        self.used = self.fixed

    def kind(self, replaced: Mapping[int, int]) -> int:
        """Returns a number for `replaced`, which maps drawn tokens to replacements and must never change; 0 for an empty mapping."""
        if not replaced:
            return 0
        if id(replaced) not in self._kinds:
            self._kinds[id(replaced)] = len(self._kinds) + 1, replaced
            keys = {
                kind * self.vocabulary + drawn: written
                for kind, mapping in self._kinds.values()
                for drawn, written in mapping.items()
            }
            ordered = sorted(keys)
            # The keys are padded to one of a few sizes, because each size needs another recording.
            ordered += [self._NEVER] * ((1 << max(len(ordered) - 1, 63).bit_length()) - len(ordered))
            tokens = [keys.get(key, 0) for key in ordered]
            self._replaced = torch.tensor([ordered, tokens], device=self.device)
            self._last = [], None
        return self._kinds[id(replaced)][0]

    def replacements(self, kinds: list[list[int]]) -> Replacements | None:
        """The replacements after each node, or None if there are none. kinds: the nodes' :meth:`kind` numbers, ``B`` lists of ``N``."""
        if not self._kinds or (self.device.type == "cpu" and not any(map(any, kinds))):
            return None
        if kinds != self._last[0] or self._last[1] is None:  # consecutive steps often have the same kinds
            keys, tokens = self._replaced.unbind(0)
            self._last = kinds, Replacements(keys, tokens, torch.tensor(kinds, device=self.device) * self.vocabulary)
        return self._last[1]

    def unpacked(self, rows: list[list[int]]) -> Tensor | None:
        """``[B, N, V]`` bool on the call's device, the masks in `rows` (``B`` lists of ``N``); None on the CPU if all rows are 0."""
        if self.device.type == "cpu" and not any(map(any, rows)):
            return None
        if self.device.type != "cpu":  # packed masks are transferred, because they have an eighth of the bytes
            words = self.words[torch.tensor(rows)]  # a tensor, because nested lists would index several dimensions
            words = words.pin_memory() if pins(self.device) else words
            return unpack(words.to(self.device, non_blocking=pins(self.device)), self.vocabulary)
        flat = [row for some in rows for row in some]
        open_rows = self._open.places(flat) if self.used == self.fixed else None
        if open_rows is None:
            masks = self._bits(flat)
        else:
            places, open = open_rows
            masks = open.take(places, 0)
        return torch.from_numpy(masks).view(len(rows), -1, self.vocabulary)

    def _unpack(self, row: int, out: NDArray[np.bool_]) -> None:
        out[:] = self._bits([row])[0]

    def _bits(self, rows: list[int]) -> NDArray[np.bool_]:
        packed = self.words.numpy().view(np.uint8)[rows]
        return np.unpackbits(packed, axis=-1, count=self.vocabulary, bitorder="little").view(np.bool_)


class Text(ABC):
    """The grammar of a row. A position identifies the text so far; None is the position after an illegal token.

    Attributes:
        grammar: the compiled grammar; None for a row without a grammar.
    """

    grammar: CompiledGrammar | None

    @property
    @abstractmethod
    def begin(self) -> Any:
        """The position of the empty text."""

    @abstractmethod
    def step(self, position: Any, token: int) -> Any:
        """The position after one more token; None if the token is illegal."""

    @abstractmethod
    def mask(self, position: Any) -> int:
        """The table row with the mask of the tokens that may follow `position`."""

    def kind(self, position: Any) -> int:
        """The number (:meth:`MaskTable.kind`) of the mapping that replaces tokens drawn at `position`; 0 if nothing is replaced."""
        return 0

    def settle(self, position: Any) -> Any:
        """Called when the text up to `position` is committed. Returns the new value of this position, to be used from now on."""
        return position

    @abstractmethod
    def forced_bytes(self, position: Any) -> bytes:
        """The bytes that must come next."""

    def forced_tokens(self, position: Any, limit: int) -> list[int] | None:
        """The tokens that must come next, at most `limit`; None if the grammar provides only :meth:`forced_bytes`."""
        return None


class FreeText(Text):
    """A row without a grammar."""

    grammar = None
    begin = FREE

    def step(self, position: Any, token: int) -> Any:
        return position

    def mask(self, position: Any) -> int:
        return FREE

    def forced_bytes(self, position: Any) -> bytes:
        return b""


class TabulatedText(Text):
    """A grammar with tables. A position is a state of the grammar's automaton. shift: the table row of the grammar's first mask."""

    def __init__(self, grammar: Tabulated, shift: int) -> None:
        self.grammar: Tabulated = grammar
        self.shift = shift

    @property
    def begin(self) -> int:
        return self.grammar.first

    def step(self, position: int, token: int) -> int | None:
        return self.grammar.step(position, token) or None

    def mask(self, position: int) -> int:
        return self.shift + self.grammar.mask_rows[position]

    def forced_bytes(self, position: int) -> bytes:
        return self.grammar.forced_bytes(position)


class MatchedText(Text):
    """A grammar that a matcher checks token by token. A position is the tuple of the tokens after the committed text."""

    def __init__(self, grammar: CompiledGrammar, table: MaskTable) -> None:
        self.grammar, self.matcher, self.table = grammar, grammar.start(), table
        self.position: tuple[int, ...] = ()
        self.known: dict[tuple[int, ...], int] = {}  # by position, the row of its mask in the table
        self.kinds: dict[tuple[int, ...], int] = {}  # by position, the number of its mapping (`kind`), if any

    begin = ()

    def step(self, position: tuple[int, ...], token: int) -> tuple[int, ...] | None:
        wanted = (*position, token)
        return wanted if wanted in self.known or self._move_to(wanted) else None

    def mask(self, position: tuple[int, ...]) -> int:
        row = self.known.get(position)
        if row is None:
            self._move_to(position)
            replaced = self.matcher.replacements()
            if replaced is None:
                row = self.table.new()
                self.matcher.fill_mask(self.table.words[row])
            else:
                row, self.kinds[position] = FREE, self.table.kind(replaced)
            self.known[position] = row
        return row

    def kind(self, position: tuple[int, ...]) -> int:
        self.mask(position)
        return self.kinds.get(position, 0)

    def settle(self, position: tuple[int, ...]) -> tuple[int, ...]:
        self._move_to(position)
        self.position = ()
        self.known.clear()
        self.kinds.clear()
        return ()

    def forced_bytes(self, position: tuple[int, ...]) -> bytes:
        self._move_to(position)
        return self.matcher.forced_bytes()

    def forced_tokens(self, position: tuple[int, ...], limit: int) -> list[int] | None:
        self._move_to(position)
        return self.matcher.forced_tokens(limit)

    def _move_to(self, position: tuple[int, ...]) -> bool:
        """Moves the matcher to `position`, or to the last legal position before it. Returns whether it reached `position`."""
        common = len(self.position)
        if position[:common] != self.position:
            pairs = enumerate(zip(self.position, position, strict=False))
            common = next((place for place, (here, there) in pairs if here != there), min(common, len(position)))
            self.matcher.rollback(len(self.position) - common)
        accepted = self.matcher.advance(position[common:])
        self.position = position[: common + accepted]
        return len(self.position) == len(position)
