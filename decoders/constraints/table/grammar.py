"""A regular language compiled for a vocabulary: its tables, and the steps that were asked for, remembered."""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ..base import Language, Policy, Tables, Tabulated
from ..vocabulary import Vocabulary
from .automaton import MaskedAutomaton
from .matcher import TableMatcher
from .rows import MaskRows, Row
from .serialize import dumped

#: Steps (a state and a token) that are remembered: about 10 MB.
STEPS = 1 << 17


class TableGrammar(Tabulated):
    """Immutable apart from its cache of steps. A state is a number, 0 the illegal one."""

    backend = "table"

    def __init__(self, language: Language, vocabulary: Vocabulary, policy: Policy, automaton: MaskedAutomaton) -> None:
        """`automaton` has the masks of the policy ``full``."""
        self.language, self.vocabulary, self.policy = language, vocabulary, policy
        self.first, self.stopped = automaton.start, automaton.stopped
        self.accepting: list[bool] = automaton.accepting.tolist()
        self._after = automaton.next.reshape(-1).data
        self._kind = bytes(automaton.classes.tolist())
        self._classes = automaton.next.shape[1]
        self._forced: dict[int, bytes] = {0: b"", self.stopped: b""}
        self.automaton = automaton
        if policy == "canonical":
            self.automaton = automaton.with_masks(*self._canonical(automaton))
        self.rows = self.automaton.rows
        self.mask_rows: list[int] = self.automaton.mask_of.tolist()
        self._stops = frozenset(vocabulary.stops)
        self._steps: list[dict[int, int]] = [{} for _ in self.mask_rows]
        self._remembered = 0

    def start(self) -> TableMatcher:
        return TableMatcher(self, self.first)

    @property
    def nbytes(self) -> int:
        return self.automaton.nbytes

    def tables(self) -> Tables:
        return self.automaton.tables()

    def dump(self) -> bytes:
        return dumped(self.automaton)

    def step(self, state: int, token: int) -> int:
        """The state after a token; 0 if it is illegal, as everything is after that."""
        remembered = self._steps[state]
        after = remembered.get(token)
        if after is None:
            after = self._walk(state, token)
            if self._remembered >= STEPS:
                self._steps = [{} for _ in self._steps]
                self._remembered = 0
            self._steps[state][token] = after
            self._remembered += 1
        return after

    def forced_bytes(self, state: int) -> bytes:
        """The bytes that every text continues with."""
        text = self._forced.get(state)
        if text is None:
            forced, position = bytearray(), state
            while not self.accepting[position] and (byte := self._forced_byte[position]) >= 0:
                forced.append(byte)
                position = self._after[position * self._classes + self._kind[byte]]
            text = self._forced[state] = bytes(forced)
        return text

    def _walk(self, state: int, token: int) -> int:
        """The state after the bytes of a token, if the mask allows it."""
        if not state or state == self.stopped or not 0 <= token < len(self.vocabulary):
            return 0
        if not self.rows.each[self.mask_rows[state]].allows(token):
            return 0
        if token in self._stops:
            return self.stopped
        for byte in self.vocabulary.tokens[token] or b"":
            state = self._after[state * self._classes + self._kind[byte]]
        return state

    @cached_property
    def _forced_byte(self) -> list[int]:
        """``[S]``: the only byte that may follow each state; -1 if there are several, or none."""
        bytes_of: list[list[int]] = [[] for _ in range(self._classes)]
        for byte, kind in enumerate(self._kind):
            bytes_of[kind].append(byte)
        forced = []
        for row in self.automaton.next.tolist():
            kinds = [kind for kind, after in enumerate(row) if after]
            single = len(kinds) == 1 and len(bytes_of[kinds[0]]) == 1
            forced.append(bytes_of[kinds[0]][0] if single else -1)
        return forced

    def _canonical(self, automaton: MaskedAutomaton) -> tuple[MaskRows, NDArray[np.int64]]:
        """The masks of the policy ``canonical``, and the row of each state: one token where bytes are forced, the tokenizer's own."""
        rows: dict[int, int] = {}
        of = automaton.mask_of.copy()
        for state in range(1, self.stopped):
            first = self.vocabulary.canonical(self.forced_bytes(state))[:1]
            if first:
                of[state] = rows.setdefault(first[0], len(automaton.rows) + len(rows))
        rows_of_masks = [*automaton.rows.each]
        for token in rows:
            mask = np.zeros(automaton.rows.width, np.uint32)
            mask[token >> 5] = 1 << (token & 31)
            rows_of_masks.append(Row.of(mask.view(np.int32)))
        used, numbers = np.unique(of, return_inverse=True)
        return MaskRows(automaton.rows.width, [rows_of_masks[number] for number in used.tolist()]), numbers
