"""A compiled language as arrays: the automaton and its masks."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from ..base import Tables
from .masks import StateMasks
from .rows import MaskRows


@dataclass(frozen=True)
class MaskedAutomaton:
    """A byte automaton with a mask for each state; :class:`Tables` are made of it.

    Attributes:
        next: ``[S, C]`` int32.
        classes: ``[256]`` int64.
        mask_of: ``[S]`` int64.
        start: see :class:`Tables`.
        stopped: likewise; it is the last state.
        rows: the masks.
        accepting: ``[S]`` bool.
    """

    next: NDArray[np.int32]
    classes: NDArray[np.int64]
    mask_of: NDArray[np.int64]
    rows: MaskRows
    accepting: NDArray[np.bool_]
    start: int
    stopped: int

    @staticmethod
    def of(
        transitions: NDArray[np.int32],
        byte_class: NDArray[np.int64],
        accepting: NDArray[np.bool_],
        start: int,
        masks: StateMasks,
    ) -> MaskedAutomaton:
        """From arrays ``[S, C]``, ``[256]``, ``[S]``; adds the state after a stop token."""
        next = np.concatenate([transitions, np.zeros((1, transitions.shape[1]), np.int32)])
        mask_of = np.concatenate([masks.of, [masks.stops]])
        return MaskedAutomaton(
            next, byte_class, mask_of, masks.rows, np.concatenate([accepting, [True]]), start, len(transitions)
        )

    @property
    def nbytes(self) -> int:
        """Memory of all arrays."""
        return sum(part.nbytes for part in (self.next, self.classes, self.mask_of, self.rows, self.accepting))

    def tables(self) -> Tables:
        """The automaton as tensors; the masks are expanded anew by each call."""
        next, classes, mask_of = map(torch.from_numpy, (self.next, self.classes, self.mask_of))
        return Tables(next, classes, mask_of, self.rows.all(), start=self.start, stopped=self.stopped)

    def with_masks(self, rows: MaskRows, mask_of: NDArray[np.int64]) -> MaskedAutomaton:
        """The same automaton with other masks."""
        return replace(self, rows=rows, mask_of=mask_of)
