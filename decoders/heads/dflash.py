"""DFlash (arXiv 2602.06036) and its family: in one pass, decoder layers that read the target's hidden states draft a block of tokens.

A head of :mod:`.block_heads` then chooses the tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    rotate_half,
)

from ..common.transformers_compat import attention_of
from .block_heads import HeadFields
from .eagle3 import hide_before


@dataclass(frozen=True)
class DFlashConfig:
    """The shape of a draft model, as its checkpoint describes it.

    Attributes:
        layer: config of the decoder layers: their number, hidden size ``H``, heads, rotary positions, sliding windows.
        block_size: number of tokens in a block in training: the last committed token, and masks.
        mask_token_id: the token that is embedded where a token is to be drafted.
        layers: decoder layers of the target whose outputs the draft model reads.
        windows: for each layer of the draft model, the number of context tokens that every node of a block sees; None for all. Empty
            for formats other than `speculators`. Then the sliding windows of `layer` are used.
        causal: for each layer, whether a node sees only itself and the nodes before it in the block (JetSpec: in all layers).
        from_last: whether the node of the last committed token drafts the first token (DSpark) instead of the first mask node.
        taps: number of taps of the convolutions around attention and feed-forward networks (DFlash2); 0: no convolutions.
        group: number of neighbouring channels that share a correction of each tap.
        head: the fields of ``config.json`` from which the head is created (:mod:`.block_heads`).
        draft_vocab_size: number of tokens that the draft model can draft; None: all.
    """

    layer: LlamaConfig
    block_size: int
    mask_token_id: int
    layers: tuple[int, ...]
    causal: tuple[bool, ...] = ()
    from_last: bool = False
    taps: int = 0
    group: int = 0
    head: HeadFields | None = None
    draft_vocab_size: int | None = None
    windows: tuple[int | None, ...] = ()

    @property
    def places(self) -> int:
        """Number of tokens drafted per block in training."""
        return self.block_size - (not self.from_last)


class DFlashNetwork(nn.Module):
    """The decoder layers of a DFlash draft model. :attr:`decoders.strategy.Context.module` runs their passes.

    `fc` fuses the target's hidden states of a token to one vector. From this vector, every layer computes a key and a value. These
    keys and values are the context. A block consists of the embeddings of the last committed token and of mask tokens. Its nodes
    attend to the context and to each other. In causal layers no node attends to later nodes.
    """

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        c, count = config.layer, config.layer.num_hidden_layers
        self.causal, self.windows = config.causal or (False,) * count, config.windows or (None,) * count
        self.fc = nn.Linear(len(config.layers) * c.hidden_size, c.hidden_size, bias=False)
        self.hidden_norm = LlamaRMSNorm(c.hidden_size, eps=c.rms_norm_eps)
        self.layers = nn.ModuleList([_Layer(config, index) for index in range(c.num_hidden_layers)])
        self.norm = LlamaRMSNorm(c.hidden_size, eps=c.rms_norm_eps)
        self.rotary_emb = LlamaRotaryEmbedding(c)

    def forward(
        self, states: Tensor, *, attention_mask: Tensor, position_ids: Tensor, cache: Any, context: bool = False
    ) -> Tensor:  # fmt: skip
        """Returns the hidden states ``[B, N, H]`` of a block, the input of the output head.

        With `context`, stores keys and values of ``N`` context tokens instead, and returns the tokens' fused vectors ``[B, N, H]``.

        Args:
            states: ``[B, N, H]``, embeddings of a block. With `context` ``[B, N, T·H]``, hidden states of ``T`` target layers.
        """
        if context:
            states = self.fused(states)
        rotary = self.rotary_emb(states, position_ids)
        for layer, causal, window in zip(cast(list[_Layer], self.layers), self.causal, self.windows, strict=True):
            if context:
                layer.self_attn.remember(states, rotary, cache)
                continue
            mask = attention_mask  # a node's position is also its cache slot
            if causal:
                later = torch.arange(mask.shape[-1], device=states.device) > position_ids[:, None, :, None]
                mask = mask.masked_fill(later, torch.finfo(mask.dtype).min)
            if window is not None:
                mask = hide_before(mask, position_ids[:, :1] - window)
            states = layer(states, rotary, mask, cache)
        return states if context else self.norm(states)

    def fused(self, features: Tensor) -> Tensor:
        """Fuses hidden states ``[…, T·H]`` of ``T`` target layers to the vectors ``[…, H]`` that the draft model's layers read."""
        return self.hidden_norm(self.fc(features))


