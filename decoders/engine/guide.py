"""Where every row of a call stands in its grammar, and which tokens may follow each node of a block.

A grammar is walked on the host, by numbers (a :class:`Tabulated` grammar, whose masks lie ready in a table) or by a
matcher that goes down a path and comes back. Both end in the same form: a table of packed masks, and a row of it for
every node. Unpacked (:class:`~decoders.engine.sampling.Masks`), these are all that reaches the compiled step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..constraints.base import Grammar, Tabulated, mask_words, unpack
from ..errors import GrammarError
from ..tree import Topology, TreeTensors
from .core import StepOutput
from .sampling import Masks

#: Row of every mask table that allows all tokens.
FREE = 0
#: Masks make it impossible to leave a grammar; a backend may be wrong.
LIES = "row {row}: the grammar's masks allowed a token that its matcher refuses: a defect of the backend"


class MaskTable:
    """The masks of a call: row 0 allows everything, then those of tabulated grammars, then those made step by step."""

    def __init__(self, vocabulary: int, device: torch.device) -> None:
        self.vocabulary, self.device = vocabulary, device
        self.words = torch.full((1, mask_words(vocabulary)), -1, dtype=torch.int32)
        self.fixed = self.used = 1

    def add(self, masks: Tensor) -> int:
        """Adds rows for the whole call; returns the first one's index. Not after :meth:`new`."""
        self.words = torch.cat([self.words, masks])
        first, self.fixed = self.fixed, len(self.words)
        self.used = self.fixed
        return first

    def new(self) -> int:
        """A row to be written until :meth:`clear`."""
        if self.used == len(self.words):
            more = self.words.new_full((max(len(self.words) - self.fixed, 16), self.words.shape[1]), -1)
            self.words = torch.cat([self.words, more])
        self.used += 1
        return self.used - 1

    def clear(self) -> None:
        """Gives back all rows that were handed out singly."""
        self.used = self.fixed

    def unpacked(self, rows: list[list[int]]) -> Tensor:
        """``[B, N, V]`` bool, the masks of `rows` (``B`` lists of ``N``) on the call's device."""
        if self.device.type != "cpu":  # an eighth of the bytes to send
            return unpack(self.words[rows].to(self.device), self.vocabulary)
        bits = np.unpackbits(self.words.numpy().view(np.uint8)[rows], axis=-1, count=self.vocabulary, bitorder="little")
        return torch.from_numpy(bits.view(np.bool_))


class Text(ABC):
    """What one row may write. A position is whatever tells where a text has got to; None is nowhere."""

    @property
    @abstractmethod
    def begin(self) -> Any:
        """The position of the empty text."""

    @abstractmethod
    def step(self, position: Any, token: int) -> Any:
        """The position after one more token, None if it is illegal."""

    @abstractmethod
    def mask(self, position: Any) -> int:
        """The row of the table that says what may follow."""

    @abstractmethod
    def settle(self, position: Any) -> Any:
        """`position` is committed: nothing before it is asked for again. Returns how it is called from now on."""

    @abstractmethod
    def forced(self, position: Any, limit: int, bytewise: bool) -> list[int]:
        """The tokens that must come next: as the tokenizer writes them, or one for each byte of these."""


class FreeText(Text):
    """A row without a grammar."""

    begin = FREE

    def step(self, position: Any, token: int) -> Any:
        return position

    def mask(self, position: Any) -> int:
        return FREE

    def settle(self, position: Any) -> Any:
        return position

    def forced(self, position: Any, limit: int, bytewise: bool) -> list[int]:
        return []


class TabulatedText(Text):
    """A grammar whose positions are states of an automaton. shift: first row of its masks in the table."""

    def __init__(self, grammar: Tabulated, shift: int) -> None:
        self.grammar, self.shift = grammar, shift

    @property
    def begin(self) -> int:
        return self.grammar.first

    def step(self, position: int, token: int) -> int | None:
        return self.grammar.step(position, token) or None

    def mask(self, position: int) -> int:
        return self.shift + self.grammar.mask_rows[position]

    def settle(self, position: int) -> int:
        return position

    def forced(self, position: int, limit: int, bytewise: bool) -> list[int]:
        run = self.grammar.forced_tokens(position, limit)
        return self.grammar.vocabulary.bytewise(run)[:limit] if bytewise else run


