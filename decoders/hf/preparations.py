"""What transformers prepares for a call, kept for calls that differ in their prompts and lengths alone."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import stopping_criteria

from ..engine.decode.request import Request
from ..engine.model.weights.state import config_state

#: Arguments of ``generate`` that are a request's own, or that transformers is not given.
_OWN = frozenset(
    {"input_ids", "attention_mask", "max_new_tokens", "streamer", "tokenizer", "assistant_model", "assistant_tokenizer"}
)
_PLAIN = (bool, int, float, str, type(None))
#: Most that are kept. A service has one for every way of sampling that it is asked for.
LIMIT = 64

#: All that a preparation depends on.
Kind = tuple[object, ...]


@dataclass(frozen=True)
class Preparation:
    """Processors, criteria and config of a call, as transformers has prepared them."""

    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    config: GenerationConfig

    def of_length(self, prompt: int, new_tokens: int) -> Preparation:
        """The same for a prompt of so many tokens, and so many new ones."""
        config, length = copy.copy(self.config), prompt + new_tokens
        config.max_length, config.max_new_tokens = length, new_tokens
        kind = stopping_criteria.MaxLengthCriteria
        criteria = (kind(length, c.max_position_embeddings) if type(c) is kind else c for c in self.criteria)
        return Preparation(self.processors, StoppingCriteriaList(criteria), config)


class Preparations:
    """Those of one enabled model. Each request of a service would cost a millisecond of its own, in which nobody decodes."""

    def __init__(self) -> None:
        self._kept: dict[Kind, Preparation] = {}

    def __reduce__(self) -> tuple:
        return Preparations, ()  # copies of the model may be somewhere else

    def get(self, kind: Kind | None) -> Preparation | None:
        return None if kind is None else self._kept.get(kind)

    def keep(self, kind: Kind | None, preparation: Preparation, request: Request) -> None:
        """Keeps it for calls of the same kind, if it is theirs, too.

        Args:
            request: was made with it, and tells that: no more than lengths depends on its prompt, nothing remembers its text.
        """
        on_host = request.processors is not None or request.criteria is not None
        lengths = preparation.config.min_new_tokens is not None or "min_new_tokens" in request.plan.operations
        if kind is None or on_host or lengths or len(request.prompts) > 1:
            return
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
