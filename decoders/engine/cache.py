"""The static slot cache: committed position ``p`` of a row lives in slot ``p``, tree node ``i`` in slot ``base + i``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from ..devices import host_reads


@dataclass(frozen=True)
class LayerSpec:
    """What one attention layer stores per token.

    Attributes:
        key_heads, key_dim, value_heads, value_dim: head counts and widths of keys and values.
        dtype, device: of what the layer computes.
        quantized: whether keys and values are kept as int8, with a scale of `dtype` per head and slot.
    """

    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device
    quantized: bool = False


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
    """Keys and values of every layer: ``[B, heads, L, dim]`` each, ``L`` slots.

    Attributes:
        keys, values: one per layer; int8 if they are quantized.
        key_scales, value_scales: ``[B, heads, L, 1]``, what 1 stands for in a slot of a head. Empty if nothing is quantized.
    """

    keys: list[Tensor]
    values: list[Tensor]
    key_scales: list[Tensor] = field(default_factory=list)
    value_scales: list[Tensor] = field(default_factory=list)

    @staticmethod
    def allocate(layout: list[LayerSpec], rows: int, slots: int) -> CacheBuffers:
        def buffers(sizes: list[tuple[int, int]], scales: bool = False) -> list[Tensor]:
            made = []
            for (heads, dim), spec in zip(sizes, layout, strict=True):
                dtype = torch.int8 if spec.quantized and not scales else spec.dtype
                shape = rows, heads, slots, 1 if scales else dim
                if spec.quantized or not scales:
                    made.append(torch.zeros(shape, dtype=dtype, device=spec.device))
            return made

        keys, values = [(s.key_heads, s.key_dim) for s in layout], [(s.value_heads, s.value_dim) for s in layout]
        return CacheBuffers(buffers(keys), buffers(values), buffers(keys, True), buffers(values, True))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All of them; slots are the third axis of each."""
        return (*self.keys, *self.values, *self.key_scales, *self.value_scales)

    def _each(self, function: Callable[[Tensor], Tensor]) -> CacheBuffers:
        return CacheBuffers(*[[function(tensor) for tensor in getattr(self, part.name)] for part in fields(self)])

    def enlarged(self, slots: int) -> CacheBuffers:
        """The same keys and values with room for `slots` tokens."""

        def wider(buffer: Tensor) -> Tensor:
            wide = buffer.new_zeros(*buffer.shape[:2], slots, buffer.shape[3])
            wide[:, :, : buffer.shape[2]] = buffer
            return wide

        return self._each(wider)

    def of_row(self, row: int, count: int) -> CacheBuffers:
        """A copy of the first `count` slots of a row."""
        return self._each(lambda tensor: tensor[row : row + 1, :, :count].clone())

    def of_rows(self, begin: int, end: int) -> CacheBuffers:
        """Views of some rows."""
        return self._each(lambda tensor: tensor[begin:end])

    def copy_row(self, row: int, source: CacheBuffers, source_row: int, count: int) -> None:
        """The first `count` slots of a row of `source` become those of `row`."""
        for own, other in zip(self.tensors, source.tensors, strict=True):
            own[row, :, :count] = other[source_row, :, :count]

    @property
    def slots(self) -> int:
        return self.keys[0].shape[2]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors)


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
        if self.buffers.key_scales:
            key_scales, value_scales = self.buffers.key_scales[layer_idx], self.buffers.value_scales[layer_idx]
            return self._quantized(keys, key_scales, key_states), self._quantized(values, value_scales, value_states)
        write_slots(keys, self.slots, key_states)
        write_slots(values, self.slots, value_states)
        return keys[:, :, : self.view], values[:, :, : self.view]

    def _quantized(self, buffer: Tensor, scales: Tensor, states: Tensor) -> Tensor:
        """Writes `states` as int8 and gives all that attention sees, as later passes will see it: this pass's own included."""
        levels, scale = quantize_slots(states)
        write_slots(buffer, self.slots, levels)
        write_slots(scales, self.slots, scale)
        return buffer[:, :, : self.view].to(states.dtype) * scales[:, :, : self.view]

    # Models ask these to number positions themselves; the loop always passes explicit positions and a ready mask.
    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.view, 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0


def quantize_slots(states: Tensor) -> tuple[Tensor, Tensor]:
    """``[B, h, N, d]`` as int8 and one scale per head and token, ``[B, h, N, 1]`` of the type of `states`."""
    # Rounded to the type that it is kept in before it divides.
    scale = (
        (states.abs().amax(-1, keepdim=True).float() / 127).clamp_min(torch.finfo(states.dtype).tiny).to(states.dtype)
    )
    return (states.float() / scale.float()).round().clamp(-127, 127).to(torch.int8), scale


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
    for buffer in buffers.tensors:
        buffer[rows, :, target] = buffer[rows, :, source]