class MatchedText(Text):
    """A grammar that a matcher walks. Positions are the tokens since the committed text."""

    def __init__(self, grammar: Grammar, table: MaskTable) -> None:
        self.matcher, self.table = grammar.start(), table
        self.at: tuple[int, ...] = ()
        self.known: dict[tuple[int, ...], int] = {}

    begin = ()

    def step(self, position: tuple[int, ...], token: int) -> tuple[int, ...] | None:
        wanted = (*position, token)
        return wanted if wanted in self.known or self._go(wanted) else None

    def mask(self, position: tuple[int, ...]) -> int:
        row = self.known.get(position)
        if row is None:
            self._go(position)
            row = self.known[position] = self.table.new()
            self.matcher.fill_mask(self.table.words[row])
        return row

    def settle(self, position: tuple[int, ...]) -> tuple[int, ...]:
        self._go(position)
        self.at = ()
        self.known.clear()
        return ()

    def forced(self, position: tuple[int, ...], limit: int, bytewise: bool) -> list[int]:
        self._go(position)
        run = self.matcher.forced_tokens(limit)
        return self.matcher.grammar.vocabulary.bytewise(run)[:limit] if bytewise else run

    def _go(self, position: tuple[int, ...]) -> bool:
        """Brings the matcher to `position`, or as near as is legal."""
        common = 0
        for here, there in zip(self.at, position, strict=False):
            if here != there:
                break
            common += 1
        if len(self.at) > common:
            self.matcher.rollback(len(self.at) - common)
        taken = self.matcher.advance(position[common:])
        self.at = position[: common + taken]
        return len(self.at) == len(position)


