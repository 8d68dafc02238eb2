"""Translates what transformers prepares for a call (processors, criteria, generation config). Calls that differ only in prompt and
length can share the result.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import stopping_criteria

from ..common.transformers_compat import pad_token_of
from ..engine.decode.criteria import Criteria, Processors
from ..engine.model.weights.state import content
from ..sampling.prefixes import OperationSequences
from ..sampling.processors import SamplingPlan
from .operations import AT_A_LENGTH, PaddedPrompts, plan_sampling

#: Stopping criteria that the decoding step evaluates itself.
_INSIDE = (stopping_criteria.MaxLengthCriteria, stopping_criteria.EosTokenCriteria)
#: Exact types of stopping criteria that stop each row independently.
_BY_ROW = (stopping_criteria.StopStringCriteria, stopping_criteria.MaxTimeCriteria)

#: Arguments of ``generate`` that may differ between calls that share a preparation, or that are not passed to transformers.
_OWN = frozenset(
    {"input_ids", "attention_mask", "max_new_tokens", "streamer", "tokenizer", "assistant_model", "assistant_tokenizer"}
)
_PLAIN = (bool, int, float, str, type(None))
#: Greatest number of cached preparations: a server needs one per combination of sampling parameters.
LIMIT = 64

Kind = tuple[object, ...]


@dataclass(frozen=True)
class Preparation:
    """A call as transformers has prepared it.

    Attributes:
        config: the generation config in force.
        length: greatest number of tokens of a row, padded prompt included.
        stop_tokens: end-of-sequence ids.
        pad_token: the token with which ended rows are padded.
        pads_ended_rows: whether a row that a criterion has stopped is padded while other rows continue.
        plan: the operations on logits inside the step.
        values: the values of the plan's operations.
        sequences: the token sequences of the plan's operations.
        processors: all logits processors if the plan cannot express every processor, else None.
        criteria: stopping criteria that the step does not evaluate itself; None if there are none.
    """

    config: GenerationConfig
    length: int
    stop_tokens: tuple[int, ...]
    pad_token: int
    pads_ended_rows: bool
    plan: SamplingPlan
    values: tuple[float, ...]
    sequences: OperationSequences
    processors: Processors | None
    criteria: Criteria | None

    @staticmethod
    def of(
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        config: GenerationConfig,
        prompts: PaddedPrompts,
    ) -> Preparation:
        """Translates the arguments that transformers passes to a custom ``generate``."""
        # A user's own length criterion replaces transformers' criterion, so the greatest length is in the list, not in the config.
        lengths = [c.max_length for c in criteria if type(c) is stopping_criteria.MaxLengthCriteria]
        ends = [c.eos_token_id for c in criteria if type(c) is stopping_criteria.EosTokenCriteria]
        stop_tokens = tuple(dict.fromkeys(token for tokens in ends for token in tokens.flatten().tolist()))
        pads = any(hasattr(c, "eos_token_id") for c in criteria)  # transformers tests this, too
        on_host = StoppingCriteriaList(c for c in criteria if type(c) not in _INSIDE)
        host_criteria = None
        if on_host:
            by_row, names = all(type(c) in _BY_ROW for c in on_host), tuple(type(c).__name__ for c in on_host)
            host_criteria = Criteria(cast(Callable[..., Tensor], on_host), by_row, pads, names)
        return Preparation(
            config, min(lengths, default=config.max_length), stop_tokens, pad_token_of(config), pads,
            *plan_sampling(processors, prompts, config, stop_tokens), host_criteria,
        )  # fmt: skip

    @property
    def reusable(self) -> bool:
        """Whether only lengths depend on the prompt, so that calls of the same :data:`Kind` can use the preparation."""
        on_host = self.processors is not None or self.criteria is not None
        return not on_host and self.config.min_new_tokens is None and AT_A_LENGTH.isdisjoint(self.plan.operations)

    def of_length(self, prompt: int, new_tokens: int) -> Preparation:
        """The preparation for other numbers of prompt tokens and new tokens."""
        config, length = copy.copy(self.config), prompt + new_tokens
        config.max_length, config.max_new_tokens = length, new_tokens
        return replace(self, config=config, length=length)


def kind_of(model: PreTrainedModel, configs: Sequence[GenerationConfig], arguments: Mapping[str, Any]) -> Kind | None:
    """The key of a call's preparation: all its inputs except prompt and length; None if the preparation cannot be reused."""
    ids, mask, count = (arguments.get(name) for name in ("input_ids", "attention_mask", "max_new_tokens"))
    if not isinstance(ids, Tensor) or len(ids) != 1 or mask is None or type(count) is not int or count < 1:
        return None
    if not mask.all():  # the repetition penalty depends on padding
        return None
    if getattr(type(model), "generate", None) is not GenerationMixin.generate:  # its own code may use the prompt
        return None
    values = [{name: value for name, value in arguments.items() if name not in _OWN}, *map(vars, configs)]
    values[0].pop("generation_config", None)  # `configs` holds it
    states = [_state(each) for each in values]
    if None in states:
        return None
    kind = ids.device, *states, content(model.config)
    try:
        hash(kind)
    except TypeError:
        return None
    return kind


def _state(values: Mapping[str, Any]) -> tuple[object, ...] | None:
    """`values` as a hashable tuple; None if a value is not plain data."""
    state = []
    for name, value in values.items():
        if type(value) is list and all(type(entry) is int for entry in value):
            state.append((name, list, tuple(value)))
        elif type(value) in _PLAIN:
            state.append((name, type(value), value))
        else:
            return None
    return tuple(state)
