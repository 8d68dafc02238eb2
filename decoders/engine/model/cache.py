"""The static slot cache: committed position ``p`` of a row is in slot ``p``, tree node ``i`` in slot ``base + i``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from ...common.devices import host_reads
from .kernels import cpu, moves


@dataclass(frozen=True)
class StateSpec:
    """A recurrent state of a layer, of a fixed size per row.

    Attributes:
        part, index: the attribute of transformers' ``LinearAttentionLayer`` that lists the state, and its index there.
        shape: of one row.
    """

    part: Literal["conv_states", "recurrent_states"]
    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class LayerSpec:
    """The storage of a layer.

    Attributes:
        key_heads, value_heads: number of heads of the keys and of the values, 0 for none.
        key_dim, value_dim: width of a head.
        quantized: whether keys and values are stored as int8, with a scale of `dtype` per head and slot.
        states: recurrent states (:mod:`.recurrent`).
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
    def without_keys(like: LayerSpec) -> LayerSpec:
        """The storage of a layer without keys and values, with the dtype and device of `like`."""
        return LayerSpec(0, 0, 0, 0, like.dtype, like.device)


class LayoutProbe(Cache):
    """A cache that stores nothing. It records the layout of keys and values of every layer, and whether a layer asks for its length."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.layouts: dict[int, LayerSpec] = {}
        self.keys: list[Tensor] = []
        self.counted = False

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self.layouts[layer_idx] = LayerSpec(
            key_states.shape[1], key_states.shape[3], value_states.shape[1], value_states.shape[3],
            key_states.dtype, key_states.device,
        )  # fmt: skip
        self.keys.append(key_states)
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        self.counted = True
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return query_length, 0

    def watching(self, model: nn.Module) -> AbstractContextManager:
        """Entered while `model` runs."""
        return nullcontext()


@dataclass
class CacheBuffers:
    """Keys and values of every layer: ``[B, heads, L, dim]`` each, ``L`` slots.

    Attributes:
        keys, values: a tensor per layer; int8 if quantized.
        key_scales, value_scales: ``[B, heads, L, 1]``, a scale per head and slot. Empty if not quantized.
        states: the recurrent states of every layer, if the model has any.
        shifts: ``[B]`` int64, position minus slot of a row's next token, which images make different. None for text-only models.
        places: addresses of the tensors (:func:`~decoders.engine.model.kernels.moves.places_of`), if a kernel moves slots.
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
        """Allocates empty buffers. by_kernel: whether a kernel of ours moves slots."""

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
        """The same buffers with :attr:`places` if `by_kernel`. Not within a recording: the addresses come from the host."""
        return replace(self, places=moves.places_of(self.tensors) if by_kernel else None)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors; their third axis is the slots."""
        return (*self.keys, *self.values, *self.key_scales, *self.value_scales)

    def _each(
        self, function: Callable[[Tensor], Tensor], states: RowStates | None, shifts: Tensor | None
    ) -> CacheBuffers:
        parts = self.keys, self.values, self.key_scales, self.value_scales
        keys, values, key_scales, value_scales = ([function(tensor) for tensor in part] for part in parts)
        return CacheBuffers(keys, values, key_scales, value_scales, states, shifts)

    def enlarged(self, slots: int) -> CacheBuffers:
        """The same keys and values with room for `slots` tokens."""

        def wider(buffer: Tensor) -> Tensor:
            wide = buffer.new_zeros(*buffer.shape[:2], slots, buffer.shape[3])
            wide[:, :, : buffer.shape[2]] = buffer
            return wide

        return self._each(wider, self.states, self.shifts).placed(self.places is not None)

    def of_row(self, row: int, count: int) -> CacheBuffers:
        """A copy of a row: its first `count` slots and its states."""
        states = self.states.of_row(row) if self.states is not None else None
        shifts = self.shifts[row : row + 1].clone() if self.shifts is not None else None
        return self._each(lambda tensor: tensor[row : row + 1, :, :count].clone(), states, shifts)

    def of_rows(self, begin: int, end: int) -> CacheBuffers:
        """Views of the rows from `begin` to `end`."""
        states = self.states.of_rows(begin, end) if self.states is not None else None
        shifts = self.shifts[begin:end] if self.shifts is not None else None
        own = self._each(lambda tensor: tensor[begin:end], states, shifts)
        return own if begin else replace(own, places=self.places)

    def gathered(self, rows: Tensor) -> CacheBuffers:
        """Copies of `rows` ``[B]`` int64, for drafters, which have no recurrent states."""
        assert self.states is None
        return self._each(lambda tensor: tensor[rows], None, self.shifts[rows] if self.shifts is not None else None)

    def first_layers(self, count: int) -> CacheBuffers:
        """The tensors of the first `count` layers."""
        keys, values = self.keys[:count], self.values[:count]
        own = CacheBuffers(keys, values, self.key_scales[:count], self.value_scales[:count], shifts=self.shifts)
        return own.placed(self.places is not None)

    def copy_row(self, row: int, source: CacheBuffers, source_row: int, count: int) -> None:
        """Copies the first `count` slots, the states and the shift of a row of `source` to `row`."""
        for own, other in zip(self.tensors, source.tensors, strict=True):
            own[row, :, :count] = other[source_row, :, :count]
        if self.states is not None and source.states is not None:
            self.states.copy_row(row, source.states, source_row)
        if self.shifts is not None and source.shifts is not None:
            self.shifts[row] = source.shifts[source_row]

    @property
    def slots(self) -> int:
        return self.keys[0].shape[2]

    @property
    def place(self) -> tuple:
        """Identifies the memory: recordings are valid for one place."""
        first = next(tensor for tensor in self.tensors if tensor.numel())
        return first.data_ptr(), first.shape, first.dtype

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors) + (self.states.nbytes if self.states is not None else 0)


@dataclass
class RowStates:
    """The recurrent states of rows after the last read or committed token; they cannot be rolled back.

    Attributes:
        layers: per layer, its states ``[B, …]``.
        reached: ``[B]`` int64, number of tokens that a row's states have seen.
        nodes: per layer, the states after every node of the last block, ``[B, N+1, …]``; the last entry is the state before the
            block. Empty after :meth:`commit`.
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
        part = self.of_rows(row, row + 1)
        return RowStates([[state.clone() for state in states] for states in part.layers], part.reached.clone())

    def of_rows(self, begin: int, end: int) -> RowStates:
        """Views of the rows from `begin` to `end`."""
        return RowStates([[state[begin:end] for state in states] for states in self.layers], self.reached[begin:end])

    def copy_row(self, row: int, source: RowStates, source_row: int) -> None:
        for own, others in zip(self.layers, source.layers, strict=True):
            for state, other in zip(own, others, strict=True):
                state[row] = other[source_row]
        self.reached[row] = source.reached[source_row]

    def commit(self, path: Tensor, emitted: Tensor, length: Tensor) -> None:
        """Advances the states of every row to its last accepted node.

        Args:
            path: ``[B, N]`` int64, the accepted nodes.
            emitted: ``[B]``, the length of each path; rows with 0 keep their states.
            length: ``[B]``, tokens of every row, node 0 of the next block included.
        """
        last = path.gather(1, (emitted - 1).clamp(min=0)[:, None])[:, 0]
        row = torch.arange(len(last), device=last.device)
        for layer, behind in self.nodes.items():
            for state, nodes in zip(self.layers[layer], behind, strict=True):
                state.copy_(nodes[row, torch.where(emitted > 0, last, nodes.shape[1] - 1)])
        self.reached.copy_(torch.where(emitted > 0, length - 1, self.reached))
        self.nodes.clear()

    @property
    def nbytes(self) -> int:
        return sum(state.nbytes for states in self.layers for state in states)


