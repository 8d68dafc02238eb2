"""The networks of EAGLE to EAGLE-4 and P-EAGLE: decoder layers that read embeddings and the target's hidden states.

Li et al. 2024, arXiv 2401.15077 and 2406.16858; Li et al. 2025, arXiv 2503.01840.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from ..drafters import cache_keyword


@dataclass(frozen=True)
class Eagle3Config:
    """The shape of a head, as its checkpoint describes it.

    Attributes:
        layer: config of the head's decoder layers: hidden size ``H``, attention heads, rotary positions, and the target's vocabulary
            ``V``.
        draft_vocab_size: ``D``, number of tokens that the head can propose.
        target_hidden_size: width of the target's hidden states.
        layers: decoder layers of the target whose outputs the head reads; None: three, chosen by the target's number of layers.
        norm_before_residual: whether the first layer adds its attention's output to the normed state instead of the state itself.
        norm_output: True: the next slot reads a slot's output after the last norm (EAGLE-3.1). False: its output before this norm.
        norm_features: how the target's hidden states are normed before they are fused. ``"whole"``: one norm over the concatenated
            layers. ``"each"``: one norm for each layer (EAGLE-3.1). None: no norm.
        mask_token_id: the mask token of a head that drafts all tokens in one pass (P-EAGLE, arXiv:2602.01469); None: tokens are
            drafted one after the other.
        windows: for each decoder layer, the size of its sliding window, the token itself included; None: no window. Empty: no windows.
        rank: rank of an additional output head that chooses candidates; only they get logits (EAGLE-4). 0: all tokens get logits.
        candidates: number of candidates; unused if `rank` is 0.
    """

    layer: LlamaConfig
    draft_vocab_size: int
    target_hidden_size: int
    layers: tuple[int, ...] | None = None
    norm_before_residual: bool = False
    norm_output: bool = False
    norm_features: Literal["whole", "each"] | None = None
    mask_token_id: int | None = None
    windows: tuple[int | None, ...] = ()
    rank: int = 0
    candidates: int = 0

    def layers_of(self, count: int) -> tuple[int, ...]:
        """The layers that the head reads in a target with `count` layers. Default: a low, a middle and a high layer, as in vLLM."""
        return self.layers if self.layers is not None else (1, count // 2 - 1, count - 4)


class Eagle3Head(nn.Module):
    """The network of an EAGLE-3 head. :attr:`decoders.strategy.Context.module` runs its passes.

    Slot ``j`` reads the embedding of token ``j + 1``, and the hidden states of token ``j`` from several layers of the target. `fc`
    fuses these hidden states. If the target has not read token ``j`` yet, the head's output at slot ``j - 1`` replaces the fused
    states.

    Args:
        embeds: whether the checkpoint has its own embedding; otherwise the target's is used.
    """

    def __init__(self, config: Eagle3Config, embeds: bool = False) -> None:
        super().__init__()
        c = config.layer
        count = len(config.layers) if config.layers is not None else 3
        self.head_config = config
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size) if embeds else None
        width = count * config.target_hidden_size
        self.fc = nn.Linear(width, c.hidden_size, bias=False)
        if config.norm_features == "whole":
            self.input_norm = LlamaRMSNorm(width, eps=c.rms_norm_eps)
        if config.norm_features == "each":
            self.fc_norm = nn.ModuleList(
                LlamaRMSNorm(config.target_hidden_size, eps=c.rms_norm_eps) for _ in range(count)
            )
        if config.mask_token_id is not None:
            self.mask_hidden = nn.Parameter(torch.zeros(1, 1, width))
        self.midlayer = DecoderLayer(c, config.norm_before_residual)
        self.deeper = nn.ModuleList(LlamaDecoderLayer(c, index) for index in range(1, c.num_hidden_layers))
        self.norm = LlamaRMSNorm(c.hidden_size, eps=c.rms_norm_eps)
        if config.rank:
            self.efficient_lm_head_down_proj = nn.Linear(c.hidden_size, config.rank, bias=False)
            self.efficient_lm_head = nn.Linear(config.rank, config.draft_vocab_size, bias=False)
        # With candidates, the output head is an embedding, so that only the candidates' rows are read.
        self.lm_head: nn.Linear | nn.Embedding = (
            nn.Embedding(config.draft_vocab_size, c.hidden_size)
            if config.rank
            else nn.Linear(c.hidden_size, config.draft_vocab_size, bias=False)
        )
        self.rotary_emb = LlamaRotaryEmbedding(c)

    def forward(
        self, embedded: Tensor, states: Tensor, last: Tensor | None = None, *, attention_mask: Tensor, position_ids: Tensor,
        cache: Any, logits: int = 1, fuse: bool = True,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Returns the features ``[B, N, H]`` of all nodes, and the logits ``[B, n, D]`` of the last ``n`` nodes.

        Slots of later tokens read these features in place of hidden states that the target has not computed.

        Args:
            embedded: ``[B, N, H]``, the embedding of the token that follows each node.
            states: ``[B, N, T·H]``, hidden states of ``T`` target layers. Without `fuse` ``[B, N, H]``, the head's own features.
            last: ``[B, N]`` int64, the slot at which each node's sliding windows end; None: the node's own slot.
            logits: ``n``, number of last nodes whose logits are computed.
            fuse: whether `states` are the target's hidden states, which `fc` fuses.
        """
        states = self._fused(states) if fuse else states
        rotary = self.rotary_emb(states, position_ids)
        windows = self.head_config.windows or (None,) * (1 + len(self.deeper))
        ends = position_ids if last is None else last
        masks = [attention_mask if w is None else hide_before(attention_mask, ends - w + 1) for w in windows]
        states = self.midlayer(embedded, states, rotary, masks[0], cache)
        for layer, mask in zip(self.deeper, masks[1:], strict=True):
            states = layer(
                states, position_embeddings=rotary, attention_mask=mask, **{self.midlayer.cache_keyword: cache}
            )
        normed = self.norm(states)
        return normed if self.head_config.norm_output else states, self._logits(normed[:, -logits:])

    def _logits(self, read: Tensor) -> Tensor:
        """Logits ``[B, n, D]``, ``-inf`` for tokens that are not candidates."""
        if not self.head_config.rank:
            return self.lm_head(read)
        scores = self.efficient_lm_head(self.efficient_lm_head_down_proj(read))
        chosen = scores.topk(self.head_config.candidates, dim=-1).indices
        exact = (self.lm_head(chosen) @ read[..., None])[..., 0]
        return torch.full_like(scores, float("-inf")).scatter(-1, chosen, exact)

    def _fused(self, features: Tensor) -> Tensor:
        kind = self.head_config.norm_features
        if kind == "whole":
            features = self.input_norm(features)
        if kind == "each":
            parts = features.chunk(len(self.fc_norm), dim=-1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(features)


def hide_before(mask: Tensor, first: Tensor) -> Tensor:
    """Returns the additive `mask` ``[B, K, N, L]`` (``K`` heads or 1), with the slots before `first` ``[B, N]`` hidden as well."""
    hidden = torch.arange(mask.shape[-1], device=mask.device) < first[:, None, :, None]
    return mask.masked_fill(hidden, torch.finfo(mask.dtype).min)


class DecoderLayer(nn.Module):
    """A decoder layer whose attention reads the concatenation of an embedding and a hidden state, each after its own norm."""

    def __init__(self, config: LlamaConfig, norm_before_residual: bool) -> None:
        super().__init__()
        self.norm_before_residual = norm_before_residual
        self.self_attn = LlamaAttention(config, layer_idx=0)
        self.cache_keyword = cache_keyword(self.self_attn)
        for name in ("q_proj", "k_proj", "v_proj"):
            plain = getattr(self.self_attn, name)
            setattr(
                self.self_attn, name, nn.Linear(2 * config.hidden_size, plain.out_features, bias=plain.bias is not None)
            )
        self.mlp = LlamaMLP(config)
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self, embedded: Tensor, states: Tensor, rotary: tuple[Tensor, Tensor], attention_mask: Tensor, cache: Any
    ) -> Tensor:
        normed = self.hidden_norm(states)
        residual = normed if self.norm_before_residual else states
        attended, _ = self.self_attn(
            hidden_states=torch.cat([self.input_layernorm(embedded), normed], dim=-1), position_embeddings=rotary,
            attention_mask=attention_mask, **{self.cache_keyword: cache},
        )  # fmt: skip
        states = residual + attended
        return states + self.mlp(self.post_attention_layernorm(states))


