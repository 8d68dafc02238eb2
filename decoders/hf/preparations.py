"""What transformers prepares for a call, kept for calls that differ in their prompts and lengths alone."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import logits_process, stopping_criteria

from ..engine.weights.config_state import config_state

#: Arguments of ``generate`` that are a request's own, or that transformers is not given.
_OWN = frozenset(
    {"input_ids", "attention_mask", "max_new_tokens", "streamer", "tokenizer", "assistant_model", "assistant_tokenizer"}
)
_PLAIN = (bool, int, float, str, type(None))
#: Processors that look at the scores alone: not at how long the prompt is, nor at what was written.
_OF_SCORES = frozenset({
    logits_process.TemperatureLogitsWarper, logits_process.TopKLogitsWarper, logits_process.TopPLogitsWarper,
    logits_process.MinPLogitsWarper, logits_process.TypicalLogitsWarper,
})  # fmt: skip
_LENGTH = stopping_criteria.MaxLengthCriteria
#: Most that are kept. A service has one for every way of sampling that it is asked for.
LIMIT = 64

#: All that a preparation depends on.
Kind = tuple[object, ...]


@dataclass(frozen=True)
class Preparation:
    """Processors, criteria and config of a call with one row, as transformers has prepared them.

    Attributes:
        processors: look at scores alone.
        criteria: a length, and stop tokens if there are any.
        config: in force.
    """

    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    config: GenerationConfig

    @property
    def fits_others(self) -> bool:
        """Whether nothing but the length depends on the prompt, and nothing remembers for which it was made."""
        if self.config.min_new_tokens is not None:  # has become a length
            return False
        ends = {_LENGTH, stopping_criteria.EosTokenCriteria}
        return _OF_SCORES.issuperset(map(type, self.processors)) and ends.issuperset(map(type, self.criteria))

    def of_length(self, prompt: int, new_tokens: int) -> Preparation:
        """The same for a prompt of so many tokens, and so many new ones."""
        config, length = copy.copy(self.config), prompt + new_tokens
        config.max_length, config.max_new_tokens = length, new_tokens
        criteria = (_LENGTH(length, c.max_position_embeddings) if type(c) is _LENGTH else c for c in self.criteria)
        return Preparation(self.processors, StoppingCriteriaList(criteria), config)


class Preparations:
    """Those of one enabled model. Each request of a service would cost a millisecond of its own, in which nobody decodes."""

    def __init__(self) -> None:
        self._kept: dict[Kind, Preparation] = {}

    def __reduce__(self) -> tuple:
        return Preparations, ()  # copies of the model may be somewhere else

    def get(self, kind: Kind | None) -> Preparation | None:
        return None if kind is None else self._kept.get(kind)

    def keep(self, kind: Kind, preparation: Preparation) -> None:
        """Keeps it for calls of the same kind, if it is theirs, too."""
        if preparation.fits_others:
            if len(self._kept) >= LIMIT:
                self._kept.clear()
            self._kept[kind] = preparation


def kind_of(model: PreTrainedModel, configs: Sequence[GenerationConfig], arguments: Mapping[str, Any]) -> Kind | None:
    """All that transformers makes of a call, but for prompt and length, depends on; None where that cannot be said.

    Args:
        configs: generation configs of the call.
        arguments: of ``generate``.
    """
    ids, mask, count = (arguments.get(name) for name in ("input_ids", "attention_mask", "max_new_tokens"))
    if not isinstance(ids, Tensor) or len(ids) != 1 or mask is None or type(count) is not int or count < 1:
        return None
    if getattr(type(model), "generate", None) is not GenerationMixin.generate:  # may do anything with the prompt
        return None
    values = [{name: value for name, value in arguments.items() if name not in _OWN}, *map(vars, configs)]
    values[0].pop("generation_config", None)  # one of the configs
    states = [_state(each) for each in values]
    if None in states:
        return None
    kind = ids.device, *states, config_state(model.config, id)
    try:
        hash(kind)
    except TypeError:
        return None
    return kind


def _state(values: Mapping[str, Any]) -> tuple[object, ...] | None:
    """Something that differs whenever one of `values` does; None if one of them may do anything."""
    state = []
    for name, value in values.items():
        if type(value) is list and all(type(entry) is int for entry in value):
            state.append((name, list, tuple(value)))
        elif type(value) in _PLAIN:
            state.append((name, type(value), value))
        else:
            return None
    return tuple(state)
