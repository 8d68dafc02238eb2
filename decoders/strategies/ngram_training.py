"""N-gram tables of what a model writes: text is sampled from it and counted."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..errors import SettingsError
from .ngram_table import NgramTable


def train_table(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    *,
    tokens: int,
    rows: int = 16,
    length: int = 256,
    temperature: float = 1.0,
    seed: int = 0,
    followers: int = 16,
    source: str = "",
    on_progress: Callable[[int], None] = lambda counted: None,
    **options: Any,
) -> NgramTable:
    """Samples from `model` after `prompts` and counts what it writes; the prompts are context and not counted.

    The table follows the model's own distribution, which is what a drafter for it has to predict.

    Args:
        model: as :func:`decoders.enable` gave it back.
        prompts: token ids; every batch draws `rows` of them.
        tokens: how many tokens to count at least; the last batch is counted whole.
        length: most tokens to sample after a prompt.
        on_progress: told how many tokens there are, after each batch.
        options: further arguments of ``generate``.

    Raises:
        SettingsError: nothing to sample from, or a temperature that texts cannot be sampled at.
    """
    if not 0 < temperature < math.inf:
        raise SettingsError(
            f"the temperature that texts are sampled at must be above 0, and finite, not {temperature:g}"
        )
    if not prompts or not all(prompts):
        raise SettingsError("there must be prompts, of at least one token each")
    options = dict(temperature=temperature, top_k=0, top_p=1.0, max_new_tokens=length) | options
    texts: list[tuple[Tensor, int]] = []
    counted, generator = 0, torch.Generator().manual_seed(seed)
    while counted < tokens:
        drawn = [prompts[i] for i in torch.randint(len(prompts), (rows,), generator=generator).tolist()]
        batch = sample(model, drawn, seed=int(torch.randint(2**62, (), generator=generator)), **options)
        texts += batch
        counted += sum(text.numel() - start for text, start in batch)
        on_progress(counted)
    vocab_size = model.get_output_embeddings().weight.shape[0]
    return NgramTable.count(texts, vocab_size, followers=followers, source=source)


def sample(model: PreTrainedModel, prompts: Sequence[Sequence[int]], **options: Any) -> list[tuple[Tensor, int]]:
    """One batch: each prompt with what was sampled after it, on the CPU, and the place where that begins."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts], device=model.device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=model.device)
    options = dict(strategy="autoregressive", do_sample=True, return_dict_in_generate=True) | options
    out: Any = model.generate(input_ids=ids, attention_mask=mask, **options)  # type: ignore[operator]
    return [
        (row[width - len(prompt) : width + new], len(prompt))
        for row, prompt, new in zip(out.sequences.cpu(), prompts, out.report.new_tokens, strict=True)
    ]


def excerpts(text: Sequence[int], length: int) -> list[Sequence[int]]:
    """`text` cut into prompts of `length` tokens; what is left over at its end makes a shorter one."""
    return [text[at : at + length] for at in range(0, len(text), length)]