@dataclass(frozen=True)
class EagleConfig:
    """The shape of a head of EAGLE or EAGLE-2, as its checkpoint describes it.

    Attributes:
        layer: config of the head's decoder layer: attention heads, rotary positions, hidden size ``H`` and vocabulary ``V``. ``H``
            and ``V`` are the target's.
        bias: whether `fc` has a bias.
    """

    layer: LlamaConfig
    bias: bool = True


class EagleHead(nn.Module):
    """The network of an EAGLE or EAGLE-2 head. :attr:`decoders.strategy.Context.module` runs its passes.

    A token's feature is the input of the target's output head. Slot ``j`` reads the embedding of token ``j + 1``, concatenated with
    the feature of token ``j``. The slot's output predicts the feature of token ``j + 1``. The target's output head and the next slot
    read this prediction.

    Args:
        embeds: whether the checkpoint has its own embedding; otherwise the target's is used.
    """

    def __init__(self, config: EagleConfig, embeds: bool = True) -> None:
        super().__init__()
        c = config.layer
        self.head_config = config
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size) if embeds else None
        self.fc = nn.Linear(2 * c.hidden_size, c.hidden_size, bias=config.bias)
        self.midlayer = LlamaDecoderLayer(c, 0)
        self.midlayer.input_layernorm = nn.Identity()  # type: ignore[assignment]  # EAGLE has no norm here
        self.cache_keyword = cache_keyword(self.midlayer.self_attn)
        self.rotary_emb = LlamaRotaryEmbedding(c)

    def forward(
        self, embedded: Tensor, states: Tensor, *, attention_mask: Tensor, position_ids: Tensor, cache: Any, logits: int = 1,
        fuse: bool = True,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Returns the predicted features ``[B, N, H]``, and the features of the last ``n`` nodes as input of the target's output head.

        Args:
            embedded: ``[B, N, H]``, the embedding of the token that follows each node.
            states: ``[B, N, H]``, features that the target computed or the head predicted.
            logits: ``n``, number of last nodes whose logits are needed.
            fuse: has no effect; an argument of :meth:`Eagle3Head.forward`, so that callers need not tell the heads apart.
        """
        states = self.fc(torch.cat([embedded, states], dim=-1))
        rotary = self.rotary_emb(states, position_ids)
        states = self.midlayer(
            states, position_embeddings=rotary, attention_mask=attention_mask, **{self.cache_keyword: cache}
        )
        return states, states[:, -logits:]
