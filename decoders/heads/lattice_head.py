"""LiLiCorr (arXiv:2608.20530): a head that scores the candidates of all places of a block together. See :mod:`.block_heads`."""

from __future__ import annotations

from typing import Annotated, Any, Self

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import SettingsError
from .block_heads import BlockHead, DraftedBlock, HeadFields, HeadScores
from .network_files import Count, FileConfig, Positive, Whole


class _CorrelatorFields(FileConfig):
    lilicorr_hidden_size: Annotated[Whole, Field(ge=0)] = 0
    lilicorr_num_layers: Count
    lilicorr_num_heads: Count
    lilicorr_mlp_ratio: Positive
    lilicorr_candidate_topk: Count
    lilicorr_factor_dim: Count
    lilicorr_vector_eps: Positive
    lilicorr_logit_scale: Positive


class _Feedforward(nn.Module):
    def __init__(self, read: int, width: int, given: int) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(read, width), nn.Linear(width, given)

    def forward(self, states: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.up_proj(states)))


class _LatticeLayer(nn.Module):
    """Attention among all candidates of all places, without a causal mask, and a feed-forward network."""

    def __init__(self, width: int, heads: int, ratio: float, eps: float) -> None:
        super().__init__()
        self.attn_norm, self.mlp_norm = nn.RMSNorm(width, eps=eps), nn.RMSNorm(width, eps=eps)
        self.attn = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp = _Feedforward(width, int(width * ratio), width)

    def forward(self, states: Tensor, bias: Tensor) -> Tensor:
        normed = self.attn_norm(states)
        parts = F.linear(normed, self.attn.in_proj_weight, self.attn.in_proj_bias).chunk(3, dim=-1)
        heads = self.attn.num_heads
        queries, keys, values = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(queries, keys, values, attn_mask=bias[None])
        states = states + self.attn.out_proj(attended.transpose(1, 2).flatten(2))
        return states + self.mlp(self.mlp_norm(states))


class _Correlator(nn.Module):
    """Scores pairs of candidates (likely tokens) at neighbouring places of a block.

    Args:
        width: hidden size of the drafting network.
        places: number of places ``T`` of a block in training.
    """

    def __init__(self, width: int, places: int, eps: float, own: _CorrelatorFields) -> None:
        super().__init__()
        inner, self.places, self.eps = own.lilicorr_hidden_size or width, places, own.lilicorr_vector_eps
        self.token_proj = nn.Identity() if inner == width else nn.Linear(width, inner)
        self.pass_hidden_proj, self.context_proj = nn.Linear(width, inner), nn.Linear(width, inner)
        self.feature_norm, self.feature_mlp = nn.LayerNorm(5), _Feedforward(5, inner, inner)
        self.slot_embedding = nn.Parameter(torch.zeros(1, 1, places, 1, inner))
        self.rank_embedding = nn.Parameter(torch.zeros(1, 1, 1, own.lilicorr_candidate_topk, inner))
        self.relative_slot_bias = nn.Parameter(torch.zeros(own.lilicorr_num_heads, 2 * places + 1))
        self.same_slot_bias = nn.Parameter(torch.zeros(own.lilicorr_num_heads))
        self.layers = nn.ModuleList(
            _LatticeLayer(inner, own.lilicorr_num_heads, own.lilicorr_mlp_ratio, eps)
            for _ in range(own.lilicorr_num_layers)
        )
        self.output_norm, self.anchor_norm = nn.RMSNorm(inner, eps=eps), nn.RMSNorm(inner, eps=eps)
        self.factor_input_proj = nn.Linear(3 * inner, inner)
        self.out_head, self.in_head, self.anchor_out_head = (
            nn.Linear(inner, own.lilicorr_factor_dim) for _ in range(3)
        )

    def forward(self, block: DraftedBlock, candidates: Tensor, log_probs: Tensor) -> tuple[Tensor, Tensor]:
        """Computes the vectors of all candidates, and returns the cosines between candidates at neighbouring places.

        Args:
            candidates, log_probs: ``[B, T, C]``, the candidates' token ids and log-probabilities.

        Returns:
            ``[B, C]``, cosines between a vector computed from ``block.context`` and the first place's candidates; and
            ``[B, T-1, C, C]``, cosines between each place's candidates and the candidates of the next place.
        """
        count, ranks = log_probs.shape[1:]
        rank = torch.arange(ranks, device=log_probs.device).expand_as(log_probs)
        best = log_probs.max(dim=-1, keepdim=True).values
        features = torch.stack(
            [log_probs, log_probs.exp(), log_probs - best, rank / max(ranks - 1, 1), rank == 0], dim=-1
        )
        states = self.token_proj(block.embed(candidates).to(block.states.dtype))
        states = states + self.pass_hidden_proj(block.states)[:, :, None]
        states = states + self.feature_mlp(self.feature_norm(features.to(states.dtype)))
        states = (states + self.slot_embedding[:, 0, :count] + self.rank_embedding[:, 0]).flatten(1, 2)
        bias = self._bias(count, ranks)
        for layer in self.layers:
            states = layer(states, bias)
        states = self.output_norm(states).unflatten(1, (count, ranks))
        anchor = self.anchor_norm(self.context_proj(block.context) * block.has_context[:, None].to(states.dtype))
        beside = anchor[:, None, None].expand_as(states)
        factors = F.silu(self.factor_input_proj(torch.cat([states, beside, states * beside], dim=-1)))
        outward, inward, first = (
            F.normalize(head(read), dim=-1, eps=self.eps)
            for head, read in ((self.out_head, factors), (self.in_head, factors), (self.anchor_out_head, anchor))
        )
        return (first[:, None] * inward[:, 0]).sum(-1), outward[:, :-1] @ inward[:, 1:].mT

    def _bias(self, count: int, ranks: int) -> Tensor:
        """The attention bias ``[heads, T·C, T·C]`` between candidates, which depends on the distance between their places."""
        place = torch.arange(count, device=self.same_slot_bias.device).repeat_interleave(ranks)
        apart = place[:, None] - place
        same = (apart == 0) * self.same_slot_bias[:, None, None]
        return self.relative_slot_bias[:, apart + self.places] + same


