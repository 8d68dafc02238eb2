"""The KV cache, in slots: a row's committed position ``p`` is in slot ``p``, and node ``i`` of a block is in slot ``base + i``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ...common.host_reads import host_reads
from .kernels import moves
from .row_states import RowStates, StateSpec


@dataclass(frozen=True)
class LayerSpec:
    """What a layer stores in the cache.

    Attributes:
        key_heads, value_heads: number of heads of the keys and of the values; 0 if the layer stores no keys and values.
        key_dim, value_dim: width of a head.
        quantized: whether keys and values are stored as int8, with a scale of `dtype` per head and slot.
        states: the layer's recurrent states (:mod:`.recurrent`).
    """

    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device
    quantized: bool = False
    states: tuple[StateSpec, ...] = ()

    @staticmethod
    def without_keys(spec: LayerSpec) -> LayerSpec:
        """A spec without keys and values, with the dtype and device of `spec`."""
        return LayerSpec(0, 0, 0, 0, spec.dtype, spec.device)


@dataclass
class CacheBuffers:
    """Keys and values of every layer, ``[B, heads, L, dim]`` each, where ``L`` is the number of slots.

    Attributes:
        keys, values: a tensor per layer; int8 if quantized.
        key_scales, value_scales: a tensor ``[B, heads, L, 1]`` per layer, with a scale per head and slot; empty if not quantized.
        states: the recurrent states of every layer; None if the model has none.
        shifts: ``[B]`` int64, each row's next position minus its next slot: 0, or another number after images, which shift positions.
            None for text-only models.
        places: addresses of the tensors (:func:`~decoders.engine.model.kernels.moves.places_of`); None unless a kernel moves slots.
    """

    keys: list[Tensor]
    values: list[Tensor]
    key_scales: list[Tensor] = field(default_factory=list)
    value_scales: list[Tensor] = field(default_factory=list)
    states: RowStates | None = None
    shifts: Tensor | None = None
    places: Tensor | None = None

    @staticmethod
    def allocate(
        layout: list[LayerSpec], rows: int, slots: int, shifted: bool = False, by_kernel: bool = False
    ) -> CacheBuffers:
        """Allocates buffers of zeros. shifted: whether rows have :attr:`shifts`; by_kernel: whether a kernel of ours moves slots."""

        def buffers(sizes: list[tuple[int, int]], scales: bool = False) -> list[Tensor]:
            tensors = []
            for (heads, dim), spec in zip(sizes, layout, strict=True):
                dtype = torch.int8 if spec.quantized and not scales else spec.dtype
                shape = rows, heads, slots, 1 if scales else dim
                if spec.quantized or not scales:
                    tensors.append(torch.zeros(shape, dtype=dtype, device=spec.device))
            return tensors

        keys, values = [(s.key_heads, s.key_dim) for s in layout], [(s.value_heads, s.value_dim) for s in layout]
        states = RowStates.allocate([spec.states for spec in layout], rows) if any(s.states for s in layout) else None
        shifts = torch.zeros(rows, dtype=torch.int64, device=layout[0].device) if shifted else None
        parts = buffers(keys), buffers(values), buffers(keys, True), buffers(values, True)
        return CacheBuffers(*parts, states, shifts).placed(by_kernel)

    def placed(self, by_kernel: bool) -> CacheBuffers:
        """The same buffers, with :attr:`places` if `by_kernel`. Copies data from the host, which no CUDA graph can record."""
        return replace(self, places=moves.places_of(self.tensors) if by_kernel else None)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors that have slots. The slots are the third axis."""
        return (*self.keys, *self.values, *self.key_scales, *self.value_scales)

    def _each(
        self, function: Callable[[Tensor], Tensor], states: RowStates | None, shifts: Tensor | None
    ) -> CacheBuffers:
        parts = self.keys, self.values, self.key_scales, self.value_scales
        keys, values, key_scales, value_scales = ([function(tensor) for tensor in part] for part in parts)
        return CacheBuffers(keys, values, key_scales, value_scales, states, shifts)

    def enlarged(self, slots: int) -> CacheBuffers:
        """Copies of all rows, with `slots` slots per row."""

        def wider(buffer: Tensor) -> Tensor:
            wide = buffer.new_zeros(*buffer.shape[:2], slots, buffer.shape[3])
            wide[:, :, : buffer.shape[2]] = buffer
            return wide

        return self._each(wider, self.states, self.shifts).placed(self.places is not None)

    def of_row(self, row: int, count: int) -> CacheBuffers:
        """A copy of one row: its first `count` slots, its states and its shift."""
        states = self.states.of_row(row) if self.states is not None else None
        shifts = self.shifts[row : row + 1].clone() if self.shifts is not None else None
        return self._each(lambda tensor: tensor[row : row + 1, :, :count].clone(), states, shifts)

    def of_rows(self, begin: int, end: int) -> CacheBuffers:
        """The rows from `begin` to `end`, as views."""
        states = self.states.of_rows(begin, end) if self.states is not None else None
        shifts = self.shifts[begin:end] if self.shifts is not None else None
        own = self._each(lambda tensor: tensor[begin:end], states, shifts)
        return own if begin else replace(own, places=self.places)

    def gathered(self, rows: Tensor) -> CacheBuffers:
        """Copies of the rows with the indices `rows` ``[B]`` int64. Only for drafters, which have no recurrent states."""
        assert self.states is None
        return self._each(lambda tensor: tensor[rows], None, self.shifts[rows] if self.shifts is not None else None)

    def first_layers(self, count: int) -> CacheBuffers:
        """The buffers of the first `count` layers, with the same tensors."""
        keys, values = self.keys[:count], self.values[:count]
        own = CacheBuffers(keys, values, self.key_scales[:count], self.value_scales[:count], shifts=self.shifts)
        return own.placed(self.places is not None)

    def copy_row(self, row: int, source: CacheBuffers, source_row: int, count: int) -> None:
        """Copies row `source_row` of `source` to row `row` of these buffers: the first `count` slots, the states and the shift."""
        for own, other in zip(self.tensors, source.tensors, strict=True):
            own[row, :, :count] = other[source_row, :, :count]
        if self.states is not None and source.states is not None:
            self.states.copy_row(row, source.states, source_row)
        if self.shifts is not None and source.shifts is not None:
            self.shifts[row] = source.shifts[source_row]

    def scales(self, layer: int) -> tuple[Tensor | None, Tensor | None]:
        """The scales of a layer's keys and of its values; None if they are not quantized."""
        return (self.key_scales[layer], self.value_scales[layer]) if self.key_scales else (None, None)

    @property
    def slots(self) -> int:
        return self.keys[0].shape[2]

    @property
    def place(self) -> tuple:
        """Identifies the buffers' memory: address, shape and dtype. A recorded step is valid only while all three stay the same."""
        first = next(tensor for tensor in self.tensors if tensor.numel())
        return first.data_ptr(), first.shape, first.dtype

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors) + (self.states.nbytes if self.states is not None else 0)


def move_slots(buffers: CacheBuffers, base: Tensor, path: Tensor) -> None:
    """Copies slot ``base[b] + path[b, n]`` to slot ``base[b] + n`` in every layer, as if all slots were read before any is written.

    Args:
        base: ``[B]`` int64.
        path: ``[B, N]`` int64. Our kernel requires that ``path[b, n]`` is ``n`` or larger than ``path[b, n-1]``.
    """
    if buffers.places is not None:
        moves.move_in_one_launch(buffers.places, base, path, buffers.tensors)
        return
    index = torch.arange(path.shape[1], device=path.device)
    if host_reads(path):  # on a GPU, reading `path` would be a sync
        moved = (path != index).any(0).nonzero()
        if not len(moved):
            return
        first, last = int(moved[0]), int(moved[-1]) + 1
        path, index = path[:, first:last], index[first:last]
    rows = torch.arange(path.shape[0], device=path.device)[:, None]
    source, target = base[:, None] + path, base[:, None] + index
    for buffer in buffers.tensors:
        if buffer.shape[1]:
            buffer[rows, :, target] = buffer[rows, :, source]
