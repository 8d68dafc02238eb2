"""The network of EAGLE and EAGLE-2 (Li et al. 2024, arXiv 2401.15077 and 2406.16858): one layer goes on with the last features."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding

from ..common.transformers_compat import cache_keyword


@dataclass(frozen=True)
class EagleConfig:
    """What a checkpoint says of a head.

    Attributes:
        layer: of its decoder layer: hidden size ``H``, heads, vocabulary ``V``, all as the target's; rotary positions.
        bias: `fc` has one.
    """

    layer: LlamaConfig
    bias: bool = True

    def layers_of(self, count: int) -> tuple[int, ...]:
        """None: the feature is what the target's output head reads."""
        return ()


class EagleHead(nn.Module):
    """Called by :attr:`decoders.strategy.Context.module`.

    Slot ``j`` reads the embedding of token ``j + 1`` and what the target's output head reads at token ``j``, side by side. What
    comes out stands for the feature of token ``j + 1``: the target's output head makes logits of it, and the next slot reads it.

    Args:
        embeds: whether the checkpoint brings its own embedding; else it is the target's.
    """

    def __init__(self, config: EagleConfig, embeds: bool = True) -> None:
        super().__init__()
        c = config.layer
        self.head_config = config
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size) if embeds else None
        self.fc = nn.Linear(2 * c.hidden_size, c.hidden_size, bias=config.bias)
        self.midlayer = _Layer(c)
        self.rotary_emb = LlamaRotaryEmbedding(c)

    def forward(
        self, embedded: Tensor, states: Tensor, *, attention_mask: Tensor, position_ids: Tensor, cache: Any, logits: int = 1,
        fuse: bool = True,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """The next features, ``[B, N, H]``, and those of the last `logits` nodes once more; as :meth:`Eagle3Head.forward`.

        Args:
            embedded: ``[B, N, H]``, of the token that follows each node.
            states: ``[B, N, H]``, the target's features or the head's own: `fuse` makes no difference.
        """
        states = self.fc(torch.cat([embedded, states], dim=-1))
        states = self.midlayer(states, self.rotary_emb(states, position_ids), attention_mask, cache)
        return states, states[:, -logits:]


class _Layer(nn.Module):
    """A Llama layer without its first norm."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.self_attn = LlamaAttention(config, layer_idx=0)
        self.cache_keyword = cache_keyword(self.self_attn)
        self.mlp = LlamaMLP(config)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, states: Tensor, rotary: tuple[Tensor, Tensor], attention_mask: Tensor, cache: Any) -> Tensor:
        attended, _ = self.self_attn(
            hidden_states=states, position_embeddings=rotary, attention_mask=attention_mask,
            **{self.cache_keyword: cache},
        )  # fmt: skip
        states = states + attended
        return states + self.mlp(self.post_attention_layernorm(states))
