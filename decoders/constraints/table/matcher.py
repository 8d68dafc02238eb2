"""A position in a text of a regular language: the states that led to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from ..base import Matcher

if TYPE_CHECKING:
    from .grammar import TableGrammar


class TableMatcher(Matcher):
    """A stack of states, one per token taken; rolling back is popping."""

    def __init__(self, grammar: TableGrammar, state: int) -> None:
        self.grammar: TableGrammar = grammar
        self._states = [state]

    @property
    def state(self) -> int:
        """Row of the grammar's tables."""
        return self._states[-1]

    @property
    def accepting(self) -> bool:
        return self.grammar.accepting[self.state]

    def advance(self, tokens: Sequence[int]) -> int:
        states, step = self._states, self.grammar.step
        for count, token in enumerate(tokens):
            after = step(states[-1], token)
            if not after:
                return count
            states.append(after)
        return len(tokens)

    def rollback(self, count: int) -> None:
        if not 0 <= count < len(self._states):
            raise ValueError(f"cannot roll back {count} tokens: {len(self._states) - 1} have been taken")
        del self._states[len(self._states) - count :]

    def fill_mask(self, out: Tensor) -> None:
        grammar = self.grammar
        grammar.rows.fill(grammar.mask_rows[self.state], out)

    def forced_bytes(self) -> bytes:
        return self.grammar.forced_bytes(self.state)
