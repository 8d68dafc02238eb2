"""The network of DFlash (arXiv 2602.06036): decoder layers that draft a block of tokens at once, over the target's hidden states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding, rotate_half

from ..common.transformers_compat import attention_of


@dataclass(frozen=True)
class DFlashConfig:
    """What a checkpoint says of a draft model.

    Attributes:
        layer: of its decoder layers: how many, hidden size ``H``, heads, rotary positions, which of them have a window.
        block_size: tokens of a block in training: the last committed one, and masks.
        mask_token_id: what is embedded where a token is to be drafted.
        layers: decoder layers of the target whose outputs it reads.
    """

    layer: LlamaConfig
    block_size: int
    mask_token_id: int
    layers: tuple[int, ...]


class DFlashNetwork(nn.Module):
    """Called by :attr:`decoders.strategy.Context.module`.

    What the target has computed for a token is fused by `fc` to one vector, from which every layer makes a key and a value: they
    are the context, and nothing else is computed of it. A block is the embedding of the last committed token and of masks; its
    nodes see the context and each other, in both directions.
    """

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        c = config.layer
        self.fc = nn.Linear(len(config.layers) * c.hidden_size, c.hidden_size, bias=False)
        self.hidden_norm = LlamaRMSNorm(c.hidden_size, eps=c.rms_norm_eps)
        self.layers = nn.ModuleList([_Layer(c, index) for index in range(c.num_hidden_layers)])
        self.norm = LlamaRMSNorm(c.hidden_size, eps=c.rms_norm_eps)
        self.rotary_emb = LlamaRotaryEmbedding(c)

    def forward(
        self, states: Tensor, *, attention_mask: Tensor, position_ids: Tensor, cache: Any, context: bool = False
    ) -> Tensor:  # fmt: skip
        """What the target's head reads, ``[B, N, H]``, for a block; of a context only its keys and values are kept.

        Args:
            states: ``[B, N, H]``, embeddings of a block; with `context` ``[B, N, T·H]``, hidden states of the target.
        """
        if context:
            states = self.hidden_norm(self.fc(states))
        rotary = self.rotary_emb(states, position_ids)
        for layer in cast(list[_Layer], self.layers):
            if context:
                layer.self_attn.remember(states, rotary, cache)
            else:
                states = layer(states, rotary, attention_mask, cache)
        return states if context else self.norm(states)


class _Layer(nn.Module):
    def __init__(self, config: LlamaConfig, index: int) -> None:
        super().__init__()
        self.self_attn = _Attention(config, index)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, states: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor, cache: Any) -> Tensor:
        states = states + self.self_attn(self.input_layernorm(states), rotary, mask, cache)
        return states + self.mlp(self.post_attention_layernorm(states))


class _Attention(nn.Module):
    """Attention whose keys and values may come from states that ask for nothing. Queries and keys are normed per head."""

    def __init__(self, config: LlamaConfig, index: int) -> None:
        super().__init__()
        self.config, self.layer_idx, self.is_causal = config, index, False
        assert config.head_dim is not None and config.num_key_value_heads is not None
        self.head_dim = config.head_dim
        width, queries, keys = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
        self.q_proj = nn.Linear(width, queries * self.head_dim, bias=config.attention_bias)
        self.k_proj = nn.Linear(width, keys * self.head_dim, bias=config.attention_bias)
        self.v_proj = nn.Linear(width, keys * self.head_dim, bias=config.attention_bias)
        self.o_proj = nn.Linear(queries * self.head_dim, width, bias=config.attention_bias)
        self.q_norm = LlamaRMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = LlamaRMSNorm(self.head_dim, eps=config.rms_norm_eps)

    def remember(self, states: Tensor, rotary: tuple[Tensor, Tensor], cache: Any) -> tuple[Tensor, Tensor]:
        """Stores keys and values of `states`, and gives all that there are, ``[B, heads, L, d]``."""
        keys = _turned(self.k_norm(self._heads(self.k_proj(states))), rotary)
        return cache.update(keys, self._heads(self.v_proj(states)), self.layer_idx)

    def forward(self, states: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor, cache: Any) -> Tensor:
        queries = _turned(self.q_norm(self._heads(self.q_proj(states))), rotary)
        keys, values = self.remember(states, rotary, cache)
        attend = ALL_ATTENTION_FUNCTIONS[attention_of(self.config)]
        attended, _ = attend(self, queries, keys, values, mask, scaling=self.head_dim**-0.5, dropout=0.0)
        return self.o_proj(attended.flatten(2))

    def _heads(self, states: Tensor) -> Tensor:
        return states.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


def _turned(states: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """With rotary positions; states ``[B, heads, N, d]``."""
    cos, sin = (part[:, None] for part in rotary)
    return states * cos + rotate_half(states) * sin
