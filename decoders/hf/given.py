"""Prompts that begin with something else than token ids: a caller's key-value cache, vectors, or the soft prompt of an adapter."""

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
from ..errors import ContextLengthError, InputError, SettingsError, UnsupportedError
from ..strategy import Strategy
from .arguments import unpad

#: The names that transformers has for the argument.
CACHES = ("past_key_values", "cache")
EMBEDDINGS = "inputs_embeds"


class Beginning(ABC):
    """The beginnings of a call's prompts.

    Attributes:
        name: of the argument that they come from.
    """

    name: str

    def prompts(
        self, input_ids: Tensor, given_mask: Tensor | None, mask: Tensor | None, inferred_from: int | None
    ) -> list[Tensor]:
        """Rows without left padding: ids, -1 for what the call names no token of.

        Args:
            input_ids: ``[B, P]``, mask: as transformers have prepared them.
            given_mask: as the caller gave it.
            inferred_from: see :func:`~decoders.hf.arguments.unpad`.
        """
        return unpad(self.whole(input_ids, given_mask), mask, inferred_from)

    def whole(self, input_ids: Tensor, mask: Tensor | None) -> Tensor:
        """Ids of all that the mask is over."""
        return input_ids

    @abstractmethod
    def read(
        self, engine: Engine, model: PreTrainedModel, mask: Tensor | None, rows: int, copies: int, side: int
    ) -> GivenPrompts:  # fmt: skip
        """The keys and values of `rows` prompts.

        Args:
            engine: of `model`.
            mask: ``[rows, …]``.
            copies: how many of these rows are one of the call's (``num_return_sequences``).
            side: of the texts, see :meth:`~decoders.engine.model.target.Target.side_of`.
        """

    def check(self, strategy: Strategy) -> None:
        """Raises UnsupportedError if `strategy` has to be shown all of a prompt."""
        if strategy.reads_prompt:
            raise UnsupportedError(
                f"strategy {strategy.name!r} learns from every token of the prompt and what the model computes there, and {self.name} "
                "holds something else: take another strategy, or pass the whole text as input_ids without it"
            )


def beginning_of(
    arguments: Mapping[str, Any], strategy: Strategy, model: PreTrainedModel, wrapper: Any
) -> Beginning | None:
    """What the prompts of a call begin with; None for ids alone.

    Args:
        strategy: of the call.
        wrapper: the ``PeftModel`` around `model`, None without one.

    Raises:
        InputError: a value of the wrong kind. SettingsError: several. UnsupportedError: it cannot be read.
    """
    given = {name: arguments[name] for name in (*CACHES, EMBEDDINGS) if arguments.get(name) is not None}
    soft = SoftPrompt.of(wrapper)
    if len(given) + (soft is not None) > 1:
        names = " and ".join([*given, *([soft.name] if soft is not None else [])])
        raise SettingsError(f"{names}: a prompt begins with one of them (cache is the newer name of past_key_values)")
    beginning: Beginning | None = soft
    for name, value in given.items():
        beginning = Embeddings.of(value, arguments, model) if name == EMBEDDINGS else CallCache.of(name, value)
    if beginning is not None:
        beginning.check(strategy)
    return beginning


