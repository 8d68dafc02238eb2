"""The recurrent states of rows (:mod:`.recurrent`). They are part of the KV cache, but have no slots."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class StateSpec:
    """A recurrent state of a layer. Its size per row is fixed.

    Attributes:
        part: the attribute of transformers' ``LinearAttentionLayer`` that holds the state.
        index: the index of the state in this attribute.
        shape: the shape for one row.
    """

    part: Literal["conv_states", "recurrent_states"]
    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass
class RowStates:
    """The recurrent states of rows after the first `reached` tokens of each row. They cannot be rolled back.

    Attributes:
        layers: per layer, its states ``[B, …]``.
        reached: ``[B]`` int64, number of tokens that each row's states have processed.
        nodes: by layer, the states after each node of the last block, ``[B, N+1, …]``; the last entry is the state before the block.
            Empty after :meth:`commit`.
    """

    layers: list[list[Tensor]]
    reached: Tensor
    nodes: dict[int, list[Tensor]] = field(default_factory=dict)

    @staticmethod
    def allocate(layers: list[tuple[StateSpec, ...]], rows: int) -> RowStates:
        zeros = [[torch.zeros(rows, *s.shape, dtype=s.dtype, device=s.device) for s in specs] for specs in layers]
        device = next(state.device for states in zeros for state in states)
        return RowStates(zeros, torch.zeros(rows, dtype=torch.int64, device=device))

    def of_row(self, row: int) -> RowStates:
        """A copy of the states of one row."""
        part = self.of_rows(row, row + 1)
        return RowStates([[state.clone() for state in states] for states in part.layers], part.reached.clone())

    def of_rows(self, begin: int, end: int) -> RowStates:
        """The states of the rows from `begin` to `end`, as views."""
        return RowStates([[state[begin:end] for state in states] for states in self.layers], self.reached[begin:end])

    def copy_row(self, row: int, source: RowStates, source_row: int) -> None:
        for own, others in zip(self.layers, source.layers, strict=True):
            for state, other in zip(own, others, strict=True):
                state[row] = other[source_row]
        self.reached[row] = source.reached[source_row]

    def commit(self, path: Tensor, emitted: Tensor, length: Tensor) -> None:
        """Sets each row's states to the states after its last accepted node.

        Args:
            path: ``[B, N]`` int64, the accepted nodes.
            emitted: ``[B]`` int64, the number of new tokens; a row without new tokens keeps its states.
            length: ``[B]`` int64, number of tokens of every row, new tokens included.
        """
        last = path.gather(1, (emitted - 1).clamp(min=0)[:, None])[:, 0]
        row = torch.arange(len(last), device=last.device)
        for layer, after in self.nodes.items():
            for state, nodes in zip(self.layers[layer], after, strict=True):
                state.copy_(nodes[row, torch.where(emitted > 0, last, nodes.shape[1] - 1)])
        self.reached.copy_(torch.where(emitted > 0, length - 1, self.reached))
        self.nodes.clear()

    @property
    def nbytes(self) -> int:
        return sum(state.nbytes for states in self.layers for state in states)
