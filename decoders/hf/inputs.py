"""Prompts as the caller gave them: checked, and without their padding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..engine.model.layout import context_length, embeddings_of
from ..errors import ContextLengthError, InputError, UnsupportedError

#: What an embedding takes.
ID_TYPES = (torch.int64, torch.int32)


def check_inputs(model: PreTrainedModel, input_ids: Any, attention_mask: Any) -> None:
    """Raises what is wrong with the prompts, before anything is touched; None is left to transformers.

    Args:
        input_ids: ``[B, P]``.
        attention_mask: ``[B, P]`` of zeros and ones.

    Raises:
        InputError: not a tensor, another shape or dtype, an id outside the vocabulary, a mask that is no mask.
        ContextLengthError: there is no prompt.
    """
    if input_ids is None:
        return
    if not isinstance(input_ids, Tensor):
        raise InputError(f"input_ids must be a tensor [rows, tokens], not {_kind(input_ids)}")
    if input_ids.dim() != 2:
        raise InputError(f"input_ids must be [rows, tokens], not {list(input_ids.shape)}")
    if input_ids.dtype not in ID_TYPES:
        raise InputError(f"input_ids must be {' or '.join(map(str, ID_TYPES))}, not {input_ids.dtype}")
    if not input_ids.numel():
        raise ContextLengthError(
            f"input_ids are empty, {list(input_ids.shape)}: give every row at least one token (the BOS token, say)"
        )
    vocabulary = embeddings_of(model)
    low, high = (int(value) for value in torch.aminmax(input_ids))
    if low < 0 or high >= vocabulary:
        row, place = ((input_ids < 0) | (input_ids >= vocabulary)).nonzero()[0].tolist()
        raise InputError(
            f"token id {int(input_ids[row, place])} (row {row}, place {place}) is outside the model's vocabulary, "
            f"0 to {vocabulary - 1}: was the text encoded with another model's tokenizer?"
        )
    if attention_mask is not None:
        _check_mask(attention_mask, input_ids)


def _check_mask(mask: Any, input_ids: Tensor) -> None:
    if not isinstance(mask, Tensor):
        raise InputError(f"attention_mask must be a tensor of zeros and ones, not {_kind(mask)}")
    if mask.shape != input_ids.shape:
        raise InputError(
            f"attention_mask is {list(mask.shape)} and input_ids are {list(input_ids.shape)}: shapes must be equal"
        )
    wrong = (mask != 0) & (mask != 1)  # NaN is neither
    if wrong.any():
        row, place = wrong.nonzero()[0].tolist()
        raise InputError(f"attention_mask holds {mask[row, place].item()} (row {row}, place {place}): it takes 0 and 1")


def _kind(value: Any) -> str:
    return f"a {type(value).__name__}"


def unpad(input_ids: Tensor, attention_mask: Tensor | None, inferred_from: int | None = None) -> list[Tensor]:
    """Rows of ``[B, P]`` without their left padding.

    Args:
        attention_mask: ``[B, P]`` of zeros and ones.
        inferred_from: the padding token by which transformers made the mask, None if the user gave it.

    Raises:
        ContextLengthError: a row is empty. UnsupportedError: a mask with holes or right padding.
    """
    if attention_mask is None:
        return list(input_ids)
    mask = attention_mask.bool()
    holes = mask[:, 1:] < mask[:, :-1]
    if holes.any() and inferred_from is not None:
        row, place = holes.nonzero()[0].tolist()
        raise UnsupportedError(
            f"input_ids hold pad_token_id {inferred_from} behind other tokens (row {row}, place {place + 1}), and without an "
            "attention_mask transformers takes it for padding: pass attention_mask=torch.ones_like(input_ids) if it is text, else "
            "pad rows on the left (tokenizer.padding_side='left')"
        )
    if holes.any():
        raise UnsupportedError(
            "attention_mask has zeros after ones: rows must be padded on the left (tokenizer.padding_side='left')"
        )
    return [ids[keep] for ids, keep in zip(input_ids, mask, strict=True)]


def check_lengths(model: PreTrainedModel, prompts: list[Tensor], new_tokens: int) -> None:
    """Raises ContextLengthError if a prompt is empty or prompt and new tokens do not fit the model's positions.

    The last new token needs no position: nothing comes after it.
    """
    longest, context = max(len(p) for p in prompts), context_length(model)
    if min(len(p) for p in prompts) == 0:
        raise ContextLengthError("a prompt is empty: give every row at least one token (the BOS token, say)")
    if longest + max(new_tokens - 1, 0) > context:
        raise ContextLengthError(
            f"{longest} prompt tokens plus {new_tokens} new ones exceed the model's context of {context}: "
            f"max_new_tokens can be {max(context + 1 - longest, 0)} at most"
        )


def check_pad_token(model: PreTrainedModel, pad_token: int) -> None:
    """Raises InputError if ended rows cannot be padded with `pad_token`, since the model cannot read it."""
    vocabulary = embeddings_of(model)
    if not 0 <= pad_token < vocabulary:
        raise InputError(
            f"pad_token_id {pad_token} is outside the model's vocabulary, 0 to {vocabulary - 1}, and rows that end before others "
            "are padded with it: take a token of the model's, eos_token_id, say"
        )
