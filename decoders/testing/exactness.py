"""What "the same tokens" means in a test, and a failure message from which the reason can be read."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .models import VOCAB

#: Gap between two logits, relative to the largest, below which rounding may decide (float32).
NEAR_TIE = 1e-5


def prompts(rows: int = 1, length: int = 24, vocab: int = VOCAB, seed: int = 0) -> dict[str, Tensor]:
    """``input_ids`` and ``attention_mask`` ``[rows, length]`` of texts that repeat themselves; rows are left-padded.

    Row ``r`` is shorter than `length` by ``5·r``, and its first third comes back at its end, so that whoever looks for
    repetitions finds some.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = torch.zeros(rows, length, dtype=torch.int64)
    mask = torch.zeros(rows, length, dtype=torch.int64)
    for row in range(rows):
        own = max(length - 5 * row, 3)
        text = torch.randint(3, vocab, (own,), generator=generator)
        third = own // 3
        text[own - third :] = text[:third]
        ids[row, length - own :], mask[row, length - own :] = text, 1
    return {"input_ids": ids, "attention_mask": mask}


def decode(model: PreTrainedModel, inputs: dict[str, Tensor], strategy: Any = None, **options: Any) -> Any:
    """``model.generate`` with an output object; greedy unless `options` say otherwise. None: transformers' own loop."""
    options = dict(do_sample=False, return_dict_in_generate=True) | options
    if strategy is not None:
        options["strategy"] = strategy
    return model.generate(**inputs, **options)


def assert_same_tokens(
    model: PreTrainedModel, inputs: dict[str, Tensor], expected: Tensor, actual: Tensor, what: str
) -> None:
    """Raises AssertionError at the first token that differs, with the target's logits of both candidates there.

    Args:
        expected, actual: ``[B, P + new]`` sequences, prompts ``[B, P]`` included. what: "greedy, batch 4", say.
    """
    prompt = inputs["input_ids"].shape[1]
    width = min(expected.shape[1], actual.shape[1])
    different = (expected[:, :width] != actual[:, :width]).nonzero().tolist()
    if not different:
        if expected.shape == actual.shape:
            return
        raise AssertionError(
            f"{what}: {actual.shape[1] - prompt} new tokens, not {expected.shape[1] - prompt}; the common part is equal"
        )
    row, at = min(different, key=lambda place: (place[1], place[0]))
    mask = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"]))[row].bool()
    prefix = torch.cat([expected[row, :prompt][mask], expected[row, prompt:at]])
    right, wrong = int(expected[row, at]), int(actual[row, at])
    message = f"{what}: row {row}, new token {at - prompt} is {wrong}, not {right}"
    if at >= prompt and len(prefix):
        with torch.no_grad():
            logits = model(prefix[None].to(model.device), use_cache=False).logits[0, -1].float()
        gap = (logits[right] - logits[wrong]).item()
        near = abs(gap) <= NEAR_TIE * logits.abs().max().item()
        message += f"; plain logits there: {logits[right]:.6f} and {logits[wrong]:.6f}, {gap:.2g} apart"
        message += " (a near-tie: choose another seed)" if near else ""
    raise AssertionError(
        f"{message}\n  expected {expected[row, prompt : at + 5].tolist()}"
        f"\n  got      {actual[row, prompt : at + 5].tolist()}"
    )
