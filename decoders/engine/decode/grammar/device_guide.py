"""The guide on the device, for grammars that have transition tables. It never waits for the device, so steps can be recorded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ....constraints import CompiledGrammar, Tabulated, TokenTable, mask_words, unpack
from ....errors import GrammarError
from ....sampling.processors import Masks
from ....strategy import Sequences
from ....tree import Topology, TreeTensors
from ..core import StepOutput
from ..verify import Outcome
from .guide import MASK_MISMATCH, Guide
from .history import DeviceHistory, spell

#: Position after an illegal token. Every token leads back to it.
DEAD = 0


@dataclass(frozen=True)
class DeviceAutomaton:
    """The grammars of a call as one transition table. A position is the index of a state's first entry in the table.

    Attributes:
        entries: 1-D int64; for every state its number, then the next position for each column. Tokens share a column
            if, from every state, they all lead to the same next state.
        free: position of rows without a grammar: every column leads back to it.
        first: ``[B]`` int64, each row's position before its first generated token.
        columns: ``[G, V]`` int64, column of each token in each of the ``G`` grammars, as an offset from a state's position.
        grammar: ``[B]`` int64, index of each row's grammar in `columns`.
        mask_of: ``[S]`` int64, for each of the ``S`` states the index of its mask in `masks`.
        masks: ``[R, W]`` int32, ``R`` packed masks of ``W`` words. Mask 0, of the dead and the free state, allows all tokens.
        tables: the grammars and their tables, in the order of their states, which come after the dead and the free state.
    """

    entries: Tensor
    free: int
    first: Tensor
    columns: Tensor
    grammar: Tensor
    mask_of: Tensor
    masks: Tensor
    tables: list[tuple[Tabulated, TokenTable]]

    @staticmethod
    def of(grammars: Sequence[Tabulated | None], vocabulary: int, device: torch.device) -> DeviceAutomaton | None:
        """Builds the transition table of the rows' grammars; None if a grammar's table would be too large."""
        distinct = list({id(g): g for g in grammars if g is not None}.values())
        tables = [(grammar, TokenTable.of(grammar, device)) for grammar in distinct]
        tabulated = [(grammar, table) for grammar, table in tables if table is not None]
        if len(tabulated) < len(tables):
            return None
        wide = 1 + max((table.next.shape[1] for _, table in tabulated), default=1)
        free = wide  # the entries before it belong to the dead state, which has as many columns as the widest grammar
        entries = [torch.zeros(wide, dtype=torch.int64, device="cpu"), torch.full((wide,), free, device="cpu")]
        entries[1][0] = 1
        columns = [torch.ones(vocabulary, dtype=torch.int64, device="cpu")]
        mask_of, masks = (
            [torch.zeros(2, dtype=torch.int64, device="cpu")],
            [torch.full((1, mask_words(vocabulary)), -1, device="cpu").int()],
        )
        position, states, rows, begins = 2 * wide, 2, 1, {}
        for place, (grammar, table) in enumerate(tabulated, start=1):
            own, width = grammar.tables(), table.next.shape[1] + 1
            leads = torch.where(table.next > 0, position + table.next * width, DEAD)
            number = torch.arange(states, states + len(leads), device=device)
            entries.append(torch.cat([number[:, None], leads], dim=1).flatten())
            columns.append(table.columns + 1)
            mask_of.append(own.mask_of + rows)
            masks.append(own.masks)
            begins[id(grammar)] = (place, position + grammar.first * width)
            position, states, rows = position + len(entries[-1]), states + len(leads), rows + len(own.masks)
        starts = [begins[id(grammar)] if grammar is not None else (0, free) for grammar in grammars]
        joined = (torch.cat([part.to(device) for part in parts]) for parts in (entries, mask_of, masks))
        entry, mask, words = joined
        grammar_of, first = torch.tensor(starts, device=device).reshape(-1, 2).unbind(1)
        stacked = torch.stack([part.to(device) for part in columns])
        return DeviceAutomaton(entry, free, first, stacked, grammar_of, mask, words, tabulated)

    def column(self, tokens: Tensor) -> Tensor:
        """``[B, n]``: the columns of `tokens` ``[B, n]`` in their rows' grammars. For negative tokens the column is arbitrary."""
        return self.columns[self.grammar[:, None], tokens.clamp(min=0)]

    @cached_property
    def forced(self) -> tuple[Tensor, Tensor, Tensor]:
        """The arguments `room`, `byte` and `canonical` of :func:`~decoders.engine.decode.grammar.history.spell`."""
        nothing = torch.tensor([[0, -1, -1]] * 2, device="cpu")
        parts = [table.forced(grammar) for grammar, table in self.tables]
        room, byte, canonical = torch.cat([nothing, *parts]).to(self.entries.device).unbind(1)
        return room, byte, canonical


