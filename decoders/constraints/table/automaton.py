"""A compiled language: the arrays that are kept, on disk and on devices."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..base import Tables
from .masks import Masks


@dataclass(frozen=True)
class Automaton:
    """Tables, and what the tensors of the step do not need.

    Attributes:
        tables: see there; the last state is that after a stop token.
        accepting: ``[S]`` bool.
    """

    tables: Tables
    accepting: Tensor

    @staticmethod
    def of(
        after: NDArray[np.int32], kind: NDArray[np.int64], accepting: NDArray[np.bool_], start: int, masks: Masks
    ) -> Automaton:
        """From arrays ``[S, C]``, ``[256]``, ``[S]``; adds the state after a stop token."""
        states = len(after)
        next = torch.cat([torch.from_numpy(after), torch.zeros(1, after.shape[1], dtype=torch.int32)])
        of = torch.cat([torch.from_numpy(masks.of), torch.tensor([masks.stops])])
        tables = Tables(next, torch.from_numpy(kind), of, torch.from_numpy(masks.rows), start=start, stopped=states)
        return Automaton(tables, torch.cat([torch.from_numpy(accepting), torch.ones(1, dtype=torch.bool)]))

    def with_masks(self, masks: Tensor, mask_of: Tensor) -> Automaton:
        """The same automaton with other masks ``[R, W]``, ``[S]``."""
        return replace(self, tables=replace(self.tables, masks=masks, mask_of=mask_of))
