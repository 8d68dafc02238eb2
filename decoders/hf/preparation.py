"""Processors, criteria and generation config as transformers prepares them, in the loop's terms; reused for calls of the same kind."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import logits_process, stopping_criteria

from ..common.transformers_compat import pad_token_of
from ..engine.decode.criteria import Criteria, Processors
from ..engine.model.weights.state import content
from ..sampling.processors import SamplingPlan
from ..sampling.top import MOST_OF_TOP_K

#: Score of a token that an operation of the step rules out.
REMOVED = float("-inf")

#: Criteria that the step decides itself.
_INSIDE = (stopping_criteria.MaxLengthCriteria, stopping_criteria.EosTokenCriteria)
#: Criteria that judge rows independently, by exact type.
_BY_ROW = (stopping_criteria.StopStringCriteria, stopping_criteria.MaxTimeCriteria)

#: Arguments of ``generate`` that differ between requests of a kind, or that are not passed to transformers.
_OWN = frozenset(
    {"input_ids", "attention_mask", "max_new_tokens", "streamer", "tokenizer", "assistant_model", "assistant_tokenizer"}
)
_PLAIN = (bool, int, float, str, type(None))
#: Most preparations that are kept; a service needs one for every combination of sampling parameters.
LIMIT = 64

#: Everything that a preparation depends on, except prompt and length.
Kind = tuple[object, ...]


@dataclass(frozen=True)
class Preparation:
    """A call as transformers has prepared it.

    Attributes:
        config: the generation config in force.
        length: most tokens of a row, padded prompt included.
        stop_tokens: end-of-sequence ids.
        pad_token: fills ended rows.
        pads_ended_rows: whether a row that a criterion stopped is padded while others go on.
        plan: the operations on logits inside the step.
        values: the plan's parameters.
        processors: all logits processors if the plan cannot express one of them, else None.
        criteria: stopping criteria that the step does not decide itself.
    """

    config: GenerationConfig
    length: int
    stop_tokens: tuple[int, ...]
    pad_token: int
    pads_ended_rows: bool
    plan: SamplingPlan
    values: tuple[float, ...]
    processors: Processors | None
    criteria: Criteria | None

    @staticmethod
    def of(
        processors: LogitsProcessorList, criteria: StoppingCriteriaList, config: GenerationConfig, prompt: int
    ) -> Preparation:
        """From the arguments that transformers passes to a custom ``generate``. prompt: tokens of the padded prompt."""
        # A length criterion of the user's replaces transformers' own, so the list counts, not the config.
        lengths = [c.max_length for c in criteria if type(c) is stopping_criteria.MaxLengthCriteria]
        ends = [c.eos_token_id for c in criteria if type(c) is stopping_criteria.EosTokenCriteria]
        stop_tokens = tuple(dict.fromkeys(token for tokens in ends for token in tokens.flatten().tolist()))
        pads = any(hasattr(c, "eos_token_id") for c in criteria)  # transformers' own test
        on_host = StoppingCriteriaList(c for c in criteria if type(c) not in _INSIDE)
        host_criteria = None
        if on_host:
            by_row, names = all(type(c) in _BY_ROW for c in on_host), tuple(type(c).__name__ for c in on_host)
            host_criteria = Criteria(cast(Callable[..., Tensor], on_host), by_row, pads, names)
        return Preparation(
            config, min(lengths, default=config.max_length), stop_tokens, pad_token_of(config), pads,
            *plan_sampling(processors, prompt, config, stop_tokens), host_criteria,
        )  # fmt: skip

    @property
    def reusable(self) -> bool:
        """Whether only lengths depend on the prompt, so that other calls of this kind can use it."""
        on_host = self.processors is not None or self.criteria is not None
        return not on_host and self.config.min_new_tokens is None and "min_new_tokens" not in self.plan.operations

    def of_length(self, prompt: int, new_tokens: int) -> Preparation:
        """This preparation for a prompt and an output of other lengths."""
        config, length = copy.copy(self.config), prompt + new_tokens
        config.max_length, config.max_new_tokens = length, new_tokens
        return replace(self, config=config, length=length)


def plan_sampling(
    processors: LogitsProcessorList, prompt_length: int, config: GenerationConfig, stop_tokens: tuple[int, ...]
) -> tuple[SamplingPlan, tuple[float, ...], Processors | None]:
    """Turns transformers' prepared processors into operations of the step, or keeps them all for the host.

    Only exact types are recognised, because a subclass may do anything. A single processor that the plan cannot express, such as one
    with its own `filter_value`, keeps all of them on the host, since their order matters.
    """
    p = logits_process
    known: dict[type, Callable[[Any], tuple[str, float]]] = {
        p.TemperatureLogitsWarper: lambda x: ("temperature", x.temperature),
        p.TopKLogitsWarper: lambda x: (
            "top_k" if x.top_k <= MOST_OF_TOP_K else "large_top_k",
            min(x.top_k, 1 << 31),  # representable as a float, and larger than any vocabulary
        ),
        p.TopPLogitsWarper: lambda x: ("top_p", 1 - x.top_p),
        p.MinPLogitsWarper: lambda x: ("min_p", x.min_p),
        p.TypicalLogitsWarper: lambda x: ("typical_p", x.mass),
        p.MinLengthLogitsProcessor: lambda x: ("min_new_tokens", x.min_length - prompt_length),
        p.MinNewTokensLengthLogitsProcessor: lambda x: ("min_new_tokens", x.min_new_tokens),
    }
    keep_scores = bool(config.return_dict_in_generate and config.output_scores)
    sample = bool(config.do_sample)

    def expressible(x: Any) -> bool:
        stops = getattr(x, "eos_token_id", None)
        return (
            type(x) in known
            and getattr(x, "min_tokens_to_keep", 1) == 1
            and getattr(x, "filter_value", REMOVED) == REMOVED
            and (stops is None or set(stops.flatten().tolist()) == set(stop_tokens))
            and getattr(x, "prompt_length_to_skip", prompt_length) == prompt_length
        )

    if all(expressible(x) for x in processors):
        operations = [known[type(x)](x) for x in processors]
        plan = SamplingPlan(tuple(name for name, _ in operations), sample, keep_scores)
        return plan, tuple(float(value) for _, value in operations), None
    return SamplingPlan((), sample, keep_scores), (), cast(Processors, processors)


def kind_of(model: PreTrainedModel, configs: Sequence[GenerationConfig], arguments: Mapping[str, Any]) -> Kind | None:
    """What transformers' preparation of a call depends on, except prompt and length; None if it cannot be reused.

    Args:
        configs: generation configs of the call.
        arguments: of ``generate``.
    """
    ids, mask, count = (arguments.get(name) for name in ("input_ids", "attention_mask", "max_new_tokens"))
    if not isinstance(ids, Tensor) or len(ids) != 1 or mask is None or type(count) is not int or count < 1:
        return None
    if getattr(type(model), "generate", None) is not GenerationMixin.generate:  # may depend on the prompt
        return None
    values = [{name: value for name, value in arguments.items() if name not in _OWN}, *map(vars, configs)]
    values[0].pop("generation_config", None)  # one of the configs
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
    """A hashable equivalent of `values`; None if one of them is not plain data."""
    state = []
    for name, value in values.items():
        if type(value) is list and all(type(entry) is int for entry in value):
            state.append((name, list, tuple(value)))
        elif type(value) in _PLAIN:
            state.append((name, type(value), value))
        else:
            return None
    return tuple(state)