class DeviceGuide(Guide):
    """The guide of rows whose grammars have tables.

    Attributes:
        positions: ``[B]`` int64, the rows' positions, updated in place: :data:`DEAD` after an illegal token,
            :attr:`DeviceAutomaton.free` in rows that have ended or have no grammar.
    """

    on_device = True

    def __init__(self, automaton: DeviceAutomaton, vocabulary: int, speller: Callable[..., Tensor]) -> None:
        self.automaton, self.vocabulary, self.speller = automaton, vocabulary, speller
        self.outer: DeviceGuide | None = None
        self.positions = automaton.first.clone()
        self._lost = torch.zeros_like(self.positions, dtype=torch.bool)
        self._nodes = self.positions[:, None]
        self._history: DeviceHistory | None = None

    @staticmethod
    def of(
        grammars: Sequence[CompiledGrammar | None],
        vocabulary: int,
        device: torch.device,
        compile: Callable[[Callable], Callable] = lambda function: function,
    ) -> DeviceGuide | None:
        """A guide for rows without any text yet; None if a grammar has no table, or a table is too large.

        compile: compiles :func:`~decoders.engine.decode.grammar.history.spell`.
        """
        tabulated = [grammar for grammar in grammars if grammar is None or isinstance(grammar, Tabulated)]
        automaton = DeviceAutomaton.of(tabulated, vocabulary, device) if len(tabulated) == len(grammars) else None
        return DeviceGuide(automaton, vocabulary, compile(spell)) if automaton is not None else None

    def static_parts(self) -> dict[str, Any]:
        """The objects that a recorded step reads and writes. It must not write to the grammars' tables, which several calls share."""
        automaton, history = self.automaton, self._history
        spelling = vars(automaton).get("forced") if history is not None else None
        return dict(
            positions=self.positions, lost=self._lost, entries=automaton.entries, first=automaton.first,
            columns=automaton.columns, grammar=automaton.grammar, mask_of=automaton.mask_of, masks=automaton.masks,
            free=automaton.free, grammars=len(automaton.tables), vocabulary=self.vocabulary, speller=self.speller,
            spelling=spelling, history=history.tensors if history is not None else None, follows=self.outer is not None,
        )  # fmt: skip

    def ahead(self) -> DeviceGuide:
        guide = DeviceGuide(self.automaton, self.vocabulary, self.speller)
        guide.outer = self
        return guide

    def follow(self) -> None:
        assert self.outer is not None, "the target's guide follows no other"
        self.positions.copy_(self.outer.positions)

    def block(
        self, draft_tokens: Tensor, shape: Topology | TreeTensors, depth: int | None = None
    ) -> tuple[Tensor, Masks]:
        tree, automaton = shape.padded(draft_tokens.shape[1] + 1), self.automaton
        if isinstance(tree, Topology):
            tree = tree.tensors(len(draft_tokens), draft_tokens.device)
        tokens = torch.nn.functional.pad(draft_tokens, (1, 0), value=-1)  # the root has no draft token
        drafted = tree.candidates & (tokens >= 0)
        column, roots = automaton.column(tokens), self._roots(len(tree))
        reached = roots
        for _ in range(len(tree) - 1 if depth is None else depth):
            after = automaton.entries[reached.gather(1, tree.parents) + column]
            reached = torch.where(drafted, after, roots)
        self._nodes = reached
        return torch.where(drafted & (reached == DEAD), -1, tokens)[:, 1:], self._masks(reached)

    def end(self) -> Masks:
        self._nodes = self.positions[:, None].clone()
        return self._masks(self._nodes)

    def expand(self, tokens: Tensor, parents: Tensor, before: int) -> Masks:
        above = self._nodes[:, :before]
        after = self.automaton.entries[above.gather(1, parents) + self.automaton.column(tokens)]
        new = torch.where(tokens >= 0, after, self._roots(tokens.shape[1] + 1)[:, 1:])
        self._nodes = torch.cat([above, new], dim=1)
        return self._masks(new)

    def append(self, tokens: Tensor) -> None:
        after = self.automaton.entries[self.positions + self.automaton.column(tokens[:, None])[:, 0]]
        self.positions.copy_(after)

    def accept(self, out: StepOutput) -> None:
        # The position of the deepest accepted node is known from the block; only the token after that node is new.
        last = (out.summary[0] - 1).clamp(min=0)[:, None]
        reached = self._nodes.gather(1, out.path.gather(1, last))
        after = self.automaton.entries[reached + self.automaton.column(out.new.gather(1, last))]
        self.positions.copy_(torch.where(out.summary[0] > 0, after[:, 0], self.positions))

    def commit(self, out: StepOutput, ended: Tensor, outcome: Outcome | None = None) -> None:
        self.accept(out)
        self._lost.logical_or_((self.positions == DEAD) & ~ended)
        self.positions.masked_fill_(ended, self.automaton.free)

    def check(self) -> None:
        lost = self._lost.tolist()
        if any(lost):
            raise GrammarError(MASK_MISMATCH.format(row=lost.index(True)))

    def forced(self, sequences: Sequences, limit: int) -> Tensor:
        automaton = self.automaton
        if not automaton.tables:
            return torch.full((len(self.positions), limit), -1, device=self.positions.device)
        self.expect(sequences)
        assert self._history is not None
        self._history.read(sequences)
        return self.speller(
            limit, self.positions, sequences.last[:, 0], self._history.after, self._history.begun, self._history.sizes,
            automaton.columns, automaton.grammar, automaton.entries, *automaton.forced,
        )  # fmt: skip

    def expect(self, sequences: Sequences) -> None:
        if self._history is None and self.automaton.tables:
            vocabulary = self.automaton.tables[0][0].vocabulary
            self._history = DeviceHistory(len(self.positions), vocabulary, self.positions.device)
            self._history.read(sequences)
            _ = self.automaton.forced

    def _roots(self, nodes: int) -> Tensor:
        """Positions ``[B, nodes]`` without a draft: at node 0 the row's; else ``free`` in rows at ``free``, :data:`DEAD` in others."""
        free = torch.where(self.positions == self.automaton.free, self.positions, DEAD)
        return torch.cat([self.positions[:, None], free[:, None].expand(-1, nodes - 1)], dim=1)

    def _masks(self, positions: Tensor) -> Masks:
        rows = self.automaton.mask_of[self.automaton.entries[positions]]
        return Masks(unpack(self.automaton.masks[rows], self.vocabulary))
