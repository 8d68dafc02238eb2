"""What an EAGLE-3 head learns from: what the frozen target computes over text, and training-time test (Li et al. 2025, section 3):
a draft of several tokens at every position, all at once.

At index ``t`` of a row the draft begins at slot ``t``, whose feature is the target's. Simulated token ``k`` sits at slot ``t + k``; its
feature is what the head gave for token ``k - 1`` of the same index. The attention of the draft at ``t`` sees what was read with the
target's features up to slot ``t``, and of the slots behind only its own: what a chain sees in decoding.

Letters: ``B`` rows, ``S`` indices, ``C`` of them with chains of more than one token, ``K`` simulated tokens, ``F`` width of the
target's features.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from ..common.layers import decoder_layers
from ..errors import TrainingError
from ..heads.eagle3 import DecoderLayer, Eagle3Head
from .texts import Texts, counted

Keys = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Lesson:
    """Rows of text, as the target reads them.

    Attributes:
        features: ``[B, T, F]``, outputs of the target's layers side by side.
        embedded: ``[B, T, H]``, of the tokens themselves.
        logits: ``[B, T, V]`` float32, the target's after every token.
        counted: ``[B, T]`` bool, after which tokens a prediction counts.
    """

    features: Tensor
    embedded: Tensor
    logits: Tensor
    counted: Tensor


class Teacher:
    """The frozen target.

    Args:
        layers: indices of the decoder layers that are read.
        bf16: compute in bfloat16.
    """

    def __init__(self, model: PreTrainedModel, layers: Sequence[int], bf16: bool) -> None:
        decoder = decoder_layers(model)
        if not decoder:
            raise TrainingError(f"eagle3 reads hidden layers, and {type(model).__name__} has no list of decoder layers")
        self.model, self.layers, self.bf16 = model, [decoder[layer] for layer in layers], bf16

    @torch.no_grad()
    def lesson(self, texts: Texts, stops: Sequence[int]) -> Lesson:
        """Reads all rows of `texts` at once. stops: what ends the model's own text; nothing behind it counts."""
        model, ids = self.model, texts.ids.to(self.model.device)
        with self._noting() as noted, self.precision():
            logits = model(input_ids=ids, use_cache=False).logits
        features = torch.cat([noted[layer].float() for layer in self.layers], dim=-1)
        embedded = model.get_input_embeddings()(ids).float()
        return Lesson(features, embedded, logits.float(), counted(texts, stops).to(ids.device))

    def precision(self) -> torch.autocast | nullcontext:
        """What the target, and the head, compute in."""
        return torch.autocast(self.model.device.type, torch.bfloat16) if self.bf16 else nullcontext()

    @contextmanager
    def _noting(self) -> Iterator[dict[torch.nn.Module, Tensor]]:
        noted: dict[torch.nn.Module, Tensor] = {}

        def note(layer: torch.nn.Module, _: object, output: Tensor | tuple) -> None:
            noted[layer] = output if isinstance(output, Tensor) else output[0]

        hooks = [layer.register_forward_hook(note) for layer in dict.fromkeys(self.layers)]
        try:
            yield noted
        finally:
            for hook in hooks:
                hook.remove()


def unrolled(
    head: Eagle3Head, embedded: Tensor, features: Tensor, depth: int, chains: Tensor | None = None
) -> Iterator[Tensor]:
    """States of simulated token 0, 1, … ``depth - 1``, what the last norm reads: ``[B, S, H]``, and from token 1 on ``[B, C, H]``.

    Args:
        embedded: ``[B, S + depth - 1, H]``, of the token that follows each slot; index ``t`` of token ``k`` reads slot ``t + k``.
        features: ``[B, S, F]``, the target's, of the first ``S`` slots.
        chains: ``[C]`` int64, ascending, the indices that go on after token 0; None: all ``S``.
    """
    indices = torch.arange(features.shape[1], device=features.device)
    chains = indices if chains is None else chains
    states, seen = head.fc(features), list[Keys]()
    for k in range(depth):
        rotary = head.rotary_emb(states, (indices + k)[None])
        states = _layer(head.midlayer, embedded[:, indices + k], states, rotary, seen, indices)
        yield states
        if head.head_config.norm_output:
            states = head.norm(states)
        if k == 0:
            indices, states = chains, states[:, chains]


def _layer(
    layer: DecoderLayer, embedded: Tensor, states: Tensor, rotary: Keys, seen: list[Keys], indices: Tensor
) -> Tensor:
    """As :meth:`DecoderLayer.forward`, with the attention of a simulated token of the `indices`; `seen` gets its keys and values."""
    normed = layer.hidden_norm(states)
    residual = normed if layer.norm_before_residual else states
    attention, shape = layer.self_attn, (*states.shape[:2], -1, layer.self_attn.head_dim)
    read = torch.cat([layer.input_layernorm(embedded), normed], dim=-1)
    q, k, v = (getattr(attention, name)(read).view(shape).transpose(1, 2) for name in ("q_proj", "k_proj", "v_proj"))
    q, k = apply_rotary_pos_emb(q, k, *rotary)
    groups = attention.num_key_value_groups
    seen.append((k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)))
    attended = _attention(q, seen, attention.scaling, indices).transpose(1, 2).flatten(2)
    states = residual + attention.o_proj(attended)
    return states + layer.mlp(layer.post_attention_layernorm(states))


def _attention(q: Tensor, seen: list[Keys], scaling: float, indices: Tensor) -> Tensor:
    """``[B, heads, S or C, d]``: causal over what was read with the target's features, and one key of each simulated token since."""
    (keys, values), later = seen[0], seen[1:]
    if not later:
        return torch.nn.functional.scaled_dot_product_attention(q, keys, values, is_causal=True, scale=scaling)
    count = keys.shape[2]
    scores = (q @ keys.transpose(2, 3)).float()
    hidden = torch.arange(count, device=q.device) > indices[:, None]
    own = torch.stack([(q * k).sum(-1) for k, _ in later], dim=-1).float()
    scores = torch.cat([scores.masked_fill(hidden, float("-inf")), own], dim=-1) * scaling
    weights = scores.softmax(-1).to(values.dtype)
    attended = weights[..., :count] @ values
    for place, (_, v) in enumerate(later, start=count):
        attended = attended + weights[..., place : place + 1] * v
    return attended