class Guide:
    """Rows in their grammars, for one model of a call: the target, or a draft model that writes ahead of it.

    Attributes:
        texts: one per row. positions: where each row stands; None for rows that have ended.
        on_device: whether nothing here waits for the device.
    """

    on_device = False

    def __init__(self, texts: Sequence[Text], table: MaskTable, outer: Guide | None = None) -> None:
        self.texts, self.table, self.outer = texts, table, outer
        self.positions: list[Any] = [text.begin for text in texts]
        self._nodes: list[list[Any]] = []

    @staticmethod
    def of(grammars: Sequence[Grammar | None], vocabulary: int, device: torch.device) -> Guide:
        """A guide at the beginning of every row's text; None is a row that may write anything."""
        table = MaskTable(vocabulary, device)
        shifts: dict[int, int] = {}
        for grammar in grammars:
            if isinstance(grammar, Tabulated) and id(grammar) not in shifts:
                shifts[id(grammar)] = table.add(grammar.tables().masks)
        texts: list[Text] = []
        for grammar in grammars:
            if grammar is None:
                texts.append(FreeText())
            elif isinstance(grammar, Tabulated):
                texts.append(TabulatedText(grammar, shifts[id(grammar)]))
            else:
                texts.append(MatchedText(grammar, table))
        return Guide(texts, table)

    def ahead(self) -> Guide:
        """A guide for a draft model that writes ahead of this one's rows."""
        return Guide(self.texts, self.table, self)

    def follow(self) -> None:
        """Goes to where the rows are that this guide runs ahead of."""
        assert self.outer is not None, "the target's guide follows nobody"
        self.positions = list(self.outer.positions)

    def block(self, guesses: Tensor, shape: Topology | TreeTensors, depth: int | None = None) -> tuple[Tensor, Masks]:
        """What may follow every node of a block.

        Args:
            guesses: ``[B, N-1]`` int64. shape: who continues whom; it may have fewer nodes than the block.
            depth: bound of the tree's depth, if one is known. A guide on the device walks so far; the host sees for itself.

        Returns:
            the guesses, with -1 for those that are illegal after their parent, and masks for ``N`` nodes.
        """
        tokens, illegal = guesses.tolist(), False
        parents = parents_of(shape, len(self.texts))
        rows = [[FREE] * (len(tokens[0]) + 1) for _ in self.texts]
        for row, text in enumerate(self.texts):
            start, written, mask, above = self.positions[row], tokens[row], rows[row], parents[row]
            if start is None or isinstance(text, FreeText):
                continue
            reached = [start, *(None for _ in written)]
            mask[0] = text.mask(start)
            for node in range(1, len(above)):
                parent, token = above[node], written[node - 1]
                if parent < 0 or token < 0:
                    continue
                position = text.step(reached[parent], token) if reached[parent] is not None else None
                if position is None:
                    written[node - 1], illegal = -1, True
                else:
                    reached[node], mask[node] = position, text.mask(position)
        return torch.tensor(tokens, device=guesses.device) if illegal else guesses, self._masks(rows)

    def end(self) -> Masks:
        """What may follow every row, ``N`` is 1. The rows' ends become the roots of trees that :meth:`grow` continues."""
        self._nodes = [[position] for position in self.positions]
        return self._masks([[self._mask(row, position)] for row, position in enumerate(self.positions)])

    def grow(self, tokens: Tensor, parents: Tensor, before: int) -> Masks:
        """What may follow further nodes of the rows' trees.

        Args:
            tokens: ``[B, Q]`` int64. parents: ``[B, Q]`` int64, nodes in order of growth, 0 is the root. before: how many
                nodes there are already, the root included; any more are forgotten.
        """
        rows = []
        for row, (mine, above) in enumerate(zip(tokens.tolist(), parents.tolist(), strict=True)):
            reached, text = self._nodes[row], self.texts[row]
            del reached[before:]
            for token, parent in zip(mine, above, strict=True):
                start = reached[parent]
                reached.append(text.step(start, token) if start is not None and token >= 0 else None)
            rows.append([self._mask(row, position) for position in reached[-len(mine) :]])
        return self._masks(rows)

    def append(self, tokens: Tensor) -> None:
        """Every row has got one more token, ``[B]``."""
        self._go(tokens[:, None].tolist(), [1] * len(self.texts))

    def accept(self, out: StepOutput) -> None:
        """The rows have got what a step made of the last block."""
        self._go(out.new.tolist(), out.summary[0].tolist())

    def commit(self, new: Sequence[Sequence[int]], counts: Sequence[int], ended: Sequence[int]) -> None:
        """The rows have got more tokens, which stay: what was tried ahead of them is forgotten.

        Args:
            new: their tokens, of which the first ``counts[b]`` count. ended: rows that are through.

        Raises:
            GrammarError: a row has left its grammar.
        """
        self._go(new, counts)
        self.table.clear()
        for row, text in enumerate(self.texts):
            if ended[row]:
                self.positions[row] = None
            elif self.positions[row] is None:
                raise GrammarError(LIES.format(row=row))
            else:
                self.positions[row] = text.settle(self.positions[row])

    def forced(self, limit: int, bytewise: bool = False) -> Tensor:
        """``[B, K]`` int64, the tokens that must come next, -1 behind the last one; ``K`` is at most `limit`.

        As the tokenizer writes them, or `bytewise`: a token for each byte of these.
        """
        runs = [
            text.forced(position, limit, bytewise) if position is not None else []
            for text, position in zip(self.texts, self.positions, strict=True)
        ]
        longest = max(map(len, runs))
        padded = [run + [-1] * (longest - len(run)) for run in runs]
        return torch.tensor(padded, dtype=torch.int64, device=self.table.device).reshape(len(runs), longest)

    def _go(self, new: Sequence[Sequence[int]], counts: Sequence[int]) -> None:
        for row, tokens in enumerate(new):
            position = self.positions[row]
            for token in tokens[: counts[row]]:
                position = self.texts[row].step(position, token) if position is not None else None
            self.positions[row] = position

    def _mask(self, row: int, position: Any) -> int:
        return self.texts[row].mask(position) if position is not None else FREE

    def _masks(self, rows: list[list[int]]) -> Masks:
        return Masks(self.table.unpacked(rows))


def parents_of(shape: Topology | TreeTensors, rows: int) -> list[Sequence[int]]:
    """For every row the parents of its nodes; -1 for the root and for nodes that are never accepted."""
    if isinstance(shape, Topology):
        return [shape.parents] * rows
    index = torch.arange(len(shape), device=shape.parents.device)
    return torch.where(shape.candidates & (index > 0), shape.parents, -1).tolist()
