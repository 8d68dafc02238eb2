"""Fused attention over the KV cache in slots (:mod:`.cache`), registered with transformers as ``"decoders"``.

A pass computes one mask for each of the ``T`` *kinds* of layer (full, sliding, chunked …) and stacks the masks along the head axis:
``[B, T, N, view]`` (``view``: number of slots that attention reads). Model code passes this tensor on; a layer uses its kind's mask.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from ...common.transformers_compat import config_value, set_attention
from ...errors import UnsupportedError
from .blocks import LeadingText, ending
from .buckets import ROWS, view_bucket

NAME = "decoders"
#: Names of two attributes of a layer's attention module: the index of the layer's kind, and the kind itself.
INDEX_ATTRIBUTE, KIND_ATTRIBUTE = "decoders_kind_index", "decoders_kind"
#: Attention of a long block of text runs in stretches of this many queries. A stretch looks only at the slots up to its last query.
STRETCH = 64
#: transformers' names of layer types without attention. Some of these layers have a recurrent state.
STATES_ONLY = {"linear_attention", "mamba", "conv", "moe", "mlp"}


@dataclass(frozen=True)
class LayerKind:
    """How far back a layer attends: ``window`` positions (sliding), to the start of a chunk of ``chunk`` positions, or unlimited."""

    window: int | None = None
    chunk: int | None = None

    def within(self, reach: int) -> LayerKind:
        """This kind with a window or chunk of at most `reach` positions. An unlimited kind stays unlimited."""
        return LayerKind(self.window and min(self.window, reach), self.chunk and min(self.chunk, reach))

    def narrow(self, allowed: Tensor, position_q: Tensor, position_k: Tensor) -> Tensor:
        """Returns `allowed` with False where a query and a key are not in the same window or chunk of this kind."""
        if self.window is not None:
            allowed = allowed & (position_q - position_k < self.window)
        if self.chunk is not None:
            allowed = allowed & (position_q // self.chunk == position_k // self.chunk)
        return allowed


def layer_kinds(config: PreTrainedConfig) -> tuple[tuple[LayerKind, ...], tuple[int, ...]]:
    """The distinct kinds of attention layers in a model, and for each layer the index of its kind.

    As in transformers' caches, ``layer_types`` in the config decides. Without ``layer_types``, the config's window and chunk size
    decide. Layers without attention (:data:`STATES_ONLY`) have index 0.

    Raises:
        UnsupportedError: the loop does not support the type of a layer.
    """
    text = config.get_text_config(decoder=True)
    types = getattr(text, "layer_types", None)
    count = text.num_hidden_layers if types is None else len(types)
    values = [config_value(text, name) for name in ("sliding_window", "attention_chunk_size")]
    windows, chunks = (value if isinstance(value, tuple) else (value,) * count for value in values)
    if types is None:
        types = [
            "sliding_attention" if window else "chunked_attention" if chunk else "full_attention"
            for window, chunk in zip(windows, chunks, strict=True)
        ]
    known = {
        "full_attention": lambda window, chunk: LayerKind(),
        "sliding_attention": lambda window, chunk: LayerKind(window=window),
        "chunked_attention": lambda window, chunk: LayerKind(chunk=chunk),
        # Attention plus a recurrent state.
        "hybrid": lambda window, chunk: LayerKind(),
        "hybrid_sliding": lambda window, chunk: LayerKind(window=window),
    }
    unknown = sorted(set(types) - set(known) - STATES_ONLY)
    if unknown:
        raise UnsupportedError(
            f"{type(config).__name__} has layers of type {', '.join(unknown)}; strategy= verifies several tokens at "
            "once and needs layers that keep keys and values or a recurrent state "
            f"({', '.join([*known, *sorted(STATES_ONLY)])}). Call generate without strategy=."
        )
    of_layers = [
        known[kind](window, chunk) if kind in known else None
        for kind, window, chunk in zip(types, windows, chunks, strict=True)
    ]
    kinds = tuple(dict.fromkeys(kind for kind in of_layers if kind is not None)) or (LayerKind(),)
    return kinds, tuple(kinds.index(kind or kinds[0]) for kind in of_layers)


def tell_kinds(model: nn.Module, kinds: tuple[LayerKind, ...], kind_of_layer: Sequence[int]) -> None:
    """Sets the attributes :data:`INDEX_ATTRIBUTE` and :data:`KIND_ATTRIBUTE` in every layer of our copy of a model."""
    for module in model.modules():
        layer = getattr(module, "layer_idx", None)
        if isinstance(layer, int) and layer < len(kind_of_layer):
            setattr(module, INDEX_ATTRIBUTE, kind_of_layer[layer])
            setattr(module, KIND_ATTRIBUTE, kinds[kind_of_layer[layer]])


def module_configs(model: nn.Module) -> dict[tuple[str, str], PreTrainedConfig]:
    """Maps a module's path and an attribute's name to the config in that attribute. Several entries may be the same object."""
    return {
        (path, name): value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, PreTrainedConfig)
    }


def attend_by(model: PreTrainedModel, name: str) -> None:
    """Makes all layers of our copy of a model run the attention function `name`."""
    model.set_attn_implementation(name)
    # set_attn_implementation changes only the configs of PreTrainedModels, and not the config of a layer that comes from another model.
    # In transformers 5.17, it also leaves out a model inside `model` if both models' configs have the same class.
    of_models = [
        module.config
        for module in model.modules()
        if isinstance(module, PreTrainedModel) and (module is model or type(module.config) is not type(model.config))
    ]
    known = {id(config) for config in configs_within(of_models)}
    for config in module_configs(model).values():
        if id(config) not in known:
            set_attention(config, name)


def configs_within(configs: Iterable[PreTrainedConfig]) -> Iterator[PreTrainedConfig]:
    """Yields `configs`, and all configs inside them."""
    for config in configs:
        yield config
        parts = (getattr(config, part, None) for part in config.sub_configs)
        yield from configs_within(part for part in parts if isinstance(part, PreTrainedConfig))


def register(name: str, function: Callable[..., tuple[Tensor, None]]) -> None:
    """Registers an attention function with transformers as `name`."""
    AttentionInterface.register(name, function)
    # With a mask function for `name`, transformers passes the loop's 4-D masks on unchanged. Otherwise transformers would drop them.
    AttentionMaskInterface.register(name, sdpa_mask)


def refuse_position_bias(module: nn.Module) -> NoReturn:
    """Raises UnsupportedError for a model that passes a position bias to its attention, because tree masks cannot express it."""
    raise UnsupportedError(
        f"{type(module).__name__} adds a position bias to its attention, which the loop does not support for token trees"
    )


def build_mask(
    kinds: tuple[LayerKind, ...], base: Tensor, offsets: Tensor, visible: Tensor, view: int, dtype: torch.dtype
) -> Tensor:
    """The additive mask of a pass, ``[B, len(kinds), N, view]``: 0 if node ``q`` sees slot ``s``, else the minimum of `dtype`.

    Node ``q`` sees slot ``s`` if ``s < base`` (committed), or if `visible` is True for ``q`` and node ``s - base``. Sliding and
    chunked layers also limit how far the *positions* of ``q`` and ``s`` may be apart. A committed slot ``s`` has position ``s``; a
    node has position ``base + offset``.

    Args:
        base: ``[B]`` int64, slot of node 0.
        offsets: ``[B, K]`` int64, depths of all ``K`` nodes of the tree.
        visible: ``[B, N, K]`` bool, which of the ``K`` nodes each of the last ``N`` nodes sees. The pass runs only the last ``N``
            nodes; the keys and values of the nodes before them are already in the cache.
    """
    rows, n = offsets.shape
    queries = visible.shape[1]
    slot = torch.arange(view, device=base.device)
    node = slot[None] - base[:, None]  # [B, view]: the node in each slot; outside of the block, < 0 or >= n
    in_block = (node >= 0) & (node < n)
    inside = node.clamp(0, n - 1)
    seen = (node < 0)[:, None] | (in_block[:, None] & visible.gather(2, inside[:, None].expand(rows, queries, view)))
    position_k = torch.where(in_block, base[:, None] + offsets.gather(1, inside), slot[None])[:, None]
    position_q = (base[:, None] + ending(offsets, queries))[:, :, None]
    layers = [kind.narrow(seen, position_q, position_k) for kind in kinds]
    bias = torch.zeros((), dtype=dtype, device=base.device)
    return torch.where(torch.stack(layers, dim=1), bias, torch.finfo(dtype).min)


@dataclass(frozen=True)
class MaskShape:
    """How attention reads a mask. It is the mask tensor's attribute ``decoders_shape``, because model code passes on only the tensor.

    Attributes:
        group: how often each row of the mask is repeated: once for each query head of a key head, or 1 if rows are not repeated yet.
        text: if attention runs in stretches of :data:`STRETCH` queries, the text at the beginning of the block; otherwise None.
        parts: the stretches' masks, keyed by kind of layer, group size and first query. The first layer that needs a mask stores it.
    """

    group: int = 1
    text: LeadingText | None = None
    parts: dict[tuple[int, int, int], Tensor] = field(default_factory=dict, compare=False)

    @staticmethod
    def of(mask: Tensor, query: Tensor) -> MaskShape:
        """The layout of `mask`. Some models slice the mask for their last layers, and a slice lacks the attribute ``decoders_shape``.
        Then the number of mask rows per query shows how often rows are repeated, and attention runs in one piece.
        """
        shape = getattr(mask, "decoders_shape", None)
        return shape if shape is not None else MaskShape(mask.shape[2] // query.shape[2])

    def note(self, query: Tensor, key: Tensor) -> None:
        """Every layer calls this method with its queries and keys. Only :class:`Probe` records them."""

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, kind: int, kernel: Callable[..., Tensor]
    ) -> Tensor:  # fmt: skip
        """The attention output of a layer, ``[B, N, Hq, Dv]``, by one or more calls of `kernel`. kind: index of the layer's kind."""
        text = self.text
        if text is None:
            return kernel(query, key, value, mask, self.group)
        group, n, stretches = query.shape[1] // key.shape[1], query.shape[2], []
        for begin in range(0, n, STRETCH):
            end = min(begin + STRETCH, n)
            seen = mask.shape[-1] if end > text.length else min(view_bucket(text.latest_start + end), mask.shape[-1])
            place = kind, group, begin
            if place not in self.parts:
                self.parts[place] = repeat_for_group(mask[:, :, begin:end, :seen], group)
            part = query[:, :, begin:end], key[:, :, :seen], value[:, :, :seen], self.parts[place]
            stretches.append(kernel(*part, group))
        return torch.cat(stretches, dim=1)


