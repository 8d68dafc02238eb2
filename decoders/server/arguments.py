"""Converts sampling fields, penalties, biases and stop strings in a request's body to arguments of ``generate``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    SequenceBiasLogitsProcessor,
    StoppingCriteria,
)

from ..enabling import TokenPenalties
from ..scheduling import TextPieces
from .bodies import Body
from .refusals import wrong

#: Below this temperature decoding is greedy: sampling would draw the likeliest token anyway, and logits divided by a much lower
#: temperature overflow float32.
LEAST_TEMPERATURE = 1e-5


def sampling(body: Body, model: PreTrainedModel) -> dict[str, Any]:
    """The sampling arguments of ``generate`` for a body. Values that the body leaves out come from the model's generation config."""
    more = {"repetition_penalty": body.repetition_penalty} if body.repetition_penalty not in (None, 1) else {}
    named = {"temperature": body.temperature, "top_p": body.top_p, "top_k": body.top_k, "min_p": body.min_p}
    given = {name: value for name, value in named.items() if value is not None}
    if not given:
        return more
    if given.get("temperature", 1) < LEAST_TEMPERATURE:
        return {"do_sample": False, **dict.fromkeys(named), **more}
    top_k = given.get("top_k", model.generation_config.top_k or 0)
    return {"do_sample": True, **given, "top_k": max(top_k, 0), **more}  # without top_k, transformers would take 50


@dataclass(frozen=True)
class Stops:
    """The stop strings of a request.

    Attributes:
        strings: the stop strings.
        special: special tokens whose names occur in the stop strings. The text searched for stop strings contains the names
            of these special tokens, and of no others.
    """

    strings: tuple[str, ...] = ()
    special: frozenset[int] = frozenset()

    @staticmethod
    def of(strings: Iterable[str], special: Mapping[str, int]) -> Stops:
        """The :class:`Stops` for `strings`. special: the model's special tokens by name."""
        strings = tuple(strings)
        return Stops(strings, named_tokens(special, strings))


def named_tokens(special: Mapping[str, int], texts: Iterable[str]) -> frozenset[int]:
    """The ids of special tokens whose full name occurs in one of the `texts`. special: token ids by name."""
    texts = tuple(texts)
    return frozenset(token for name, token in special.items() if name and any(name in text for text in texts))


def callbacks(body: Body, tokenizer: PreTrainedTokenizerBase, prompt: int, stops: Stops) -> dict[str, Any]:
    """Arguments of ``generate`` for a body's stop strings, penalties and biases. prompt: number of prompt tokens."""
    arguments: dict[str, Any] = {}
    if stops.strings:
        arguments["stopping_criteria"] = [StopStrings(tokenizer, stops, prompt)]
    bias = _bias(body, len(tokenizer))
    processors: list[LogitsProcessor] = []
    if body.frequency_penalty or body.presence_penalty:
        processors.append(TokenPenalties(prompt, body.frequency_penalty or 0.0, body.presence_penalty or 0.0))
    if bias:
        processors.append(SequenceBiasLogitsProcessor([[[token], float(value)] for token, value in bias.items()]))
    return arguments | ({"logits_processor": processors} if processors else {})


def _bias(body: Body, size: int) -> dict[int, float]:
    bias = {}
    for token, value in (body.logit_bias or {}).items():
        if not (token.isascii() and token.isdigit() and len(token) < 10 and int(token) < size):
            raise wrong("logit_bias", f"{token!r} is not a token id from 0 to {size - 1}")
        bias[int(token)] = value
    return bias


def wrapped(seed: int) -> int:
    """`seed` wrapped to a signed integer of 64 bits."""
    return (seed + 2**63) % 2**64 - 2**63


class StopStrings(StoppingCriteria):
    """Ends the text of one row as soon as the new text contains a stop string.

    transformers' own criterion also finds strings that begin in the prompt, and analyses the vocabulary for every new list of strings,
    which takes seconds if the vocabulary is large.

    Args:
        prompt: number of prompt tokens.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: Stops, prompt: int) -> None:
        self.tokenizer, self.stops, self.prompt = tokenizer, stops, prompt
        self.longest = max(map(len, stops.strings))
        self._begin([])

    def _begin(self, prompt: list[int]) -> None:
        self._pieces, self._tokens, self._tail = TextPieces(self.tokenizer, prompt, self.stops.special), list[int](), ""

    def __call__(self, input_ids: Tensor, scores: Any, **more: Any) -> Tensor:
        count = input_ids.shape[1] - self.prompt
        if count == 1 or count != len(self._tokens) + 1:  # the text was replaced or cut, so all of it is decoded again
            self._begin(input_ids[0, : self.prompt].tolist())
        self._tokens += input_ids[0, self.prompt + len(self._tokens) :].tolist()
        piece = self._pieces.next(self._tokens, False)
        text = self._tail + piece
        stops_here = any(stop in text + self._pieces.held for stop in self.stops.strings)
        self._tail = text[-self.longest :]
        return torch.full((len(input_ids),), stops_here, device=input_ids.device)
