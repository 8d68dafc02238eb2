"""What a strategy is given at the start of a call to prepare itself from."""

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
    from .drafting import Forced, OpensDraft, OpensModule, OtherVocabulary
    from .sampling import SamplingInputs, SamplingPlan
    from .settings import Configured
    from .tree.draft import Sequences


def _outside_a_call(*args: Any, **kwargs: Any) -> Any:
    raise UnsupportedError("this Context was made by hand; draft models and strategies by name exist in a call only")


def _same_vocabulary(model: PreTrainedModel | str) -> None:
    """Of a context made by hand."""


def no_costs(measure: bool = False) -> None:
    """Of a context made by hand, and of a draft model."""


def no_memory(key: str, factory: Callable[[], Any], of: Configured | None = None) -> Any:
    """Of a context made by hand, of a draft model, and with the setting ``memory=False``: nothing is kept."""
    return factory()


@dataclass(frozen=True)
class Context:
    """What a strategy may prepare itself from, once per ``generate`` call.

    Attributes:
        model: the user's model (its weights and config; do not change either).
        tokenizer: the tokenizer given to ``enable`` or ``generate``, if any.
        assistant_model: the ``assistant_model=`` of the call, if any.
        rows: number of rows ``B``.
        slots: capacity of each row in tokens, prompt included.
        device: where the loop's tensors live.
        vocab_size: size ``V`` of the target's logits.
        compile: compiles a plain tensor function without graph breaks, once per model, with sizes left dynamic; gives it
            back as it is when the call runs eagerly. The time of the first call is booked as compile time.
        draft: opens a draft model for this call: ``draft(model, ahead=K)`` gives a :class:`~decoders.drafting.Drafter`; see
            :class:`~decoders.drafting.OpensDraft`.
        vocabulary_of: what the tokens of a draft model are where its ids mean others than the target's:
            ``vocabulary_of(model)`` gives an :class:`~decoders.drafting.OtherVocabulary`, or None where they mean the same, or
            where no tokenizers tell. `draft` takes such a model too, if the two have enough tokens in common.
        strategy: makes a strategy from a registry name and settings, for strategies that are built of others.
        sequences: the rows as they are at the start, prompts only; None in a context made by hand.
        coupled: whether target and drafts share their noise, so that a draft token drawn with it is likely the target's token. If
            not, a draft says what it was drawn from (:attr:`Draft.scores`).
        level: 0 if the strategy drafts for the target, 1 if it drafts for the target's draft model, and so on.
        plan: what the target's logits go through before a token is chosen (:func:`decoders.sampling.process`), for strategies that
            have scores of their own. None: greedy, as they are.
        sampling: the rows' values for that plan.
        guide: where the rows stand in their grammars, and what these force them to write; None without ``grammar=``. Illegal
            draft tokens need not be looked for: the loop takes them out.
        decoder_layers: how many the target has, of which :attr:`Strategy.hidden_layers` may name some.
        costs: what a verification step costs on this machine, by nodes: ``costs()`` gives a
            :class:`decoders.costs.StepCosts`, which the loop keeps true while the call runs, or None where nothing was ever
            measured; ``costs(measure=True)`` measures it first, some steps of several sizes.
        memory: what this strategy keeps between calls on the model: ``memory(key, factory)`` gives what `factory` made in the
            first call with a strategy of this class and these settings that asked for `key`. What is in it must not change the
            tokens. The least recently used go when there are many; :func:`decoders.forget` and :func:`decoders.release` free
            all. With the setting ``memory=False``, and for a draft model's strategies, every call gets a new one.
        texts: what :func:`decoders.remember` was given as texts, for all calls and strategies, in a
            :class:`~decoders.strategies.suffix_index.TextMemory`; None without, and for a draft model's strategies.
        embed: the target's own input embedding: ``embed(tokens)``, ``[…]`` int64 to ``[…, H]``, exactly its embedding module.
            What a model does to embeddings behind that module (Gemma-2's factor) is not in it.
        head: the target's own output head on packed weights: ``head(hidden)``, ``[B, N, H]`` to logits ``[B, N, V]`` float32.
            `hidden` is what the head reads, as in :attr:`Step.hidden`; all that the model does after its head is in it: a
            soft-cap, a scale.
        module: makes a drafter that is no language model ready for this call: ``module(module, ahead=K, example=(…))`` gives
            :class:`~decoders.drafting.ModulePasses`; see :class:`~decoders.drafting.OpensModule`.
        new_tokens: most tokens that a row may write, where the rows begin and end together, so that the call lasts as long as its
            slowest row; None where requests join and leave by themselves.
        clock: seconds, for strategies that decide by time (:attr:`Strategy.timed`). Where several processes share the target, all of
            them see the first one's clock, and each has to ask as often as the others.
        first_layers: the target cut off behind its first layers, ``first_layers(count)``, with its own last norm and head: a draft
            model for :attr:`draft` that shares all weights, and the target's slots: it reads no prompt. A drafter's round has to end
            before another one's begins.
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
        """This context for a strategy that another one is built of: what it keeps between calls is its own.

        Args:
            seldom: whether it may be asked late or never, as by ``auto``: its draft models read the prompts when they first draft.
        """
        draft = partial(self.draft, seldom=True) if seldom else self.draft
        return replace(self, memory=partial(self.memory, of=strategy), draft=draft)
