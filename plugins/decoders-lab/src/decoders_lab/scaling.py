"""Pads a small model to the size of a large one. The padded model has the logits of the small model and the bytes of the large one.

Acceptance depends on a model's text, and the cost of a step on the bytes that the step reads. A small trained model has realistic
texts, a shape with random weights has realistic costs, and a padded model has both. It computes the small model's logits exactly:

- Extra dimensions of the residual stream hold zeros. Weights that read them may be anything; weights that write them are zero.
- RMSNorm takes the mean over H instead of h dimensions. With ``eps · h/H`` and scales times ``sqrt(h/H)``, its output in the
  original dimensions is the same.
- Extra heads, layers and neurons contribute nothing, because their values or gates are zero: the matrices of values and gates read
  the extra dimensions only. Their other matrices are random.
- Heads of m times the width hold the original frequencies of the rotary embedding at every m-th place; queries are multiplied by
  ``sqrt(m)``.
- The last layer, an extra one, turns the normalised stream into one positive constant in the last dimension (a sum of squares).
  The added rows of the output head read this constant with a negative weight, the original rows do not read it. So an added token
  is never the likeliest token, and has probability 0.

Nearly all added weights are random numbers of the usual size, so that no kernel can skip them and no number is denormal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.initialization import no_init_weights

from decoders.cli.bench_run import Loaded, Subjects
from decoders.cli.models import DTYPES, device_called, moved_to
from decoders.errors import UnknownNameError

from .padding import Padding
from .scaled_shapes import ScaledShape, ScalingError, draft_shape, shape_named, sizes_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@torch.no_grad()
def scaled(
    model: PreTrainedModel, shape: str | ScaledShape, dtype: torch.dtype | None = None, seed: int = 0
) -> PreTrainedModel:
    """A model of `shape` that computes the logits of `model` for the original tokens. Its added tokens are never chosen.

    ``scaled(model, "0.5b")`` has 0.49 billion parameters. The weights are computed in float32 and stored as `dtype` (default: the
    model's own). In float32, logits are the same up to rounding; in other dtypes a scaled weight may round differently. seed: seed
    of the added weights.

    Raises:
        UnknownNameError: no such shape.
        ScalingError: `model` is not of the Llama design, or cannot be padded to this shape.
    """
    target = shape_named(shape) if isinstance(shape, str) else shape
    small = sizes_of(model)
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
    wide_config.cost_scaled_vocabulary = small.vocabulary
    with no_init_weights():
        wide = AutoModelForCausalLM.from_config(wide_config, dtype=dtype or model.dtype).eval()
    wide.tie_weights()
    wide.generation_config = model.generation_config
    wide.config.name_or_path = config.name_or_path
    # The note beside every figure of a padded model.
    wide.config.cost_scaled = f"cost-scaled to {sum(p.numel() for p in wide.parameters()) / 1e9:.2f}B"
    Padding(model, wide, small, target, seed).fill()
    return wide.to(model.device)


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
        f"{target.heads} query heads are not a multiple of {target.kv_heads} key heads": target.heads % target.kv_heads != 0,
        f"a width of {target.hidden} is not a multiple of {target.heads} heads": target.hidden % target.heads != 0,
        f"its rotary embedding is {rope.get('rope_type')!r}": rope.get("rope_type", "default") != "default",
        "its projections have biases": bool(config.attention_bias or config.mlp_bias),
        "its embeddings are not tied": not config.tie_word_embeddings,
    }  # fmt: skip
    for reason, holds in reasons.items():
        if holds:
            raise ScalingError(f"the model cannot be scaled: {reason}")


def in_scale(
    target: PreTrainedModel, draft: PreTrainedModel | None, scale: str, dtype: str
) -> tuple[PreTrainedModel, PreTrainedModel | None]:
    """Target and draft, given in float32, padded to the size called `scale` and stored as `dtype`.

    Raises:
        UnknownNameError: no such size or dtype.
        ScalingError: the target or the draft cannot be padded to this scale.
    """
    if dtype not in DTYPES[1:]:
        raise UnknownNameError("dtype", dtype, DTYPES[1:])
    shape, stored = shape_named(scale), getattr(torch, dtype)
    small = None if draft is None else scaled(draft, draft_shape(shape, target, draft), stored)
    return scaled(target, shape, stored), small


class ScaledSubjects(Subjects):
    """Models for ``decoders bench``, padded to the size called `scale`."""

    def __init__(self, scale: str) -> None:
        shape_named(scale)  # reports a misspelt name before minutes of loading
        self.scale, self.loaded_as = scale, f" at the size of {scale}"

    def load(self, model: str, draft: str | None, dtype: str, device: str | None) -> Loaded:
        target, tokenizer, assistant = super().load(model, draft, "float32", None)
        target, assistant = in_scale(target, assistant, self.scale, dtype)
        place = device_called(device)
        return moved_to(place, target), tokenizer, None if assistant is None else moved_to(place, assistant)
