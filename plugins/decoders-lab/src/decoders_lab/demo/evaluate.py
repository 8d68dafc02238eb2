"""Computes figures on the held-out files: loss, bits per byte, the agreement of draft and target, and how much of the text loops."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch

from decoders.bench.repetition import in_loops
from decoders.demo.data import Source
from decoders.training.texts import own_texts

from .batches import encode

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast


def windows(
    sources: list[Source], tokenizer: PreTrainedTokenizerFast, *, length: int = 512, rows: int = 8
) -> Iterator[torch.Tensor]:
    """Yields the sources as ids [B, T + 1] int64. Every token is predicted once; the last, shorter window is a batch of its own."""
    ids = torch.from_numpy(encode(tokenizer, (source.text for source in sources)).astype(np.int64))
    whole = (len(ids) - 1) // length
    cut = [ids[k * length : (k + 1) * length + 1] for k in range(whole)]
    for first in range(0, whole, rows):
        yield torch.stack(cut[first : first + rows])
    if whole * length + 1 < len(ids):
        yield ids[None, whole * length :]


def evaluate(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, sources: list[Source], *, length: int = 512
) -> dict[str, float]:
    """Figures of `sources` by name: `loss` (nats per token), `bits_per_byte`, `accuracy` (greedy next token), `tokens`, `bytes`."""
    total, correct, count = 0.0, 0, 0
    with torch.no_grad():
        for ids in windows(sources, tokenizer, length=length):
            logits = model(input_ids=ids[:, :-1], use_cache=False).logits.float()
            labels = ids[:, 1:]
            total += torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum").item()
            correct += int((logits.argmax(-1) == labels).sum())
            count += labels.numel()
    size = sum(len(source.text.encode()) for source in sources)
    return {
        "loss": total / count,
        "bits_per_byte": total / math.log(2) / size,
        "accuracy": correct / count,
        "tokens": count,
        "bytes": size,
    }


def agreement(
    draft: PreTrainedModel,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    sources: list[Source],
    *,
    length: int = 512,
) -> float:
    """Share of held-out positions where draft and target choose the same greedy token: an estimate of acceptance."""
    same, count = 0, 0
    with torch.no_grad():
        for ids in windows(sources, tokenizer, length=length):
            chosen = [model(input_ids=ids[:, :-1], use_cache=False).logits.argmax(-1) for model in (draft, target)]
            same += int((chosen[0] == chosen[1]).sum())
            count += chosen[0].numel()
    return same / count


def looping(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    sources: list[Source],
    *,
    prompt: int = 64,
    length: int = 256,
    rows: int = 64,
) -> float:
    """The share of looping tokens among the new tokens of greedy texts; nan if the sources are shorter than `length` tokens.

    At most `rows` texts are written. Each begins with the first `prompt` tokens of a window, and ends at `length` tokens. The windows
    are spread over the sources.
    """

    cut = [ids[:, :length] for ids in windows(sources, tokenizer, length=length, rows=1) if ids.shape[1] > length]
    if not cut:
        return math.nan
    beginnings = torch.cat(cut[:: math.ceil(len(cut) / rows)])
    return in_loops(own_texts(model, beginnings, 1.0, prompt).ids)[:, prompt:].float().mean().item()
