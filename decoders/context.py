"""The context of a call: the data and functions that a strategy gets from the loop at the start of a call."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .errors import UnsupportedError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from .costs import StepCosts
    from .drafters import Forced, OpensDraft, OpensModule, OtherVocabulary
    from .sampling import SamplingInputs, SamplingPlan
    from .sequences import Sequences
    from .settings import Configured


def _outside_a_call(*args: Any, **kwargs: Any) -> Any:
    raise UnsupportedError(
        "this Context was created outside a call: only a call's has draft models, the target's layers and head, and strategies by name"
    )


def _same_vocabulary(model: PreTrainedModel | str) -> None:
    """The default of :attr:`Context.vocabulary_of`, outside a call. Returns None, as if all draft models had the target's token ids."""


def no_costs(measure: bool = False) -> None:
    """The value of :attr:`Context.costs` outside a call, and for strategies that draft for a draft model. Returns None."""


def no_memory(key: str, factory: Callable[[], Any], of: Configured | None = None) -> Any:
    """The value of :attr:`Context.memory` if nothing is kept between calls. Returns a new object from `factory`.

    Used outside a call, for strategies that draft for a draft model, and with the setting ``memory=False``.
    """
    return factory()


@dataclass(frozen=True)
class Context:
    """The inputs from which a strategy prepares its state, once per ``generate`` call.

    Attributes:
        model: the user's model. Strategies read its weights and config, but must not change it.
        tokenizer: the tokenizer given to ``enable`` or ``generate``, if any.
        assistant_model: the ``assistant_model=`` of the call, if any.
        rows: number of rows ``B``.
        slots: capacity of each row in tokens, prompt included.
        device: device of the loop's tensors.
        vocab_size: size ``V`` of the target's logits.
        compile: compiles a tensor function without graph breaks and with dynamic sizes, once per model. In an uncompiled call it
            returns the function unchanged. The time of the function's first call is reported as compile time.
        draft: opens a draft model for this call: ``draft(model, ahead=K)`` returns a :class:`~decoders.drafters.Drafter`; see
            :class:`~decoders.drafters.OpensDraft`.
        vocabulary_of: compares the vocabularies of a draft model and the target. ``vocabulary_of(model)`` returns an
            :class:`~decoders.drafters.OtherVocabulary` if their token ids differ. It returns None if the ids are the same, or if
            there are no tokenizers to compare. `draft` also takes a model with another vocabulary, if the vocabularies share enough
            tokens.
        strategy: creates a strategy from a registry name and settings, for strategies that are composed of others.
        sequences: the rows at the start of the call, which hold only prompts; None in a context created outside a call.
        coupled: whether drafters and target draw tokens with the same noise, so that they are likely to draw the same token. If
            False, sampled drafts must have :attr:`Draft.scores`.
        level: 0 if the strategy drafts for the target, 1 if it drafts for the target's draft model, and so on.
        plan: the operations on the target's logits before a token is chosen (:func:`decoders.sampling.process`). Strategies that
            compute scores apply the same operations. None: greedy decoding without operations.
        sampling: the tensors that `plan` reads: the rows' temperatures and other parameters, and noise keys.
        guide: looks up the tokens that the rows' grammars force (:class:`~decoders.drafters.Forced`); None without ``grammar=``.
            Strategies may draft tokens that the grammar forbids, because the loop removes them.
        decoder_layers: number of the target's decoder layers, for :attr:`Strategy.hidden_layers`.
        costs: the seconds that a step takes on this machine, depending on the number of nodes that the step verifies. ``costs()``
            returns a :class:`decoders.costs.StepCosts`, which the loop updates during the call, or None if nothing was measured.
            ``costs(measure=True)`` first measures steps of several sizes.
        memory: keeps objects between calls on the model. ``memory(key, factory)`` returns the object that `factory` created in the
            first call with this `key`, this strategy class and these settings. The object must not change which tokens are written.
            If many objects are kept, the least recently used are dropped. :func:`decoders.forget` and :func:`decoders.release` drop
            all. With the setting ``memory=False``, and for strategies that draft for a draft model, every call gets a new object.
        texts: the texts given to :func:`decoders.remember`, in a :class:`~decoders.text_memory.TextMemory`. All calls and strategies
            share it. None without texts, and for strategies that draft for a draft model.
        embed: the target's embedding module: ``embed(tokens)``, ``[…]`` int64 to ``[…, H]``. A factor that the model applies
            afterwards (as Gemma-2 does) is not included.
        head: the target's output head: ``head(hidden)``, ``[B, N, H]`` (as :attr:`Step.hidden`) to logits ``[B, N, V]`` float32. A
            soft cap or factor that the model applies afterwards is included.
        module: prepares a drafting network that is not a language model. ``module(module, ahead=K, example=(…))`` returns
            :class:`~decoders.drafters.ModulePasses`; see :class:`~decoders.drafters.OpensModule`.
        new_tokens: greatest number of tokens that a row may write. None in a scheduler, whose requests join and leave the batch; in a
            call of ``generate``, all rows begin together, and the call ends with its slowest row.
        clock: returns the time in seconds, for strategies that decide by time (:attr:`Strategy.timed`). All processes that share the
            target get the time of the first process, so every process must call the clock equally often.
        first_layers: ``first_layers(count)`` returns a draft model for :attr:`draft`: the target's first `count` layers with its last
            norm and head. It shares the target's weights and KV cache, so it need not read the prompts. If a strategy opens several of
            these draft models, each must finish its draft before the next begins.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    assistant_model: PreTrainedModel | None
    rows: int
    slots: int
    device: torch.device
    vocab_size: int
    compile: Callable[[Callable[..., Any]], Callable[..., Any]]
    draft: OpensDraft = _outside_a_call
    vocabulary_of: Callable[[PreTrainedModel | str], OtherVocabulary | None] = _same_vocabulary
    strategy: Callable[..., Any] = _outside_a_call
    sequences: Sequences | None = None
    coupled: bool = True
    level: int = 0
    plan: SamplingPlan | None = None
    sampling: SamplingInputs | None = None
    guide: Forced | None = None
    decoder_layers: int = 0
    costs: Callable[..., StepCosts | None] = no_costs
    memory: Callable[..., Any] = no_memory
    texts: Any = None
    embed: Callable[[Tensor], Tensor] = _outside_a_call
    head: Callable[[Tensor], Tensor] = _outside_a_call
    module: OpensModule = _outside_a_call
    new_tokens: int | None = None
    clock: Callable[[], float] = time.perf_counter
    first_layers: Callable[[int], PreTrainedModel] = _outside_a_call

    def part(self, strategy: Configured, seldom: bool = False) -> Context:
        """Returns the context for `strategy`, a part of a composed strategy. Each part has objects of its own in :attr:`memory`.

        Args:
            seldom: whether the part may draft late or never, as in ``auto``. If True, its draft models read the prompts when they first
                draft, not at the start of the call.
        """
        draft = partial(self.draft, seldom=True) if seldom else self.draft
        return replace(self, memory=partial(self.memory, of=strategy), draft=draft)