class LatticeHead(BlockHead):
    """A small transformer reads the candidates of all places at once: the ``C`` likeliest tokens of each place.

    It computes an outward and an inward vector for each candidate. The score of two candidates at neighbouring places is a cosine
    times a fixed scale: the cosine between the outward vector of the first and the inward vector of the second. For the first
    place, a vector computed from ``context`` replaces the outward vector of a predecessor.
    """

    candidates: int

    def __init__(self, width: int, places: int, eps: float, own: _CorrelatorFields) -> None:
        super().__init__()
        self.candidates, self.scale = own.lilicorr_candidate_topk, own.lilicorr_logit_scale
        self.lilicorr = _Correlator(width, places, eps, own)

    @classmethod
    def of(cls, fields: HeadFields) -> Self | None:
        if "lilicorr_candidate_topk" not in fields.raw:
            return None
        own = fields.read(_CorrelatorFields)
        fields.whole_vocabulary("LiLiCorr")
        width = own.lilicorr_hidden_size or fields.layer.hidden_size
        if width % own.lilicorr_num_heads:
            raise SettingsError(
                f"{fields.place}: lilicorr_num_heads is {own.lilicorr_num_heads}, which does not divide the hidden size, {width}"
            )
        return cls(fields.layer.hidden_size, fields.places, fields.layer.rms_norm_eps, own)

    def begin(self, block: DraftedBlock) -> tuple[Tensor, Tensor, Tensor]:
        top = block.logits.float().log_softmax(-1).topk(self.candidates, dim=-1)
        return (top.indices, *self.lilicorr(block, top.indices, top.values))

    def choose(self, block: DraftedBlock, begun: Any, place: int, tokens: Tensor, above: Tensor | None) -> HeadScores:
        candidates, first, pairs = begun
        if place == 0:
            scores = first[:, None].expand(-1, tokens.shape[1], -1)
        else:
            rank = (candidates[:, place - 1, None] == tokens[..., None]).int().argmax(-1)
            scores = pairs[:, place - 1].gather(1, rank[..., None].expand(-1, -1, self.candidates))
        return HeadScores(self.only(candidates[:, place], self.scale * scores.float(), block.logits.shape[-1]))
