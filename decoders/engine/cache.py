"""The static slot cache: committed position ``p`` of a row lives in slot ``p``, tree node ``i`` in slot ``base + i``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from ..devices import host_reads


@dataclass(frozen=True)
class LayerSpec:
    """What one attention layer stores per token: head counts and widths of keys and values, dtype and device."""

    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device


class LayoutProbe(Cache):
    """A cache that stores nothing and notes what every layer asked it to store."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.layouts: dict[int, LayerSpec] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self.layouts[layer_idx] = LayerSpec(
            key_states.shape[1], key_states.shape[3], value_states.shape[1], value_states.shape[3],
            key_states.dtype, key_states.device,
        )  # fmt: skip
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


@dataclass
class CacheBuffers:
    """Keys and values of every layer: ``[B, heads, L, dim]`` each, ``L`` slots."""

    keys: list[Tensor]
    values: list[Tensor]

    @staticmethod
    def allocate(layout: list[LayerSpec], rows: int, slots: int) -> CacheBuffers:
        return CacheBuffers(
            [torch.zeros(rows, s.key_heads, slots, s.key_dim, dtype=s.dtype, device=s.device) for s in layout],
            [torch.zeros(rows, s.value_heads, slots, s.value_dim, dtype=s.dtype, device=s.device) for s in layout],
        )

    def enlarged(self, slots: int) -> CacheBuffers:
        """The same keys and values with room for `slots` tokens."""

        def wider(buffer: Tensor) -> Tensor:
            wide = buffer.new_zeros(*buffer.shape[:2], slots, buffer.shape[3])
            wide[:, :, : buffer.shape[2]] = buffer
            return wide

        return CacheBuffers([wider(t) for t in self.keys], [wider(t) for t in self.values])

    def of_row(self, row: int, count: int) -> CacheBuffers:
        """A copy of the first `count` slots of a row."""
        return CacheBuffers(
            [t[row : row + 1, :, :count].clone() for t in self.keys],
            [t[row : row + 1, :, :count].clone() for t in self.values],
        )

    def copy_row(self, row: int, source: CacheBuffers, source_row: int, count: int) -> None:
        """The first `count` slots of a row of `source` become those of `row`."""
        for own, other in zip(self.keys + self.values, source.keys + source.values, strict=True):
            own[row, :, :count] = other[source_row, :, :count]

    @property
    def slots(self) -> int:
        return self.keys[0].shape[2]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.keys + self.values)


class SlotCache(Cache):
    """transformers' cache interface over :class:`CacheBuffers` for one forward pass.

    Args:
        buffers: where keys and values live; written in place.
        slots: ``[B, N]`` int64, the slot of each of the ``N`` tokens of this pass.
        view: attention sees slots ``0 … view-1``, so that its cost follows the current length, not the capacity.
    """

    def __init__(self, buffers: CacheBuffers, slots: Tensor, view: int) -> None:
        super().__init__(layers=[])
        self.buffers, self.slots, self.view = buffers, slots, view

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        keys, values = self.buffers.keys[layer_idx], self.buffers.values[layer_idx]
        write_slots(keys, self.slots, key_states)
        write_slots(values, self.slots, value_states)
        return keys[:, :, : self.view], values[:, :, : self.view]

    # Models ask these to number positions themselves; the loop always passes explicit positions and a ready mask.
    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.view, 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0


def write_slots(buffer: Tensor, slots: Tensor, states: Tensor) -> None:
    """``buffer[b, :, slots[b, n]] = states[b, :, n]`` in place; buffer ``[B, h, L, d]``, slots ``[B, N]``, states ``[B, h, N, d]``."""
    # index_put, not scatter: inductor writes the former in place and copies the whole buffer for the latter.
    rows = torch.arange(buffer.shape[0], device=buffer.device)[:, None]
    buffer[rows, :, slots] = states.transpose(1, 2).to(buffer.dtype)


def move_slots(buffers: CacheBuffers, base: Tensor, path: Tensor) -> None:
    """Copies slot ``base[b] + path[b, n]`` to ``base[b] + n`` in every layer; all reads come before all writes.

    Args:
        base: ``[B]`` int64.
        path: ``[B, N]`` int64.
    """
    index = torch.arange(path.shape[1], device=path.device)
    if host_reads(path):  # elsewhere to look would be to wait
        moved = (path != index).any(0).nonzero()
        if not len(moved):
            return
        first, last = int(moved[0]), int(moved[-1]) + 1
        path, index = path[:, first:last], index[first:last]
    rows = torch.arange(path.shape[0], device=path.device)[:, None]
    source, target = base[:, None] + path, base[:, None] + index
    for buffer in (*buffers.keys, *buffers.values):
        buffer[rows, :, target] = buffer[rows, :, source]
