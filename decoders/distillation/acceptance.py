"""What a draft model is worth: ``speculative`` is run with it, and its report read."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..generate import disable, enable
from ..training.texts import PROMPT_SHARE


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """How ``speculative`` is run for the card.

    Attributes:
        length: tokens that are drafted in a step.
        prompts: beginnings of held-out text that are continued.
        new_tokens: written after each.
        seed: of the sampled text.
    """

    length: int = 5
    prompts: int = 8
    new_tokens: int = 64
    seed: int = 0


def measure(
    model: PreTrainedModel,
    draft: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: Tensor,
    measurement: Measurement,
) -> dict[str, Any]:
    """Tokens per step of ``speculative``, the target's own included, greedily and sampled at temperature 1.

    Args:
        rows: ``[W, T]`` int64, held-out text whose first quarters are prompts.
    """
    enabled = "generate" in vars(model)
    enable(model, tokenizer)
    prompts = rows[: measurement.prompts, : max(1, round(PROMPT_SHARE * rows.shape[1]))].to(model.device)
    figures: dict[str, Any] = {"prompts": len(prompts)}
    try:
        for name, options in (
            ("greedy", {"do_sample": False}),
            ("sampled", {"do_sample": True, "temperature": 1.0, "top_k": 0}),
        ):
            out = cast(Any, model).generate(
                prompts, attention_mask=prompts.new_ones(prompts.shape), strategy="speculative", assistant_model=draft,
                strategy_config={"length": measurement.length}, max_new_tokens=measurement.new_tokens, seed=measurement.seed,
                return_dict_in_generate=True, decoders_config={"compile": False}, **options,
            )  # fmt: skip
            accepted = Counter(dict(enumerate(out.report.accepted_lengths)))
            steps = max(1, sum(accepted.values()))
            figures[name] = {
                "tokens_per_step": out.report.mean_accepted_length,
                "reached": [sum(c for n, c in accepted.items() if n > k) / steps for k in range(measurement.length)],
            }
    finally:
        if not enabled:
            disable(model)
    return figures
