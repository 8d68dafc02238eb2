"""transformers' cache interface over the slots of the KV cache, for one forward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from .cache import CacheBuffers
from .kernels import cpu
from .kernels.products import on_cpu

#: Runs a module on some of its input tokens, and returns the output. The first argument is a function that selects the entries of these
#: tokens, ``[M, n, …]``, from a tensor of all tokens. The second argument is the cache that the module uses.
RunPart = Callable[[Callable[[Tensor], Tensor], Cache], Tensor]


class StatePass(Protocol):
    """How recurrent layers run in one pass of the model (:mod:`.recurrent`)."""

    def run(self, layer: int, tokens: Tensor, module: nn.Module, call: RunPart) -> Tensor:
        """Returns the output of `module` for all `tokens` of the pass, ``[B, N, H]``, and stores the layer's new states."""
        ...


class Levels(NamedTuple):
    """Quantized keys or values for attention: int8 ``[B, h, view, d]`` and scales ``[B, h, view, 1]``.

    Model code passes this tuple on to an attention kernel, which needs no dequantized copy.
    """

    levels: Tensor
    scales: Tensor

    def to(self, device: torch.device) -> Levels:
        """Moves the tensors to `device`. In transformers 5.17, layers of Gemma 4 move keys and values of other layers."""
        return Levels(self.levels.to(device), self.scales.to(device))


class SlotCache(Cache):
    """transformers' cache interface over :class:`CacheBuffers` for one forward pass.

    Args:
        buffers: keys and values written in place.
        slots: ``[B, N]`` int64, the slots of the pass's ``N`` tokens.
        view: attention sees slots ``0 … view-1``, so that its cost depends on the length of the texts, not on the size of the cache.
        states: runs the recurrent layers in this pass; None if the model has no recurrent layers.
        counts: ``[N]``, what :meth:`get_seq_length` returns to a model that uses the number of cached tokens: in a pass over one row,
            the number of tokens before each node minus the node's index, because the model adds the index. None for other models.
        in_levels: whether attention gets quantized keys and values as :class:`Levels`; otherwise the cache dequantizes them.
    """

    def __init__(
        self, buffers: CacheBuffers, slots: Tensor, view: int, states: StatePass | None = None, counts: Tensor | None = None,
        in_levels: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(layers=[])
        self.buffers, self.slots, self.view, self.states, self.counts = buffers, slots, view, states, counts
        self.in_levels = in_levels

    @property
    def is_read_as_stored(self) -> bool:
        """Whether attention reads the buffers themselves: keys and values are not quantized, or the kernel reads int8 values."""
        return self.in_levels or not self.buffers.key_scales

    def update(  # type: ignore[override]
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor | Levels, Tensor | Levels]:
        keys, values = self.buffers.keys[layer_idx], self.buffers.values[layer_idx]
        key_scales, value_scales = self.buffers.scales(layer_idx)
        if (write := _operator(keys, key_states, value_states)) is not None:
            write(keys, values, self.slots, key_states, value_states, key_scales, value_scales)
        else:
            _write(keys, key_scales, self.slots, key_states)
            _write(values, value_scales, self.slots, value_states)
        return self.seen(keys, key_scales), self.seen(values, value_scales)

    def seen(self, buffer: Tensor, scales: Tensor | None) -> Tensor | Levels:
        """The slots of `buffer` that attention sees. Slots with `scales` are dequantized, or become :class:`Levels` if `in_levels`."""
        states = buffer[:, :, : self.view]
        if scales is None:
            return states
        seen = Levels(states, scales[:, :, : self.view])
        return seen if self.in_levels else seen.levels.to(scales.dtype) * seen.scales

    # Models call these methods to compute positions and masks, if they get none. The loop always passes positions and a mask.
    def get_seq_length(self, layer_idx: int = 0) -> int | Tensor:  # type: ignore[override]
        return 0 if self.counts is None else self.counts

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.view, 0

    def get_query_offset(self, layer_idx: int = 0) -> int | Tensor:  # type: ignore[override]
        return self.get_seq_length(layer_idx)


def quantize_slots(states: Tensor) -> tuple[Tensor, Tensor]:
    """Quantizes `states` ``[B, h, N, d]`` to int8, with a scale per head and token, ``[B, h, N, 1]`` in the dtype of `states`."""
    # The scale is rounded to the stored dtype before the division, because dequantization will use the rounded scale.
    scale = (
        (states.abs().amax(-1, keepdim=True).float() / 127).clamp_min(torch.finfo(states.dtype).tiny).to(states.dtype)
    )
    return (states.float() / scale.float()).round().clamp(-127, 127).to(torch.int8), scale


def _operator(buffer: Tensor, keys: Tensor, values: Tensor) -> Callable[..., None] | None:
    """Our CPU kernel that writes keys and values; None if it does not support them, or in compiled code, where inductor writes."""
    if buffer.device.type != "cpu" or torch.compiler.is_dynamo_compiling():
        return None
    if keys.dtype not in cpu.TYPES or keys.dtype != values.dtype or buffer.dtype not in (keys.dtype, torch.int8):
        return None
    return on_cpu.get("write_to_cache") if keys.stride(-1) == values.stride(-1) == 1 else None


def _write(buffer: Tensor, scales: Tensor | None, slots: Tensor, states: Tensor) -> None:
    """Writes `states` to their slots, as int8 with scales if the cache has `scales`. Later passes read the same quantized values."""
    if scales is not None:
        states, scale = quantize_slots(states)
        write_slots(scales, slots, scale)
    write_slots(buffer, slots, states)


def write_slots(buffer: Tensor, slots: Tensor, states: Tensor) -> None:
    """Sets ``buffer[b, :, slots[b, n]] = states[b, :, n]``. buffer: ``[B, h, L, d]``; slots: ``[B, N]``; states: ``[B, h, N, d]``."""
    if len(buffer) == 1 and not torch.compiler.is_dynamo_compiling():
        # For one row, this takes half the time. Compiled code writes all rows alike, so that one graph serves all numbers of rows.
        buffer[:, :, slots[0]] = states.to(buffer.dtype)
        return
    # This is index_put and not scatter, because inductor runs index_put in place, but copies the whole buffer for scatter.
    rows = torch.arange(buffer.shape[0], device=buffer.device)[:, None]
    buffer[rows, :, slots] = states.transpose(1, 2).to(buffer.dtype)