def embedding_of(model: PreTrainedModel, usual: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Returns the function that embeds the network's tokens: the target's embedding, without the norm that some targets put after it.

    Published networks were trained without this norm, and transformers leaves it out, too.

    Args:
        usual: the target's embedding function, which is returned for targets without this norm.
    """
    table: Any = model.get_input_embeddings()
    normed = isinstance(getattr(table, "embed_norm", None), nn.Module)
    return partial(nn.functional.embedding, weight=table.weight) if normed else usual


class _Layer(nn.Module):
    def __init__(self, config: DFlashConfig, index: int) -> None:
        super().__init__()
        c = config.layer
        self.self_attn = _Attention(c, index)
        self.mlp = LlamaMLP(c)
        self.input_layernorm = LlamaRMSNorm(c.hidden_size, eps=c.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(c.hidden_size, eps=c.rms_norm_eps)
        if config.taps:
            self.attention_conv, self.mlp_conv = (_BlockConvolution(c.hidden_size, config) for _ in range(2))

    def forward(self, states: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor, cache: Any) -> Tensor:
        def attention(read: Tensor) -> Tensor:
            return self.self_attn(read, rotary, mask, cache)

        if not hasattr(self, "attention_conv"):
            states = states + attention(self.input_layernorm(states))
            return states + self.mlp(self.post_attention_layernorm(states))
        states = states + self.attention_conv(self.input_layernorm(states), attention)
        return states + self.mlp_conv(self.post_attention_layernorm(states), self.mlp)


class _BlockConvolution(nn.Module):
    """DFlash2's convolutions over the nodes of a block: one before and one after the attention or the feed-forward network.

    In each channel, a node's output is a weighted sum over the node and the nodes before it. The weights (taps) are learned. For each
    node, a correction computed from the node's state is added to every tap. Groups of neighbouring channels share a correction.
    """

    def __init__(self, width: int, config: DFlashConfig) -> None:
        super().__init__()
        self.taps, self.group = config.taps, config.group
        self.base_kernel = nn.Parameter(torch.zeros(2, self.taps, width))
        self.kernel_projection = nn.Linear(width, 2 * self.taps * (width // self.group), bias=False)

    def forward(self, states: Tensor, part: Callable[[Tensor], Tensor]) -> Tensor:
        corrections = self.kernel_projection(states).unflatten(-1, (2, self.taps, -1))
        return self._mixed(part(self._mixed(states, corrections, 0)), corrections, 1)

    def _mixed(self, states: Tensor, corrections: Tensor, half: int) -> Tensor:
        mixed = torch.zeros_like(states)
        for tap in range(self.taps):  # nodes before the first node count as zeros
            shifted = states if tap == 0 else nn.functional.pad(states, (0, 0, tap, 0))[:, : states.shape[1]]
            kernel = self.base_kernel[half, tap] + corrections[..., half, tap, :].repeat_interleave(self.group, dim=-1)
            mixed = mixed + kernel * shifted
        return mixed


class _Attention(LlamaAttention):
    """Attention with a norm on each head's queries and keys. :meth:`remember` stores keys and values without queries."""

    def __init__(self, config: LlamaConfig, index: int) -> None:
        super().__init__(config, index)
        self.is_causal = False
        self.q_norm = LlamaRMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = LlamaRMSNorm(self.head_dim, eps=config.rms_norm_eps)

    def remember(self, states: Tensor, rotary: tuple[Tensor, Tensor], cache: Any) -> tuple[Tensor, Tensor]:
        """Stores keys and values of `states`, and returns all stored keys and values, each ``[B, heads, L, d]``."""
        keys = _turned(self.k_norm(self._heads(self.k_proj(states))), rotary)
        return cache.update(keys, self._heads(self.v_proj(states)), self.layer_idx)

    def forward(self, states: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor, cache: Any) -> Tensor:
        queries = _turned(self.q_norm(self._heads(self.q_proj(states))), rotary)
        keys, values = self.remember(states, rotary, cache)
        attend = ALL_ATTENTION_FUNCTIONS[attention_of(self.config)]
        attended, _ = attend(self, queries, keys, values, mask, scaling=self.scaling, dropout=0.0)
        return self.o_proj(attended.flatten(2))

    def _heads(self, states: Tensor) -> Tensor:
        return states.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


def _turned(states: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Applies the rotary embedding to `states` ``[B, heads, N, d]``."""
    cos, sin = (part[:, None] for part in rotary)
    return states * cos + rotate_half(states) * sin
