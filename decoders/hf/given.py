"""A caller's key-value cache, which holds the beginnings of the prompts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from ..engine.model.given import GivenCache, cached_tokens, check_cache
from ..engine.model.target import Target
from ..errors import ContextLengthError, InputError, SettingsError, UnsupportedError
from ..strategy import Strategy

#: The names that transformers has for the argument.
CACHES = ("past_key_values", "cache")


@dataclass(frozen=True)
class CallCache:
    """The cache of a call.

    Attributes:
        cache: of the caller.
        length: tokens that it holds, padding included.
    """

    cache: Cache
    length: int

    @staticmethod
    def of(arguments: Mapping[str, Any], strategy: Strategy) -> CallCache | None:
        """None where a call brings none, or an empty one.

        Raises:
            InputError: something else. SettingsError: two of them. UnsupportedError: it cannot be read, or `strategy` has to read all
                of a prompt.
        """
        given = {name: arguments[name] for name in CACHES if arguments.get(name) is not None}
        if not given:
            return None
        if len(given) > 1:
            raise SettingsError(
                "past_key_values= and cache= are one argument, of which cache is the newer name: give one"
            )
        ((name, cache),) = given.items()
        if not isinstance(cache, Cache):
            raise InputError(
                f"{name} must be a cache of transformers (DynamicCache, StaticCache), not a {type(cache).__name__}; "
                "DynamicCache(…) takes pairs of keys and values, one for each layer"
            )
        length = cached_tokens(cache)
        if not length:
            return None
        if strategy.reads_prompt:
            raise UnsupportedError(
                f"strategy {strategy.name!r} learns from what the model computes for every token of the prompt, and {name} holds keys "
                "and values alone: take another strategy, or pass the whole text as input_ids without it"
            )
        return CallCache(cache, length)

    def whole(self, input_ids: Tensor, mask: Tensor | None) -> Tensor:
        """Ids of cached and new tokens; -1 for cached tokens that the call does not name.

        Args:
            input_ids: ``[B, P]``, which begin with the cached tokens, unless
            mask: of the call is longer than they are: then it is over cached and new ones.

        Raises:
            ContextLengthError: there is nothing behind the cached tokens.
        """
        if mask is not None and mask.shape[1] > input_ids.shape[1]:
            return torch.cat([input_ids.new_full((len(input_ids), self.length), -1), input_ids], dim=1)
        if input_ids.shape[1] <= self.length:
            raise ContextLengthError(
                f"input_ids have {input_ids.shape[1]} tokens and past_key_values holds {self.length}: give the whole text, cached "
                "part and at least one token more; or the new tokens alone, with an attention_mask over cached and new ones"
            )
        return input_ids

    def beginnings(self, target: Target, mask: Tensor | None, rows: int, copies: int) -> GivenCache:
        """What it holds of `rows` prompts.

        Args:
            mask: ``[rows, …]``, over cached and new tokens.
            copies: how many of these rows are one of the call's (``num_return_sequences``).

        Raises:
            InputError: it is no cache of such prompts. UnsupportedError: it cannot be read.
        """
        cached = check_cache(target, self.cache)
        if cached not in (1, rows // copies, rows):
            raise InputError(
                f"past_key_values holds {cached} rows and there are {rows // copies} prompts: give as many, or one that all go on with"
            )
        padding = [0] * rows if mask is None else (mask == 0).sum(1).tolist()
        return GivenCache(self.cache, self.length, tuple(row * cached // rows for row in range(rows)), tuple(padding))