@dataclass(frozen=True)
class Probe(MaskShape):
    """The mask layout of a trial pass. Records each layer's keys, and its number of query heads per key head."""

    groups: list[int] = field(default_factory=list)
    keys: list[Tensor] = field(default_factory=list)

    def note(self, query: Tensor, key: Tensor) -> None:
        self.keys.append(key)
        self.groups.append(query.shape[1] // key.shape[1])


def tell_shape(mask: Tensor, shape: MaskShape | Probe) -> None:
    """Stores `shape` as the layout of `mask`."""
    setattr(mask, "decoders_shape", shape)  # noqa: B010  (by its annotations a tensor has no such attribute)


def shaped(mask: Tensor, group: int, text: LeadingText | None) -> Tensor:
    """Prepares `mask` for :func:`tree_attention`, once for all layers. Repeats the mask's rows `group` times, once per query head of a
    key head. If a long block begins with `text`, the mask stays as it is, because attention then runs in stretches.
    """
    if text is not None and mask.shape[2] > STRETCH:
        tell_shape(mask, MaskShape(text=text))
    elif group > 1:
        mask = repeat_for_group(mask, group)
        tell_shape(mask, MaskShape(group))
    return mask


def repeat_for_group(mask: Tensor, group: int) -> Tensor:
    """Repeats a mask ``[B, T, N, view]`` to ``[B, T, group·N, view]``, for the queries of `group` heads packed as rows of one head."""
    if group == 1:
        return mask
    rows, kinds, n, view = mask.shape
    return mask.unsqueeze(2).expand(rows, kinds, group, n, view).reshape(rows, kinds, group * n, view)


def tree_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, scaling: float | None = None,
    dropout: float = 0.0, softcap: float | None = None, s_aux: Tensor | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attention of ``N`` nodes over the cache. The queries of a GQA group are packed as rows of one head.

    Args:
        query: ``[B, Hq, N, D]``.
        key, value: ``[B, Hkv, view, D]``.
        attention_mask: ``[B, T, N, view]`` additive, or ``[B, T, group·N, view]`` (:func:`repeat_for_group`).
        softcap: ``cap·tanh(scores/cap)`` before the mask (gemma2).
        s_aux: ``[Hq]`` attention sinks (gpt-oss).

    Returns:
        ``[B, N, Hq, Dv]`` and None.
    """
    if kwargs.get("position_bias") is not None:
        refuse_position_bias(module)
    kind = getattr(module, INDEX_ATTRIBUTE, 0)
    shape = MaskShape.of(attention_mask, query)
    shape.note(query, key)
    kernel = functools.partial(_attend, scaling=scaling, softcap=softcap, s_aux=s_aux)
    return shape.attend(query, key, value, attention_mask[:, kind : kind + 1], kind, kernel), None


def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, repeated: int, scaling: float | None, softcap: float | None,
    s_aux: Tensor | None,
) -> Tensor:  # fmt: skip
    """Attention by PyTorch's kernels, ``[B, N, Hq, Dv]``. mask: ``[B, 1, …]``; repeated: number of copies of each row in `mask`."""
    rows, q_heads, n, dim = query.shape
    kv_heads = key.shape[1]
    group = q_heads // kv_heads
    packed = query.reshape(rows, kv_heads, group * n, dim)
    if repeated != group:
        mask = repeat_for_group(mask, group)
    if spare := _spare_queries(packed, n):
        packed, mask = F.pad(packed, (0, 0, 0, spare)), F.pad(mask, (0, 0, 0, spare))
    if softcap is None and s_aux is None:
        out = F.scaled_dot_product_attention(packed, key, value, attn_mask=mask, scale=scaling)
    else:
        scores = packed @ key.transpose(2, 3) * (dim**-0.5 if scaling is None else scaling)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.float() + mask.float()
        if s_aux is not None:
            sinks = s_aux.float().reshape(1, kv_heads, group, 1).expand(rows, -1, -1, n).reshape(rows, kv_heads, -1, 1)
            scores = torch.cat([scores, F.pad(sinks, (0, 0, 0, spare))], dim=-1)
        probabilities = scores.softmax(-1)[..., : key.shape[2]].to(value.dtype)
        out = probabilities @ value
    out = out[:, :, : group * n]
    return out.reshape(rows, q_heads, n, value.shape[-1]).transpose(1, 2).contiguous()


def _spare_queries(packed: Tensor, nodes: int) -> int:
    """The number of padding queries to append to `packed` ``[B, H, Q, D]``, so that a node has the same bits in every block.

    Only blocks of few nodes need padding; the sizes of larger blocks are already multiples of ``ROWS`` (:mod:`.invariance`).
    """
    if packed.dtype not in (torch.bfloat16, torch.float16) or packed.device.type != "cpu":
        return 0
    if torch.compiler.is_dynamo_compiling() and nodes != 1:  # `nodes` is a multiple of ROWS; a check would add a guard
        return 0
    return -packed.shape[2] % ROWS


register(NAME, tree_attention)
