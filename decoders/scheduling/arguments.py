"""Checks the arguments that a scheduler and its requests take besides ``generate``'s."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..common.devices import refuse_meta
from ..errors import ContextLengthError, InputError, SettingsError, UnsupportedError

_PROMPT = "pass the prompt (its text or token ids) as the first argument of submit()"
_CACHE = "a scheduler keeps the caches of texts itself; generate(strategy=…) takes a cache"
#: Arguments of ``generate`` that requests do not take, each with what to do instead.
NOT_TAKEN = {
    "input_ids": _PROMPT,
    "inputs": _PROMPT,
    "past_key_values": _CACHE,
    "inputs_embeds": "requests are token ids; generate(strategy=…) takes vectors",
    "cache": _CACHE,
    "attention_mask": "a request is one prompt without padding: submit its token ids alone, padding removed",
}


def own_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """`arguments` without the names in :data:`NOT_TAKEN`. Raises UnsupportedError if such an argument has a value other than None."""
    for name, advice in NOT_TAKEN.items():
        if arguments.get(name) is not None:
            raise UnsupportedError(f"{name} is not an argument of a request: {advice}")
    return {name: value for name, value in arguments.items() if name not in NOT_TAKEN}


def check_count(name: str, value: Any, least: int = 1) -> None:
    """Raises SettingsError unless `value` is a whole number from `least` up."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise SettingsError(f"{name} must be a whole number from {least} up, not {value!r}")


def check_number(name: str, value: Any, wanted: str, above: float = -math.inf) -> None:
    """Raises SettingsError, which says what is `wanted`, unless `value` is a number greater than `above`."""
    if not isinstance(value, Real) or isinstance(value, bool) or not float(value) > above:
        raise SettingsError(f"{name} must be {wanted}, not {value!r}")


def prompt_ids(prompt: Any, tokenizer: PreTrainedTokenizerBase | None) -> Tensor:
    """Returns the token ids of `prompt` as ``[1, P]``. The prompt is text or token ids.

    Raises:
        InputError: `prompt` is neither text nor ids, holds several prompts, is text with half of a surrogate pair, or is on the meta
            device.
        ContextLengthError: `prompt` is empty.
        UnsupportedError: `prompt` is text, and `tokenizer` is None.
    """
    if isinstance(prompt, str):
        if tokenizer is None:
            raise UnsupportedError("a prompt that is text needs a tokenizer: pass tokenizer=")
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise InputError(f"the prompt is not UTF-8 text: {error.reason} at character {error.start}") from error
        ids = tokenizer(prompt, return_tensors="pt").input_ids
    else:
        try:
            ids = torch.as_tensor(prompt)
            if not ids.dim():
                raise TypeError("a number")
        except (TypeError, ValueError, RuntimeError) as error:
            shown = repr(prompt) if len(repr(prompt)) <= 60 else f"a {type(prompt).__name__}"
            raise InputError(f"a prompt must be text, or token ids [P] or [1, P], not {shown}") from error
    refuse_meta("the prompt", ids)
    if ids.dim() not in (1, 2) or (ids.dim() == 2 and len(ids) != 1):
        raise InputError(
            f"a prompt must be text, or token ids [P] or [1, P], not {list(ids.shape)}: submit several prompts one by one"
        )
    if not ids.numel():
        raise ContextLengthError("the prompt is empty: give it at least one token, such as the BOS token")
    return ids.reshape(1, -1)
