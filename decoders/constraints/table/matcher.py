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

    @property
    def stopped(self) -> bool:
        return self.state == self.grammar.stopped

    def fork(self) -> TableMatcher:
        return TableMatcher(self.grammar, self.state)

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

    def validate(self, tokens: Sequence[int]) -> int:
        return self.fork().advance(tokens)

    def fill_mask(self, out: Tensor) -> None:
        grammar = self.grammar
        grammar.rows.fill(grammar.mask_rows[self.state], out)

    def fill_tree(self, parents: Sequence[int], tokens: Sequence[int], out: Tensor) -> list[bool]:
        grammar = self.grammar
        states = grammar.walk(parents, tokens, self.state)
        number = grammar.mask_rows
        # The dead state's mask is ones, as that of a node without a meaning should be.
        grammar.rows.stack([number[state] for state in states], out)
        return [state > 0 for state in states]

    def forced_bytes(self) -> bytes:
        return self.grammar.forced_bytes(self.state)
