"""A small model inside one of a large model's size: the same logits, the large model's bytes.

How often drafts are accepted depends on what a model writes, and what a step costs on how many bytes it reads. A small trained
model has
the first, a shape with random weights the second. Padding brings both together. The wide model computes the small one exactly:

- Extra dimensions of the residual stream hold zeros. What reads them may be anything; what would write them is zero.
- RMSNorm divides by the mean over more dimensions. With ``eps · h/H`` and scales times ``sqrt(h/H)`` the original dimensions
  come out alike.
- Extra heads, layers and neurons read the extra dimensions only, where they would matter: a value, or a gate, of zero. Their other
  matrices are random.
- Heads of m times the width hold the original frequencies of the rotary embedding at every m-th place; queries are multiplied by
  ``sqrt(m)``.
- The last layer, an extra one, turns the normalised stream into one positive constant in the last dimension (a sum of squares).
  Rows of the
  vocabulary that were added read it with a negative weight, the others do not: an added token is never the likeliest one and has
  probability 0.

Nearly all added weights are random numbers of the usual size, so no kernel can skip them, and no number is denormal.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.initialization import no_init_weights

from ..errors import DecodersError, UnknownNameError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Standard deviation of the added weights.
DEVIATION = 0.02
#: Random numbers that added weights are taken from, over and over. A prime: no two rows of a matrix are the same.
BLOCK = 1_048_573
#: What the last dimension adds to the residual stream, relative to its length: below the rounding of float32.
CONSTANT = 1e-4
#: Logits of added tokens lie so many times as far below zero as any real logit can lie.
MARGIN = 16.0


class ScalingError(DecodersError, ValueError):
    """A model does not fit into a shape."""


@dataclass(frozen=True)
class ScaledShape:
    """Sizes of a model of the Llama design.

    Attributes:
        hidden: width of the residual stream.
        layers: number of layers.
        intermediate: neurons of a layer's MLP.
        heads: of queries.
        kv_heads: of keys and values.
        head: width of a head.
        vocabulary: tokens.
    """

    hidden: int
    layers: int
    intermediate: int
    heads: int
    kv_heads: int
    head: int
    vocabulary: int

    @property
    def parameters(self) -> int:
        """With tied embeddings."""
        attention = 2 * self.hidden * self.head * (self.heads + self.kv_heads)
        layer = attention + 3 * self.hidden * self.intermediate + 2 * self.hidden
        return self.layers * layer + self.vocabulary * self.hidden + self.hidden


#: Shapes of targets: a Llama of 110M, Qwen2.5-0.5B, Llama-3.2-1B and Llama-3.2-3B, all but the first with 152k tokens. Keys and
#: values take the
#: bytes of the original's (0.5b has four heads of 32 in the place of two of 64).
SHAPES: dict[str, ScaledShape] = {
    "110m": ScaledShape(768, 12, 2048, 12, 12, 64, 32_000),
    "0.5b": ScaledShape(896, 24, 4864, 28, 4, 32, 151_936),
    "1b": ScaledShape(2048, 16, 8192, 32, 8, 64, 151_936),
    "3b": ScaledShape(3072, 28, 8192, 24, 8, 128, 151_936),
}


def draft_shape(shape: ScaledShape, target: PreTrainedModel, draft: PreTrainedModel) -> ScaledShape:
    """The shape of a draft in proportion: width, layers and neurons grow by the factors by which the target's do.

    Widths are rounded up to multiples of 64 and of the number of heads. Heads are as wide as the target's, of keys as many as
    the draft has. The
    vocabulary is the target's.
    """
    small, other = _sizes(target), _sizes(draft)
    hidden = _rounded(other.hidden * shape.hidden / small.hidden, 1)
    intermediate = _rounded(max(other.intermediate * shape.intermediate / small.intermediate, 2 * other.hidden), 64)
    # One layer more at least: the last one holds the constant.
    layers = max(round(other.layers * shape.layers / small.layers), other.layers + 1)
    kv_heads = other.kv_heads
    heads = max(round(hidden / shape.head / kv_heads), -(-other.heads // kv_heads)) * kv_heads
    hidden = _rounded(hidden, math.lcm(64, heads))  # transformers wants whole heads in it
    return ScaledShape(hidden, layers, intermediate, heads, kv_heads, shape.head, shape.vocabulary)


def shape_named(name: str) -> ScaledShape:
    """The shape called `name`.

    Raises:
        UnknownNameError: no such shape.
    """
    if name not in SHAPES:
        raise UnknownNameError("scale", name, SHAPES)
    return SHAPES[name]


def label(model: PreTrainedModel) -> str:
    """What stands beside every figure of a scaled model: ``cost-scaled to 0.49B``; empty for other models."""
    scaled_from = getattr(model.config, "cost_scaled_from", None)
    return f"cost-scaled to {billions(sum(p.numel() for p in model.parameters()))}" if scaled_from else ""


def billions(count: int) -> str:
    """``0.49B``."""
    return f"{count / 1e9:.2f}B"


@torch.no_grad()
def scaled(
    model: PreTrainedModel, shape: str | ScaledShape, dtype: torch.dtype | None = None, seed: int = 0
) -> PreTrainedModel:
    """A model of `shape` that computes the logits of `model`, padded with tokens that are never chosen.

    ``scaled(model, "0.5b")`` has 0.49 billion parameters. Everything is computed in float32 and stored as `dtype` (default: the
    model's own).
    In float32 logits are the same up to rounding; in other dtypes a scaled weight may round differently. `seed` is that of the
    added weights.

    Raises:
        UnknownNameError: no such shape.
        ScalingError: `model` is of another design than Llama's, or does not fit.
    """
    target = shape_named(shape) if isinstance(shape, str) else shape
    small = _sizes(model)
    _check_fit(model, small, target)
    config: Any = model.config
    wide_config = LlamaConfig(
        **{
            key: value
            for key, value in config.to_dict().items()
            if key in ("max_position_embeddings", "rope_parameters", "bos_token_id", "eos_token_id", "pad_token_id")
        },
        hidden_size=target.hidden, num_hidden_layers=target.layers, intermediate_size=target.intermediate,
        num_attention_heads=target.heads, num_key_value_heads=target.kv_heads, head_dim=target.head,
        vocab_size=target.vocabulary, rms_norm_eps=config.rms_norm_eps * small.hidden / target.hidden,
        tie_word_embeddings=True,
    )  # fmt: skip
    wide_config.cost_scaled_from = config.name_or_path or "a model"
    wide_config.cost_scaled_vocabulary = small.vocabulary
    with no_init_weights():
        wide = LlamaForCausalLM._from_config(wide_config, dtype=dtype or model.dtype).eval()
    wide.tie_weights()
    wide.generation_config = model.generation_config
    wide.config.name_or_path = config.name_or_path
    _Padding(model, wide, small, target, seed).fill()
    return wide.to(model.device)


class _Padding:
    """Writes the weights of the wide model."""

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
        # The original layers spread out; the last one is always an added one.
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
        # Where fewer query heads share a key head than in the original, the original key head is there several times.
        copies = -(-group // wide_group)
        # Frequency i of the original is frequency m · i of a head that is m times as wide, in both of its halves.
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
                weight[:, : s.hidden] = 0  # queries and values of what was added are zero, keys may be anything
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
            # Values of the original heads are read by all query heads of their group; only the original ones may write.
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
            # silu(z) z + silu(-z) (-z) = z²: pairs of neurons sum the squares of the normalised stream, which are h.
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
        # No logit is further from zero than the longest row times the longest normalised vector.
        longest = original.norm(dim=1).max() + DEVIATION * math.sqrt(s.hidden) * 2
        reach = float(longest * self.state["model.norm.weight"].abs().max() * math.sqrt(s.hidden))
        root = self._length() / math.sqrt(s.hidden)
        scales[-1] = MARGIN * reach * root / self.constant * self.norm
        norm.copy_(scales)

    def _length(self) -> float:
        """Length of the residual stream at the end, of some random tokens: the longest."""
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
        """Scales of a norm, those of the original dimensions to be replaced."""
        return 1 + self._random((self.target.hidden,))

    def _random(self, shape: Any) -> Tensor:
        """Numbers from the block, from where the last ones ended."""
        count = math.prod(shape)
        taken = torch.empty(count)
        filled = 0
        while filled < count:
            piece = min(BLOCK - self.offset, count - filled)
            taken[filled : filled + piece] = self.block[self.offset : self.offset + piece]
            filled, self.offset = filled + piece, (self.offset + piece) % BLOCK
        return taken.view(*shape)


def _sizes(model: PreTrainedModel) -> ScaledShape:
    config: Any = model.config
    if config.model_type != "llama":
        raise ScalingError(f"only models of the design 'llama' can be scaled, and this one is {config.model_type!r}")
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return ScaledShape(
        config.hidden_size, config.num_hidden_layers, config.intermediate_size, config.num_attention_heads,
        config.num_key_value_heads, head, config.vocab_size,
    )  # fmt: skip


def _check_fit(model: PreTrainedModel, small: ScaledShape, target: ScaledShape) -> None:
    config: Any = model.config
    rope = getattr(config, "rope_parameters", None) or {}
    copies = -(-(small.heads // small.kv_heads) // max(target.heads // target.kv_heads, 1))
    narrow = [
        f"{name} {getattr(target, name)} < {least}"
        for name, least in (
            ("hidden", small.hidden + 1), ("layers", small.layers + 1), ("kv_heads", small.kv_heads * copies),
            ("intermediate", max(small.intermediate, 2 * small.hidden)), ("vocabulary", small.vocabulary),
        )
        if getattr(target, name) < least
    ]  # fmt: skip
    reasons = {
        f"the shape is too small: {', '.join(narrow)}": bool(narrow),
        f"heads of {small.head} do not divide heads of {target.head}": target.head % small.head != 0,
        f"{target.heads} query heads are no multiple of {target.kv_heads} key heads": target.heads % target.kv_heads != 0,
        f"a width of {target.hidden} is no multiple of {target.heads} heads": target.hidden % target.heads != 0,
        f"its rotary embedding is {rope.get('rope_type')!r}": rope.get("rope_type", "default") != "default",
        "its projections have biases": bool(config.attention_bias or config.mlp_bias),
        "its embeddings are not tied": not config.tie_word_embeddings,
    }  # fmt: skip
    for reason, holds in reasons.items():
        if holds:
            raise ScalingError(f"the model cannot be scaled: {reason}")


def _rounded(value: float, step: int) -> int:
    return -(-math.ceil(value) // step) * step
