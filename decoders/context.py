"""The context that a strategy gets at the start of a call."""

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
    from .draft import Sequences
    from .drafters import Forced, OpensDraft, OpensModule, OtherVocabulary
    from .sampling import SamplingInputs, SamplingPlan
    from .settings import Configured


def _outside_a_call(*args: Any, **kwargs: Any) -> Any:
    raise UnsupportedError("this Context was made by hand; draft models and strategies by name exist in a call only")


def _same_vocabulary(model: PreTrainedModel | str) -> None:
    """For contexts created outside a call."""


def no_costs(measure: bool = False) -> None:
    """For contexts created outside a call, and for draft models."""


def no_memory(key: str, factory: Callable[[], Any], of: Configured | None = None) -> Any:
    """For contexts created outside a call, for draft models, and with the setting ``memory=False``: nothing is kept."""
    return factory()


@dataclass(frozen=True)
class Context:
    """Everything a strategy may use to prepare its state, once per ``generate`` call.

    Attributes:
        model: the user's model, for its weights and config; do not change either.
        tokenizer: the tokenizer given to ``enable`` or ``generate``, if any.
        assistant_model: the ``assistant_model=`` of the call, if any.
        rows: number of rows ``B``.
        slots: capacity of each row in tokens, prompt included.
        device: of the loop's tensors.
        vocab_size: size ``V`` of the target's logits.
        compile: compiles a plain tensor function without graph breaks, once per model, with dynamic sizes; returns it
            unchanged if the call runs uncompiled. The time of the first call is booked as compile time.
        draft: opens a draft model for this call: ``draft(model, ahead=K)`` returns a :class:`~decoders.drafters.Drafter`; see
            :class:`~decoders.drafters.OpensDraft`.
        vocabulary_of: the tokens of a draft model whose ids differ from the target's: ``vocabulary_of(model)`` returns an
            :class:`~decoders.drafters.OtherVocabulary`, or None if the ids are the same or there are no tokenizers to compare.
            `draft` takes such a model too, if the two have enough tokens in common.
        strategy: creates a strategy from a registry name and settings, for strategies that are built of others.
        sequences: the rows at the start, prompts only; None in a context created outside a call.
        coupled: whether target and drafts share their noise, so that a draft token drawn with it is likely the target's token. If
            not, sampled drafts must give their scores (:attr:`Draft.scores`).
        level: 0 if the strategy drafts for the target, 1 if it drafts for the target's draft model, and so on.
        plan: the operations on the target's logits before a token is chosen (:func:`decoders.sampling.process`), for strategies
            with scores of their own. None: greedy, without operations.
        sampling: the rows' parameters of that plan.
        guide: the rows' positions in their grammars, and the text these force (:class:`~decoders.drafters.Forced`); None without
            ``grammar=``. Strategies need not avoid illegal draft tokens: the loop removes them.
        decoder_layers: number of the target's decoder layers, to which :attr:`Strategy.hidden_layers` refers.
        costs: the cost of a verification step on this machine, by nodes: ``costs()`` returns a :class:`decoders.costs.StepCosts`,
            which the loop updates during the call, or None if nothing was ever measured; ``costs(measure=True)`` first measures
            steps of several sizes.
        memory: what this strategy keeps between calls on the model: ``memory(key, factory)`` returns the object that `factory` created
            in the first call with a strategy of this class and these settings that asked for `key`. Its contents must not change
            the tokens. The least recently used ones are dropped when there are many; :func:`decoders.forget` and
            :func:`decoders.release` drop all. With the setting ``memory=False``, and for a draft model's strategies, every call
            gets a new one.
        texts: the texts given to :func:`decoders.remember`, for all calls and strategies, in a
            :class:`~decoders.text_memory.TextMemory`; None without texts, and for a draft model's strategies.
        embed: the target's input embedding: ``embed(tokens)``, ``[…]`` int64 to ``[…, H]``, exactly its embedding module, without
            what the model applies behind that module (Gemma-2's factor).
        head: the target's output head: ``head(hidden)``, ``[B, N, H]`` to logits ``[B, N, V]`` float32.
            `hidden` is the head's input, as in :attr:`Step.hidden`. It includes what the model applies behind its head, such as a
            soft cap or a scale.
        module: prepares a drafting network that is no language model: ``module(module, ahead=K, example=(…))`` returns
            :class:`~decoders.drafters.ModulePasses`; see :class:`~decoders.drafters.OpensModule`.
        new_tokens: most tokens that a row may write, if all rows begin together and the call lasts as long as its slowest row;
            None where requests join and leave.
        clock: seconds, for strategies that decide by time (:attr:`Strategy.timed`). Processes that share the target all get the first
            one's clock, so each must call it as often as the others.
        first_layers: the target's first layers with its last norm and head, ``first_layers(count)``: a draft model for :attr:`draft`
            that shares all weights and the target's slots, so that it reads no prompt. A drafter's round must end before another
            one's begins.
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
        """This context for a part of a composed strategy, with memories of its own.

        Args:
            seldom: whether the part may be asked late or never, as by ``auto``: its draft models read the prompts when first used.
        """
        draft = partial(self.draft, seldom=True) if seldom else self.draft
        return replace(self, memory=partial(self.memory, of=strategy), draft=draft)
