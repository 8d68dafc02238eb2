"""Named shapes of models of the Llama design, and the shape of a padded draft model for a padded target's shape."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from decoders.errors import DecodersError, UnknownNameError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ScalingError(DecodersError, ValueError):
    """A model cannot be scaled to a shape."""


@dataclass(frozen=True)
class ScaledShape:
    """Sizes of a model of the Llama design.

    Attributes:
        hidden: width of the residual stream.
        layers: number of layers.
        intermediate: number of neurons of a layer's MLP.
        heads: number of query heads.
        kv_heads: number of key and value heads.
        head: width of a head.
        vocabulary: number of tokens.
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
        """Number of parameters, with tied embeddings."""
        attention = 2 * self.hidden * self.head * (self.heads + self.kv_heads)
        layer = attention + 3 * self.hidden * self.intermediate + 2 * self.hidden
        return self.layers * layer + self.vocabulary * self.hidden + self.hidden


#: Shapes of targets: a Llama of 110M, Qwen2.5-0.5B, Llama-3.2-1B and Llama-3.2-3B; all but the first have 152k tokens. Keys and
#: values take as many bytes as in the original models (0.5b has four key heads of width 32 instead of two of width 64).
SHAPES: dict[str, ScaledShape] = {
    "110m": ScaledShape(768, 12, 2048, 12, 12, 64, 32_000),
    "0.5b": ScaledShape(896, 24, 4864, 28, 4, 32, 151_936),
    "1b": ScaledShape(2048, 16, 8192, 32, 8, 64, 151_936),
    "3b": ScaledShape(3072, 28, 8192, 24, 8, 128, 151_936),
}


def draft_shape(shape: ScaledShape, target: PreTrainedModel, draft: PreTrainedModel) -> ScaledShape:
    """The shape of a padded draft model: width, layers and neurons grow by the same factors as the target's.

    The width is rounded up to a multiple of 64 and of the number of heads. Heads are as wide as the padded target's, and there are
    as many key heads as in the draft model. The vocabulary is the padded target's.
    """
    small, other = sizes_of(target), sizes_of(draft)
    hidden = _rounded(other.hidden * shape.hidden / small.hidden, 1)
    intermediate = _rounded(max(other.intermediate * shape.intermediate / small.intermediate, 2 * other.hidden), 64)
    # At least one added layer, because the last layer computes the constant.
    layers = max(round(other.layers * shape.layers / small.layers), other.layers + 1)
    kv_heads = other.kv_heads
    heads = max(round(hidden / shape.head / kv_heads), -(-other.heads // kv_heads)) * kv_heads
    hidden = _rounded(hidden, math.lcm(64, heads))  # transformers requires a multiple of the heads
    return ScaledShape(hidden, layers, intermediate, heads, kv_heads, shape.head, shape.vocabulary)


def shape_named(name: str) -> ScaledShape:
    """The shape called `name`.

    Raises:
        UnknownNameError: no such shape.
    """
    if name not in SHAPES:
        raise UnknownNameError("scale", name, SHAPES)
    return SHAPES[name]


def sizes_of(model: PreTrainedModel) -> ScaledShape:
    """The shape of a model.

    Raises:
        ScalingError: the model's design is not Llama's.
    """
    config: Any = model.config
    if config.model_type != "llama":
        raise ScalingError(f"only models of the design 'llama' can be scaled, and this one is {config.model_type!r}")
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return ScaledShape(
        config.hidden_size, config.num_hidden_layers, config.intermediate_size, config.num_attention_heads,
        config.num_key_value_heads, head, config.vocab_size,
    )  # fmt: skip


def _rounded(value: float, step: int) -> int:
    return -(-math.ceil(value) // step) * step