#: Runs a module on a selection of its input tokens, ``[M, n, …]`` each, with a separate cache.
RunPart = Callable[[Callable[[Tensor], Tensor], Cache], Tensor]


class StatePass(Protocol):
    """How recurrent layers run in one pass of the model (:mod:`.recurrent`)."""

    def run(self, layer: int, tokens: Tensor, module: nn.Module, call: RunPart) -> Tensor:
        """The output of `module` for all `tokens` of the pass, ``[B, N, H]``; stores its states."""
        ...


class Levels(NamedTuple):
    """Quantized keys or values for attention: int8 ``[B, h, view, d]`` and scales ``[B, h, view, 1]``.

    Model code passes them on to a kernel that reads them without a dequantized copy.
    """

    levels: Tensor
    scales: Tensor


class SlotCache(Cache):
    """transformers' cache interface over :class:`CacheBuffers` for one forward pass.

    Args:
        buffers: keys and values; written in place.
        slots: ``[B, N]`` int64, the slots of the pass's ``N`` tokens.
        view: attention sees slots ``0 … view-1``: its cost follows the current length, not the capacity.
        states: runs recurrent layers in this pass, if the model has any.
        counts: ``[N]``, number of tokens before each node of a single row minus its index in the pass, for designs that add both
            (:class:`~decoders.engine.model.layout.CountedTokens`).
        in_levels: whether attention takes quantized keys and values as :class:`Levels`; else the cache dequantizes them.
    """

    def __init__(
        self, buffers: CacheBuffers, slots: Tensor, view: int, states: StatePass | None = None, counts: Tensor | None = None,
        in_levels: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(layers=[])
        self.buffers, self.slots, self.view, self.states, self.counts = buffers, slots, view, states, counts
        self.in_levels = in_levels

    def update(  # type: ignore[override]
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor | Levels, Tensor | Levels]:
        keys, values = self.buffers.keys[layer_idx], self.buffers.values[layer_idx]
        if self.buffers.key_scales:
            key_scales, value_scales = self.buffers.key_scales[layer_idx], self.buffers.value_scales[layer_idx]
            return self._quantized(keys, key_scales, key_states), self._quantized(values, value_scales, value_states)
        if (write := _operator(keys, key_states, value_states)) is not None:
            write(keys, values, self.slots, key_states, value_states)
        else:
            write_slots(keys, self.slots, key_states)
            write_slots(values, self.slots, value_states)
        return keys[:, :, : self.view], values[:, :, : self.view]

    def _quantized(self, buffer: Tensor, scales: Tensor, states: Tensor) -> Tensor | Levels:
        """Writes `states` as int8, and returns all slots for attention as later passes will see them."""
        levels, scale = quantize_slots(states)
        write_slots(buffer, self.slots, levels)
        write_slots(scales, self.slots, scale)
        seen = Levels(buffer[:, :, : self.view], scales[:, :, : self.view])
        return seen if self.in_levels else seen.levels.to(states.dtype) * seen.scales

    # Models call these methods to compute positions; the loop always passes positions and a mask.
    def get_seq_length(self, layer_idx: int = 0) -> int | Tensor:  # type: ignore[override]
        return 0 if self.counts is None else self.counts

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.view, 0

    def get_query_offset(self, layer_idx: int = 0) -> int | Tensor:  # type: ignore[override]
        return self.get_seq_length(layer_idx)


def quantize_slots(states: Tensor) -> tuple[Tensor, Tensor]:
    """Quantizes ``[B, h, N, d]`` to int8, with a scale per head and token, ``[B, h, N, 1]`` in the dtype of `states`."""
    # The scale is rounded to the stored dtype before the division.
    scale = (
        (states.abs().amax(-1, keepdim=True).float() / 127).clamp_min(torch.finfo(states.dtype).tiny).to(states.dtype)
    )
    return (states.float() / scale.float()).round().clamp(-127, 127).to(torch.int8), scale


def _operator(buffer: Tensor, keys: Tensor, values: Tensor) -> Callable[..., None] | None:
    """The CPU kernel that writes keys and values; None without a kernel, and in compiled code, which has its own."""
    if buffer.device.type != "cpu" or torch.compiler.is_dynamo_compiling():
        return None
    kernels = cpu.chosen().kernels
    if kernels is None or buffer.dtype not in cpu.TYPES or not keys.dtype == values.dtype == buffer.dtype:
        return None
    return kernels.write_to_cache if keys.stride(-1) == values.stride(-1) == 1 else None


def write_slots(buffer: Tensor, slots: Tensor, states: Tensor) -> None:
    """``buffer[b, :, slots[b, n]] = states[b, :, n]`` in place; buffer ``[B, h, L, d]``, slots ``[B, N]``, states ``[B, h, N, d]``."""
    if len(buffer) == 1 and not torch.compiler.is_dynamo_compiling():
        # Takes half the time. Compiled code shares a graph for all numbers of rows instead.
        buffer[:, :, slots[0]] = states.to(buffer.dtype)
        return
    # index_put, not scatter: inductor runs index_put in place, and copies the whole buffer for scatter.
    rows = torch.arange(buffer.shape[0], device=buffer.device)[:, None]
    buffer[rows, :, slots] = states.transpose(1, 2).to(buffer.dtype)


def move_slots(buffers: CacheBuffers, base: Tensor, path: Tensor) -> None:
    """Copies slot ``base[b] + path[b, n]`` to ``base[b] + n`` in every layer; all reads come before all writes.

    Args:
        base: ``[B]`` int64.
        path: ``[B, N]`` int64; a kernel of ours relies on it that nodes ascend, or are in place.
    """
    if buffers.places is not None:
        moves.move_in_one_launch(buffers.places, base, path, buffers.tensors)
        return
    index = torch.arange(path.shape[1], device=path.device)
    if host_reads(path):  # on a GPU, reading it would sync
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
