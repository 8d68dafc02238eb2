"""A text that was read into a cache of transformers', copied to the slots of a row: decoding goes on from there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

from ...errors import UnsupportedError
from .cache import CacheBuffers, LayerSpec, quantize_slots
from .recurrent import states_in


def whole_cache(model: PreTrainedModel) -> DynamicCache:
    """A cache for `model` that keeps every token; layers with a window would drop what a shorter text behind the same prefix sees."""
    cache = DynamicCache(config=model.config)
    cache.layers = [DynamicLayer() if type(layer) is DynamicSlidingWindowLayer else layer for layer in cache.layers]
    return cache


def fill_row(
    buffers: CacheBuffers, layout: Sequence[LayerSpec], row: int, cache: Cache, source: int, begin: int, count: int
) -> None:
    """Copies keys and values of `count` tokens to the first slots of a row, and the recurrent states behind the last of them.

    Args:
        layout: of `buffers`.
        cache: is left as it is. What it holds ends with these tokens.
        source: its row.
        begin: the place of the first token; what stands in front is padding.

    Raises:
        UnsupportedError: it does not hold all of that.
    """
    for index, spec in enumerate(layout):
        layer: Any = cache.layers[index] if index < len(cache.layers) else None
        if spec.states and buffers.states is not None:
            if not isinstance(layer, LinearAttentionLayer):
                raise UnsupportedError(f"the cache has no recurrent state of layer {index}")
            for own, state in zip(buffers.states.layers[index], states_in(layer, spec.states), strict=True):
                own[row] = state[source]
        if not spec.key_heads:
            continue
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        held = int(layer.get_seq_length()) if isinstance(keys, Tensor) else 0
        if not isinstance(keys, Tensor) or not isinstance(values, Tensor) or held != begin + count:
            raise UnsupportedError(f"the cache holds {held} tokens in layer {index}, and {begin + count} are wanted")
        if keys.shape[2] < held:
            raise UnsupportedError(
                f"the cache has kept the last {keys.shape[2]} of {held} tokens in layer {index}, which has a window"
            )
        for buffer, scales, states in (
            (buffers.keys[index], buffers.key_scales, keys), (buffers.values[index], buffers.value_scales, values),
        ):  # fmt: skip
            stretch = states[source : source + 1, :, begin : begin + count]
            if spec.quantized:
                stretch, scale = quantize_slots(stretch.to(spec.dtype))
                scales[index][row, :, :count] = scale[0]
            buffer[row, :, :count] = stretch[0]
    if buffers.states is not None:
        buffers.states.reached[row] = count
