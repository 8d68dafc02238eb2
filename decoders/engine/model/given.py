"""Copies keys, values and recurrent states from the transformers cache in the caller's ``past_key_values`` to the slots of rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache

from ...errors import InputError, UnsupportedError
from .cache import CacheBuffers, LayerSpec
from .row_states import StateSpec
from .slot_cache import quantize_slots
from .target import Target

_ADVICE = "Pass the whole text as input_ids without it, or call generate without strategy=."


@dataclass(frozen=True)
class GivenPrompts:
    """Prompts that begin with the text in a transformers cache. The cache is never written.

    Attributes:
        cache: the cache; None if it would hold no tokens.
        length: number of tokens per row of the cache, padding included.
        sources: per prompt, the index of its row in the cache.
        padding: per prompt, the number of left padding tokens in its row of the cache.
        last: ``[B, H]``, each prompt's last position as an input embedding; None if it is a token.
    """

    cache: Cache | None
    length: int
    sources: tuple[int, ...]
    padding: tuple[int, ...]
    last: Tensor | None = None

    @property
    def reach(self) -> list[int]:
        """Per prompt, the number of its tokens in the cache, without padding."""
        return [max(self.length - padding, 0) for padding in self.padding]

    @property
    def fixed(self) -> list[int]:
        """Per prompt, the number of positions at its beginning that no pass can run again, because their token ids are unknown."""
        return [count + (self.last is not None) for count in self.reach]

    def put(self, target: Target, buffers: CacheBuffers) -> None:
        """Copies the prompts' beginnings from the cache to the slots of the first rows of `buffers`."""
        if self.cache is None:
            return
        for row, (source, padding) in enumerate(zip(self.sources, self.padding, strict=True)):
            put_cache(target, buffers, row, self.cache, source=source, padding=padding)


def cached_tokens(cache: Cache) -> int:
    """The number of tokens per row of a cache, with padding. Raises UnsupportedError if layers differ or the number cannot be read."""
    lengths = {int(layer.get_seq_length()) for layer in _layers(cache) if _stored(layer) is not None}
    if len(lengths) > 1:
        raise UnsupportedError(
            f"the layers of past_key_values hold different numbers of tokens: {sorted(lengths)}. {_ADVICE}"
        )
    return lengths.pop() if lengths else 0


def check_cache(target: Target, cache: Cache) -> int:
    """Checks that every layer of a cache holds all tokens to which the layer attends. Returns the cache's number of rows.

    Raises:
        InputError: the cache does not fit the model. UnsupportedError: the cache lacks a part of the text.
    """
    layers, length, rows = _layers(cache), cached_tokens(cache), set()
    stored = [_stored(layer) for layer in layers]
    name = type(target.model).__name__
    for number, spec in enumerate(target.layout):
        kept = stored[number] if number < len(layers) else None
        if spec.key_heads:
            if kept is None:
                raise InputError(f"past_key_values holds no keys and values of layer {number}, which {name} needs")
            for part, tensor, heads, dim in zip(
                ("keys", "values"),
                kept,
                (spec.key_heads, spec.value_heads),
                (spec.key_dim, spec.value_dim),
                strict=True,
            ):
                if (tensor.shape[1], tensor.shape[3]) != (heads, dim) or not tensor.is_floating_point():
                    raise InputError(
                        f"past_key_values holds {part} {list(tensor.shape)} ({tensor.dtype}) for layer {number}, where {name} has "
                        f"{heads} heads of width {dim}: was it made by another model?"
                    )
            kind, count = target.kind_of(number), kept[0].shape[2]
            needed = min((kind.window or kind.chunk or length + 1) - 1, length)
            if count < needed:
                raise UnsupportedError(
                    f"layer {number} of past_key_values holds unquantized keys of {count} of its {length} tokens, but {name} attends "
                    f"to {needed} tokens in this layer. Caches with shorter windows and quantized caches are not supported. {_ADVICE}"
                )
            rows.add(len(kept[0]))
        for state in spec.states:
            value = _state(layers, number, state)
            if value is None or value.shape[1:] != state.shape:
                raise InputError(
                    f"past_key_values holds no recurrent state of layer {number} in the shape that {name} needs"
                )
            rows.add(len(value))
    if len(rows) != 1:
        raise InputError(f"the layers of past_key_values have different numbers of rows: {sorted(rows)}")
    return rows.pop()


def put_cache(
    target: Target, buffers: CacheBuffers, row: int, cache: Cache, *, source: int = 0, padding: int = 0
) -> int:  # fmt: skip
    """Copies a text from a transformers cache to the first slots of `row`. Returns the text's number of tokens.

    For a layer with a window, the cache may hold only the tokens within the window. Then only these tokens' slots are written. The text
    must not be shortened later, because the window would then reach back to unwritten slots.

    Args:
        cache: a cache that :func:`check_cache` accepts.
        source: the index of the text's row in the cache.
        padding: the number of left padding tokens in the text's row.
    """
    length, layers = cached_tokens(cache), _layers(cache)
    count = max(length - padding, 0)
    for number, spec in enumerate(target.layout):
        if spec.key_heads and count:
            kept = _stored(layers[number])
            assert kept is not None
            _put_layer(buffers, number, row, spec, tuple(tensor[source, :, -count:] for tensor in kept), count)
        for place, state in enumerate(spec.states):
            value = _state(layers, number, state)
            assert value is not None and buffers.states is not None
            buffers.states.layers[number][place][row] = value[source]
    if buffers.states is not None:
        buffers.states.reached[row] = count
    return count


def _put_layer(
    buffers: CacheBuffers, number: int, row: int, spec: LayerSpec, kept: tuple[Tensor, ...], count: int
) -> None:
    """Writes `kept`, the last ``k`` keys and values ``[heads, k, d]`` of a text of `count` tokens, to layer `number` of `row`."""
    slots = slice(count - kept[0].shape[1], count)
    parts = (buffers.keys, buffers.key_scales), (buffers.values, buffers.value_scales)
    for tensor, (own, scales) in zip(kept, parts, strict=True):
        tensor = tensor.to(spec.device, spec.dtype)
        if scales:
            levels, scale = quantize_slots(tensor[None])
            scales[number][row, :, slots], tensor = scale[0], levels[0]
        own[number][row, :, slots] = tensor


def _layers(cache: Cache) -> list[Any]:
    layers = getattr(cache, "layers", None)
    if not isinstance(layers, list):
        raise UnsupportedError(f"past_key_values is a {type(cache).__name__}, whose layers cannot be read. {_ADVICE}")
    return layers


def _stored(layer: Any) -> tuple[Tensor, Tensor] | None:
    """The keys and values in a layer of a cache, ``[B, heads, k, d]`` each; None if the layer has no keys and values."""
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    if not isinstance(keys, Tensor) or not isinstance(values, Tensor) or keys.dim() != 4:
        return None
    count = min(int(layer.get_seq_length()), keys.shape[2])  # static layers have more slots than tokens
    return keys[:, :, :count], values[:, :, :count]


def _state(layers: list[Any], number: int, spec: StateSpec) -> Tensor | None:
    """A recurrent state of layer `number` of a cache, ``[B, …]``; None if it is missing."""
    try:
        return getattr(layers[number], spec.part)[spec.index]
    except (AttributeError, IndexError, KeyError, TypeError):
        return None
