"""Embeds the weights of a small model in the weights of a wide model; :mod:`.scaling` explains why the logits stay the same."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from .scaled_shapes import ScaledShape

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Standard deviation of the added weights.
DEVIATION = 0.02
#: Number of random numbers, which are repeated to fill added weights. It is a prime, so that no two rows of a matrix are equal.
BLOCK = 1_048_573
#: The constant in the last dimension, relative to the residual stream's Euclidean norm: too small to change norms in float32.
CONSTANT = 1e-4
#: An added token's logit is about minus this many times the greatest possible logit of an original token.
MARGIN = 16.0


class Padding:
    """Computes the weights of the wide model and writes them into it (:meth:`fill`)."""

    def __init__(
        self, model: PreTrainedModel, wide: LlamaForCausalLM, small: ScaledShape, target: ScaledShape, seed: int
    ) -> None:
        self.state = {name: tensor.detach().float().cpu() for name, tensor in model.state_dict().items()}
        self.model, self.wide, self.small, self.target = model, wide, small, target
        self.block = torch.randn(BLOCK, generator=torch.Generator().manual_seed(seed)) * DEVIATION
        self.offset = 0
        self.norm = math.sqrt(small.hidden / target.hidden)

    def fill(self) -> None:
        small, target = self.small, self.target
        # The original layers are spread evenly among added layers; the last layer is always an added layer.
        places = {layer * target.layers // small.layers: layer for layer in range(small.layers)}
        for place, layer in enumerate(self.wide.model.layers):
            source = places.get(place)
            self._attention(layer, source)
            self._mlp(layer, source, last=place == target.layers - 1)
        self._vocabulary()

    def _attention(self, layer: Any, source: int | None) -> None:
        s, t = self.small, self.target
        head, group, wide_group = torch.arange(s.head), s.heads // s.kv_heads, t.heads // t.kv_heads
        stride = t.head // s.head
        # If fewer query heads share a key head than in the original, the original key head is repeated.
        copies = -(-group // wide_group)
        # Frequency i of the original is frequency m · i of a head that is m times as wide, in both halves.
        within = (head % (s.head // 2)) * stride + (head // (s.head // 2)) * (t.head // 2)
        slots = torch.arange(s.heads) // group * copies * wide_group + torch.arange(s.heads) % group
        queries = (slots[:, None] * t.head + within).reshape(-1)
        key_heads = torch.arange(s.kv_heads * copies)
        values = (key_heads[:, None] * t.head + within).reshape(-1)
        attention = layer.self_attn
        self._scale(layer.input_layernorm, source, "input_layernorm")
        for name, rows in (("q_proj", queries), ("k_proj", values), ("v_proj", values)):
            weight = self._random(getattr(attention, name).weight.shape)
            if name != "k_proj":
                weight[:, : s.hidden] = 0  # added queries and values are zero, added keys may be anything
            if source is not None:
                original = self.state[f"model.layers.{source}.self_attn.{name}.weight"]
                if name == "q_proj":
                    weight[rows, : s.hidden] = original * math.sqrt(stride)
                else:
                    heads = original.view(s.kv_heads, s.head, -1).repeat_interleave(copies, 0)
                    weight[rows, : s.hidden] = heads.reshape(len(rows), -1)
            getattr(attention, name).weight.copy_(weight)
        output = self._random(attention.o_proj.weight.shape)
        if source is not None:
            # All query heads of a group read the original values, but only the original query heads may write to the stream.
            per_head = output.view(t.hidden, t.heads, t.head)
            readers = key_heads[:, None] * wide_group + torch.arange(wide_group)
            for place in within.tolist():
                per_head[:, readers.reshape(-1), place] = 0
            output[: s.hidden, queries] = self.state[f"model.layers.{source}.self_attn.o_proj.weight"]
        attention.o_proj.weight.copy_(output)

    def _mlp(self, layer: Any, source: int | None, last: bool) -> None:
        s, t = self.small, self.target
        gate, up = (self._random((t.intermediate, t.hidden)) for _ in range(2))
        down = self._random((t.hidden, t.intermediate))
        gate[:, : s.hidden] = 0
        self._scale(layer.post_attention_layernorm, source, "post_attention_layernorm")
        if source is not None:
            prefix = f"model.layers.{source}.mlp"
            gate[: s.intermediate, : s.hidden] = self.state[f"{prefix}.gate_proj.weight"]
            up[: s.intermediate, : s.hidden] = self.state[f"{prefix}.up_proj.weight"]
            down[:, : s.intermediate] = 0
            down[: s.hidden, : s.intermediate] = self.state[f"{prefix}.down_proj.weight"]
        elif last:
            # silu(z) z + silu(-z) (-z) = z², so pairs of neurons add up the squares of the normalised stream, whose sum is h.
            layer.post_attention_layernorm.weight[: s.hidden] = self.norm
            identity = torch.eye(s.hidden)
            pairs = torch.cat([identity, -identity])
            for weight in (gate, up):
                weight[: 2 * s.hidden, : s.hidden] = pairs
            down[:, : 2 * s.hidden] = 0
            self.constant = CONSTANT * self._length()
            down[-1, : 2 * s.hidden] = self.constant / s.hidden
        layer.mlp.gate_proj.weight.copy_(gate)
        layer.mlp.up_proj.weight.copy_(up)
        layer.mlp.down_proj.weight.copy_(down)

    def _vocabulary(self) -> None:
        s, t = self.small, self.target
        table, norm = self.wide.model.embed_tokens.weight, self.wide.model.norm.weight
        original = self.state["model.embed_tokens.weight"]
        rows = torch.zeros(s.vocabulary, t.hidden)
        rows[:, : s.hidden] = original
        table[: s.vocabulary].copy_(rows)
        for start in range(s.vocabulary, t.vocabulary, 8192):
            end = min(start + 8192, t.vocabulary)
            added = self._random((end - start, t.hidden))
            added[:, -1] = -1
            table[start:end].copy_(added)
        scales = self._scales()
        scales[: s.hidden] = self.state["model.norm.weight"] * self.norm
        # A logit is at most the greatest Euclidean norm of a row times the greatest Euclidean norm of a normalised vector.
        longest = original.norm(dim=1).max() + DEVIATION * math.sqrt(s.hidden) * 2
        reach = float(longest * self.state["model.norm.weight"].abs().max() * math.sqrt(s.hidden))
        root = self._length() / math.sqrt(s.hidden)
        scales[-1] = MARGIN * reach * root / self.constant * self.norm
        norm.copy_(scales)

    def _length(self) -> float:
        """The greatest Euclidean norm of the small model's last residual stream over some random tokens."""
        if not hasattr(self, "_longest"):
            tokens = torch.randint(self.small.vocabulary, (2, 32), generator=torch.Generator().manual_seed(1))
            ends: list[Tensor] = []
            norm: Any = self.model.get_submodule("model.norm")
            hook = norm.register_forward_pre_hook(lambda _, inputs: ends.append(inputs[0]))
            try:
                self.model(tokens.to(self.model.device))
            finally:
                hook.remove()
            self._longest = float(ends[0].float().norm(dim=-1).max())
        return self._longest

    def _scale(self, norm: Any, source: int | None, name: str) -> None:
        scales = self._scales()
        if source is not None:
            scales[: self.small.hidden] = self.state[f"model.layers.{source}.{name}.weight"] * self.norm
        norm.weight.copy_(scales)

    def _scales(self) -> Tensor:
        """Random scales of a norm. The caller replaces the scales of the original dimensions."""
        return 1 + self._random((self.target.hidden,))

    def _random(self, shape: Any) -> Tensor:
        """The next numbers of the random block, as a tensor of the given shape."""
        count = math.prod(shape)
        taken = torch.empty(count)
        filled = 0
        while filled < count:
            piece = min(BLOCK - self.offset, count - filled)
            taken[filled : filled + piece] = self.block[self.offset : self.offset + piece]
            filled, self.offset = filled + piece, (self.offset + piece) % BLOCK
        return taken.view(*shape)
