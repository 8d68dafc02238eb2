"""Prompts that begin with something other than token ids: a caller's key-value cache, input embeddings, or a PEFT soft prompt."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from ..engine.decode.engine import Engine
from ..engine.model.given import GivenPrompts, cached_tokens, check_cache
from ..engine.model.layout import refusing
from ..errors import ContextLengthError, InputError, SettingsError, UnsupportedError, amount
from ..strategy import Strategy
from .arguments import unpad

#: transformers' names of the argument for a cache.
CACHES = ("past_key_values", "cache")
EMBEDDINGS = "inputs_embeds"


class Beginning(ABC):
    """How the prompts of a call begin.

    Attributes:
        name: the argument that holds the beginning.
    """

    name: str

    @abstractmethod
    def prompts(
        self, input_ids: Tensor, given_mask: Tensor | None, mask: Tensor | None, inferred_from: int | None
    ) -> list[Tensor]:
        """The token ids of each row's prompt without left padding; -1 at positions without a token id.

        Args:
            input_ids, mask: ``[B, P]``, as transformers prepared them.
            given_mask: the caller's mask.
            inferred_from: see :func:`~decoders.hf.arguments.unpad`.
        """

    @abstractmethod
    def read(
        self, engine: Engine, model: PreTrainedModel, mask: Tensor | None, rows: int, copies: int, rope_table: int
    ) -> GivenPrompts:  # fmt: skip
        """The keys and values of the prompts' beginnings, for all rows.

        Args:
            engine: the engine of `model`.
            mask: attention mask ``[rows, …]``; None: no padding.
            rows: number of rows.
            copies: number of rows per prompt (``num_return_sequences``).
            rope_table: index of the model's rotary table for the call, from :meth:`~decoders.engine.model.target.Target.rope_table_of`.
        """


def beginning_of(
    arguments: Mapping[str, Any], strategy: Strategy, model: PreTrainedModel, wrapper: Any
) -> Beginning | None:
    """How the prompts of a call begin; None if they are token ids alone.

    Args:
        wrapper: the ``PeftModel`` around `model`, or None.

    Raises:
        InputError: a value has a wrong type or shape. SettingsError: several beginnings are given. UnsupportedError: the loop cannot
            read the beginning, or `strategy` must read every token of a prompt.
    """
    given = {name: arguments[name] for name in (*CACHES, EMBEDDINGS) if arguments.get(name) is not None}
    soft = SoftPrompt.of(wrapper)
    if len(given) + (soft is not None) > 1:
        names = " and ".join([*given, *([soft.name] if soft is not None else [])])
        raise SettingsError(f"give only one beginning, not {names} (cache is the newer name of past_key_values)")
    beginning: Beginning | None = soft
    for name, value in given.items():
        beginning = Embeddings.of(value, arguments, model) if name == EMBEDDINGS else CallCache.of(name, value)
    if beginning is not None and strategy.reads_prompt:
        raise UnsupportedError(
            f"strategy {strategy.name!r} must read every token of the prompt, and {beginning.name} holds no token ids: take another "
            f"strategy, or pass the whole text as input_ids without {beginning.name}"
        )
    return beginning


@dataclass(frozen=True)
class CallCache(Beginning):
    """The caller's key-value cache.

    Attributes:
        name: the argument that holds the cache.
        length: number of tokens in the cache, padding included.
    """

    name: str
    cache: Cache
    length: int

    @staticmethod
    def of(name: str, cache: Any) -> CallCache | None:
        """Returns the beginning for the argument `name` with the value `cache`; None for an empty cache."""
        if not isinstance(cache, Cache):
            raise InputError(
                f"{name} must be a cache of transformers (DynamicCache, StaticCache), not a {type(cache).__name__}; "
                "DynamicCache(…) takes pairs of keys and values, one for each layer"
            )
        length = cached_tokens(cache)
        return CallCache(name, cache, length) if length else None

    def prompts(
        self, input_ids: Tensor, given_mask: Tensor | None, mask: Tensor | None, inferred_from: int | None
    ) -> list[Tensor]:
        if given_mask is not None and given_mask.shape[1] > input_ids.shape[1]:  # `input_ids` are the new tokens alone
            input_ids = torch.cat([input_ids.new_full((len(input_ids), self.length), -1), input_ids], dim=1)
        elif input_ids.shape[1] <= self.length:
            raise ContextLengthError(
                f"input_ids have {amount(input_ids.shape[1], 'token')} and {self.name} holds {self.length}: pass the cached tokens and "
                "at least one new token as input_ids, or only new tokens with an attention_mask over the cached and the new tokens"
            )
        return unpad(input_ids, mask, inferred_from)

    def read(
        self, engine: Engine, model: PreTrainedModel, mask: Tensor | None, rows: int, copies: int, rope_table: int
    ) -> GivenPrompts:
        cached = check_cache(engine.target, self.cache)
        if cached not in (1, rows // copies, rows):
            raise InputError(
                f"{self.name} holds {amount(cached, 'row')} for {amount(rows // copies, 'prompt')}: give a row for each prompt, or one "
                "row for all prompts"
            )
        padding = [0] * rows if mask is None else (mask == 0).sum(1).tolist()
        return GivenPrompts(self.cache, self.length, tuple(row * cached // rows for row in range(rows)), tuple(padding))


@dataclass(frozen=True)
class Embeddings(Beginning):
    """The prompts as embedding vectors, like the output of the model's input embedding, instead of token ids.

    Attributes:
        vectors: ``[B, P, H]``.
    """

    vectors: Tensor
    name: str = EMBEDDINGS

    @staticmethod
    def of(value: Any, arguments: Mapping[str, Any], model: PreTrainedModel) -> Embeddings:
        if not isinstance(value, Tensor) or value.dim() != 3 or not value.is_floating_point() or not value.shape[1]:
            said = f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise InputError(
                f"inputs_embeds must be floating-point vectors [rows, positions, width], at least one per row, not {said}"
            )
        mask = arguments.get("attention_mask")
        if isinstance(mask, Tensor) and mask.shape != value.shape[:2]:
            raise InputError(
                f"attention_mask is {list(mask.shape)} and inputs_embeds {list(value.shape)}: a mask must be {list(value.shape[:2])}"
            )
        return Embeddings(value.to(model.device, model.dtype))

    def prompts(
        self, input_ids: Tensor, given_mask: Tensor | None, mask: Tensor | None, inferred_from: int | None
    ) -> list[Tensor]:
        places = input_ids.new_full((len(input_ids), self.vectors.shape[1]), -1)
        text = torch.cat([places, input_ids], dim=1)[:, input_ids.shape[1] :]  # as many ids as vectors
        return unpad(text, mask if mask is not None and mask.shape == text.shape else None)

    def read(
        self, engine: Engine, model: PreTrainedModel, mask: Tensor | None, rows: int, copies: int, rope_table: int
    ) -> GivenPrompts:
        vectors, width = self.vectors, self.vectors.shape[1]
        own = None if mask is None or mask.shape[1] != width else mask[::copies]
        padding = [0] * rows if own is None else (own == 0).sum(1).repeat_interleave(copies).tolist()
        sources = tuple(row // copies for row in range(rows))
        cache = read_vectors(engine, model, vectors[:, :-1], rope_table, None if own is None else own[:, :-1])
        return GivenPrompts(cache, width - 1, sources, tuple(padding), vectors[list(sources), -1])


@dataclass(frozen=True)
class SoftPrompt(Beginning):
    """The learnt beginning of all prompts, from PEFT's prompt tuning, p-tuning or prefix tuning.

    Attributes:
        wrapper: the ``PeftModel``.
        name: name of PEFT's method, for errors.
        length: number of virtual tokens.
    """

    wrapper: Any
    name: str
    length: int

    @staticmethod
    def of(wrapper: Any) -> SoftPrompt | None:
        """The active soft prompt; None within ``disable_adapter``, and if the active adapters only change layers."""
        if wrapper is None or getattr(wrapper, "_adapters_disabled", False):
            return None
        configs = (wrapper.peft_config.get(name) for name in getattr(wrapper, "active_adapters", ()))
        config = next((each for each in configs if getattr(each, "is_prompt_learning", False)), None)
        if config is None:
            return None
        kind = str(getattr(config.peft_type, "value", config.peft_type))
        if kind not in ("PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING"):
            raise UnsupportedError(
                f"{kind} of PEFT is not supported: the loop reads prompt tuning, p-tuning, prefix tuning, and adapters of layers "
                "(LoRA and its variants). Call generate without strategy= for this adapter."
            )
        return SoftPrompt(wrapper, f"the soft prompt of PEFT ({kind})", int(config.num_virtual_tokens))

    def prompts(
        self, input_ids: Tensor, given_mask: Tensor | None, mask: Tensor | None, inferred_from: int | None
    ) -> list[Tensor]:
        texts = unpad(input_ids, mask, inferred_from)
        return [torch.cat([text.new_full((self.length,), -1), text]) for text in texts]

    def read(
        self, engine: Engine, model: PreTrainedModel, mask: Tensor | None, rows: int, copies: int, rope_table: int
    ) -> GivenPrompts:
        learnt = self.wrapper.get_prompt(batch_size=1)
        cache = (
            learnt
            if isinstance(learnt, Cache)
            else read_vectors(engine, model, learnt.to(model.device, model.dtype), rope_table)
        )
        assert cache is not None
        check_cache(engine.target, cache)
        return GivenPrompts(cache, self.length, (0,) * rows, (0,) * rows)


def read_vectors(
    engine: Engine, model: PreTrainedModel, vectors: Tensor, rope_table: int, mask: Tensor | None = None
) -> Cache | None:  # fmt: skip
    """Runs transformers' forward pass of `model` on `vectors` ``[B, P, H]``. Returns the filled cache; None if P is 0.

    Args:
        engine: the engine of `model`.
        rope_table: index of the model's rotary table for the call, from :meth:`~decoders.engine.model.target.Target.rope_table_of`.
        mask: ``[B, P]``, zeros for left padding.

    Raises:
        UnsupportedError: the model does not accept vectors in the place of tokens.
    """
    if not vectors.shape[1]:
        return None
    with engine.decoding(rope_table), refusing(model, "does not accept inputs_embeds instead of tokens"):
        cache = engine.own_forward(model, engine.target).read_vectors(vectors, mask)
        check_cache(engine.target, cache)
    return cache