@dataclass(frozen=True)
class CallCache(Beginning):
    """A cache of the caller's.

    Attributes:
        name: of the argument.
        length: tokens that it holds, padding included.
    """

    name: str
    cache: Cache
    length: int

    @staticmethod
    def of(name: str, cache: Any) -> CallCache | None:
        """None for an empty one."""
        if not isinstance(cache, Cache):
            raise InputError(
                f"{name} must be a cache of transformers (DynamicCache, StaticCache), not a {type(cache).__name__}; "
                "DynamicCache(…) takes pairs of keys and values, one for each layer"
            )
        length = cached_tokens(cache)
        return CallCache(name, cache, length) if length else None

    def whole(self, input_ids: Tensor, mask: Tensor | None) -> Tensor:
        """Ids of cached and new tokens: `input_ids` begin with the former, unless `mask` is longer than they are."""
        if mask is not None and mask.shape[1] > input_ids.shape[1]:
            return torch.cat([input_ids.new_full((len(input_ids), self.length), -1), input_ids], dim=1)
        if input_ids.shape[1] <= self.length:
            raise ContextLengthError(
                f"input_ids have {input_ids.shape[1]} tokens and {self.name} holds {self.length}: give the whole text, cached "
                "part and at least one token more; or the new tokens alone, with an attention_mask over cached and new ones"
            )
        return input_ids

    def read(
        self, engine: Engine, model: PreTrainedModel, mask: Tensor | None, rows: int, copies: int, side: int
    ) -> GivenPrompts:
        cached = check_cache(engine.target, self.cache)
        if cached not in (1, rows // copies, rows):
            raise InputError(
                f"{self.name} holds {cached} rows and there are {rows // copies} prompts: give as many, or one that all go on with"
            )
        padding = [0] * rows if mask is None else (mask == 0).sum(1).tolist()
        return GivenPrompts(self.cache, self.length, tuple(row * cached // rows for row in range(rows)), tuple(padding))


@dataclass(frozen=True)
class Embeddings(Beginning):
    """Vectors in the place of all tokens of the prompts, as the input embedding would give them.

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
                f"inputs_embeds must be vectors [rows, positions, width], at least one of each, not {said}"
            )
        mask = arguments.get("attention_mask")
        if isinstance(mask, Tensor) and mask.shape != value.shape[:2]:
            raise InputError(
                f"attention_mask is {list(mask.shape)} and inputs_embeds are {list(value.shape)}: it takes {list(value.shape[:2])}"
            )
        return Embeddings(value.to(model.device, model.dtype))

    def whole(self, input_ids: Tensor, mask: Tensor | None) -> Tensor:
        """`input_ids` stand at the end of as many places as there are vectors."""
        places = input_ids.new_full((len(input_ids), self.vectors.shape[1]), -1)
        return torch.cat([places, input_ids], dim=1)[:, input_ids.shape[1] :]

    def prompts(
        self, input_ids: Tensor, given_mask: Tensor | None, mask: Tensor | None, inferred_from: int | None
    ) -> list[Tensor]:
        text = self.whole(input_ids, given_mask)
        return unpad(text, mask if mask is not None and mask.shape == text.shape else None)

    def read(
        self, engine: Engine, model: PreTrainedModel, mask: Tensor | None, rows: int, copies: int, side: int
    ) -> GivenPrompts:
        vectors, width = self.vectors, self.vectors.shape[1]
        own = None if mask is None or mask.shape[1] != width else mask[::copies]
        padding = [0] * rows if own is None else (own == 0).sum(1).repeat_interleave(copies).tolist()
        sources = tuple(row // copies for row in range(rows))
        cache = read_vectors(engine, model, vectors[:, :-1], side, None if own is None else own[:, :-1])
        return GivenPrompts(cache, width - 1, sources, tuple(padding), vectors[list(sources), -1])


@dataclass(frozen=True)
class SoftPrompt(Beginning):
    """The learnt beginning of all prompts: what prompt tuning, p-tuning and prefix tuning of PEFT put there.

    Attributes:
        wrapper: the ``PeftModel``.
        name: with that of the method.
        length: places that it takes.
    """

    wrapper: Any
    name: str
    length: int

    @staticmethod
    def of(wrapper: Any) -> SoftPrompt | None:
        """None for adapters of layers, and within ``disable_adapter``."""
        if wrapper is None or getattr(wrapper, "_adapters_disabled", False):
            return None
        configs = (wrapper.peft_config.get(name) for name in getattr(wrapper, "active_adapters", ()))
        config = next((each for each in configs if getattr(each, "is_prompt_learning", False)), None)
        if config is None:
            return None
        kind = str(getattr(config.peft_type, "value", config.peft_type))
        if kind not in ("PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING"):
            raise UnsupportedError(
                f"{kind} of PEFT decides by more than the prompt what stands before it. Prompt tuning, p-tuning, prefix tuning and "
                "adapters of layers (LoRA and its kin) work; call generate without strategy= for this one."
            )
        return SoftPrompt(wrapper, f"the soft prompt of PEFT ({kind})", int(config.num_virtual_tokens))

    def prompts(
        self, input_ids: Tensor, given_mask: Tensor | None, mask: Tensor | None, inferred_from: int | None
    ) -> list[Tensor]:
        texts = unpad(input_ids, mask, inferred_from)
        return [torch.cat([text.new_full((self.length,), -1), text]) for text in texts]

    def read(
        self, engine: Engine, model: PreTrainedModel, mask: Tensor | None, rows: int, copies: int, side: int
    ) -> GivenPrompts:
        learnt = self.wrapper.get_prompt(batch_size=1)
        cache = (
            learnt
            if isinstance(learnt, Cache)
            else read_vectors(engine, model, learnt.to(model.device, model.dtype), side)
        )
        assert cache is not None
        check_cache(engine.target, cache)
        return GivenPrompts(cache, self.length, (0,) * rows, (0,) * rows)


def read_vectors(
    engine: Engine, model: PreTrainedModel, vectors: Tensor, side: int, mask: Tensor | None = None
) -> Cache | None:  # fmt: skip
    """What the own forward pass of `model` stores of `vectors` ``[B, P, H]``; None for no places.

    Args:
        engine: of `model`, whose weights are used.
        side: of the texts.
        mask: ``[B, P]``, zeros for left padding.

    Raises:
        UnsupportedError: the design reads no vectors.
    """
    if not vectors.shape[1]:
        return None
    with engine.decoding(side), refusing(model, "does not read vectors in the place of tokens"):
        cache = engine.own_forward(model, engine.target).read_vectors(vectors, mask)
        check_cache(engine.target, cache)
    return cache
