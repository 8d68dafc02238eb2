"""The guide on the host: tracks a row's position in its grammar by state numbers, or by a matcher that can roll back. Masks are stored
packed in the rows of a table, and unpacked for the step (:class:`~decoders.sampling.processors.Masks`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ....constraints import CompiledGrammar, Tabulated, pack
from ....errors import GrammarError
from ....sampling.processors import Masks
from ....strategy import Sequences
from ....tree import Topology, TreeTensors, parents_by_row
from ..core import StepOutput
from ..verify import Outcome
from .guide import MASK_MISMATCH, NOTHING_ALLOWED, Guide
from .history import HostHistory
from .texts import FREE, FreeText, MaskTable, MatchedText, TabulatedText, Text


class HostGuide(Guide):
    """A guide for any grammars, on the host.

    Attributes:
        texts: each row's grammar, as a :class:`~decoders.engine.decode.grammar.texts.Text`.
        positions: each row's position in its grammar; None for rows that have ended or left their grammar.
        shared: whether rows belong to several requests. If so, an error of a row's grammar ends only that row.
        faults: by row, the error of its grammar. A row with an error continues without a grammar until its request is removed.
    """

    on_device = False

    def __init__(
        self, texts: Sequence[Text], table: MaskTable, outer: HostGuide | None = None, shared: bool = False
    ) -> None:
        self.texts, self.table, self.outer, self.shared = list(texts), table, outer, shared
        self.faults: dict[int, GrammarError] = {}
        if outer is not None:
            self.texts, self.faults, self.shared = outer.texts, outer.faults, outer.shared
        # The grammars whose masks are in the table: id() of the grammar → the grammar, and the table row of its first mask.
        self._in_table: dict[int, tuple[Tabulated, int]] = {}
        self.positions: list[Any] = [text.begin for text in texts]
        self._nodes: list[list[Any]] = []
        self._history = [HostHistory() for _ in texts]

    @staticmethod
    def of(
        grammars: Sequence[CompiledGrammar | None], vocabulary: int, device: torch.device, shared: bool = False
    ) -> HostGuide:
        """A guide for rows without any text yet. grammars: one per row; None for a row without a grammar."""
        guide = HostGuide([], MaskTable(vocabulary, device), shared=shared)
        return guide.rebatch([-1] * len(grammars), grammars)

    def rebatch(self, rows: Sequence[int], grammars: Sequence[CompiledGrammar | None]) -> HostGuide:
        """A guide for the batch after rows have joined or left. rows: the former index of each row, -1 for a new row without text.

        The masks of a grammar with tables stay in the mask table, even after the grammar's last row has left.
        """
        guide = HostGuide([], self.table, shared=self.shared)
        guide._in_table = self._in_table
        guide.texts = [
            self.texts[row] if row >= 0 else guide._text(grammar) for row, grammar in zip(rows, grammars, strict=True)
        ]
        guide.positions = [
            self.positions[row] if row >= 0 else text.begin for row, text in zip(rows, guide.texts, strict=True)
        ]
        guide._history = [self._history[row] if row >= 0 else HostHistory() for row in rows]
        return guide

    def _text(self, grammar: CompiledGrammar | None) -> Text:
        if grammar is None:
            return FreeText()
        if not isinstance(grammar, Tabulated):
            return MatchedText(grammar, self.table)
        if id(grammar) not in self._in_table:
            self._in_table[id(grammar)] = grammar, self.table.add(grammar.tables().masks)
        return TabulatedText(*self._in_table[id(grammar)])

    def ahead(self) -> HostGuide:
        return HostGuide(self.texts, self.table, self)

    def follow(self) -> None:
        assert self.outer is not None, "the target's guide follows no other"
        self.positions = list(self.outer.positions)

    def block(
        self, draft_tokens: Tensor, shape: Topology | TreeTensors, depth: int | None = None
    ) -> tuple[Tensor, Masks]:
        tokens, illegal = draft_tokens.tolist(), False
        parents = parents_by_row(shape, len(self.texts))
        rows = [[FREE] * (len(tokens[0]) + 1) for _ in self.texts]
        kinds = [[0] * (len(tokens[0]) + 1) for _ in self.texts]
        for row, text in enumerate(self.texts):
            start, written, mask, kind, above = self.positions[row], tokens[row], rows[row], kinds[row], parents[row]
            if start is None or isinstance(text, FreeText):
                continue
            reached = [start, *(None for _ in written)]
            with self._of_row(row):
                mask[0], kind[0] = text.mask(start), text.kind(start)
                if self.table.empty(mask[0]):
                    raise GrammarError(NOTHING_ALLOWED.format(row=row))
                for node in range(1, len(above)):
                    parent, token = above[node], written[node - 1]
                    if parent < 0 or token < 0:
                        continue
                    position = text.step(reached[parent], token) if reached[parent] is not None else None
                    if position is None:
                        written[node - 1], illegal = -1, True
                    else:
                        reached[node], mask[node], kind[node] = position, text.mask(position), text.kind(position)
            if row in self.faults:
                rows[row], kinds[row] = [self._ending(text)] * len(mask), [0] * len(mask)
        legal = torch.tensor(tokens, device=draft_tokens.device) if illegal else draft_tokens
        return legal, Masks(self.table.unpacked(rows), self.table.replacements(kinds))

    def end(self) -> Masks:
        self._nodes = [[position] for position in self.positions]
        return self._masks([[self._mask(row, position)] for row, position in enumerate(self.positions)])

    def expand(self, tokens: Tensor, parents: Tensor, before: int) -> Masks:
        rows = []
        for row, (new, above) in enumerate(zip(tokens.tolist(), parents.tolist(), strict=True)):
            reached, text = self._nodes[row], self.texts[row]
            del reached[before:]
            for token, parent in zip(new, above, strict=True):
                start, position = reached[parent], None
                with self._of_row(row):
                    position = text.step(start, token) if start is not None and token >= 0 else None
                reached.append(position)
            rows.append([self._mask(row, position) for position in reached[-len(new) :]])
        return self._masks(rows)

    def append(self, tokens: Tensor) -> None:
        self._advance(tokens[:, None].tolist(), [1] * len(self.texts))

    def accept(self, out: StepOutput) -> None:
        self._advance(out.new.tolist(), out.summary[0].tolist())

    def commit(self, out: StepOutput, ended: Tensor, outcome: Outcome | None = None) -> None:
        if outcome is None:
            self.accept(out)
            has_ended = ended.tolist()
        else:
            self._advance(outcome.new, outcome.emitted)
            has_ended = outcome.ended + [1] * (len(self.texts) - len(outcome.ended))
        self.table.clear()
        for row, text in enumerate(self.texts):
            if has_ended[row]:
                self.positions[row] = None
                continue
            with self._of_row(row):
                if self.positions[row] is None:
                    raise GrammarError(MASK_MISMATCH.format(row=row))
                self.positions[row] = text.settle(self.positions[row])

    def check(self) -> None:
        """Does nothing, because :meth:`commit` raises the error of a row that leaves its grammar."""

    def forced(self, sequences: Sequences, limit: int) -> Tensor:
        runs, lengths = [], sequences.length.tolist()
        for row, (text, position) in enumerate(zip(self.texts, self.positions, strict=True)):
            run: list[int] = []
            with self._of_row(row):
                run = self._spelled(row, text, position, sequences.tokens[row], lengths[row], limit)
            runs.append(run)
        longest = max(map(len, runs))
        padded = [run + [-1] * (longest - len(run)) for run in runs]
        return torch.tensor(padded, dtype=torch.int64, device=self.table.device).reshape(len(runs), longest)

    def _spelled(self, row: int, text: Text, position: Any, tokens: Tensor, length: int, limit: int) -> list[int]:
        grammar = text.grammar
        if grammar is None or position is None:
            return []
        self._history[row].read(tokens, length, grammar.vocabulary)
        if (run := text.forced_tokens(position, limit)) is not None:
            return run
        return self._history[row].spell(text.forced_bytes(position), grammar.vocabulary, grammar.policy, limit)

    def _advance(self, new: Sequence[Sequence[int]], counts: Sequence[int]) -> None:
        for row, tokens in enumerate(new):
            position = self.positions[row]
            with self._of_row(row):
                for token in tokens[: counts[row]]:
                    position = self.texts[row].step(position, token) if position is not None else None
                self.positions[row] = position

    @contextmanager
    def _of_row(self, row: int) -> Iterator[None]:
        """Wraps uses of a row's grammar. If rows belong to several requests, stores the grammar's error in :attr:`faults`."""
        try:
            yield
        except GrammarError as error:
            if not self.shared:
                raise
            self.faults.setdefault(row, error)
            self.texts[row], self.positions[row] = FreeText(), FreeText.begin

    def _ending(self, text: Text) -> int:
        """Adds a mask that allows only stop tokens, for a row whose grammar has failed. Returns the mask's table row."""
        row = self.table.new()
        allowed = torch.zeros(self.table.vocabulary, dtype=torch.bool, device="cpu")
        allowed[list(text.grammar.vocabulary.stops) if text.grammar is not None else []] = True
        self.table.words[row] = pack(allowed)
        return row

    def _mask(self, row: int, position: Any) -> int:
        mask = FREE
        with self._of_row(row):
            mask = self.texts[row].mask(position) if position is not None else FREE
        return mask

    def _masks(self, rows: list[list[int]]) -> Masks:
        return Masks(self.table.unpacked(rows))
