"""What transformers prepared for a call, its processors, criteria and special tokens, in the loop's terms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import logits_process, stopping_criteria

from ..engine.decode.criteria import Criteria
from ..engine.decode.host_processors import Processors
from ..sampling.processors import SamplingPlan
from ..sampling.top import MOST_OF_TOP_K

#: Score of a token that an operation of the step takes out.
REMOVED = float("-inf")


def plan_sampling(
    processors: LogitsProcessorList, prompt_length: int, config: GenerationConfig, stop_tokens: tuple[int, ...]
) -> tuple[SamplingPlan, tuple[float, ...], Processors | None]:
    """Turns transformers' prepared processors into operations of the step, or keeps them all for the host.

    Only exact types are recognised: a subclass may do anything. One that the plan cannot express, with a `filter_value` of its
    own, say, sends all to the host, since their order matters.
    """
    p = logits_process
    known: dict[type, Callable[[Any], tuple[str, float]]] = {
        p.TemperatureLogitsWarper: lambda x: ("temperature", x.temperature),
        p.TopKLogitsWarper: lambda x: ("top_k" if x.top_k <= MOST_OF_TOP_K else "large_top_k", x.top_k),
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


def max_length(criteria: StoppingCriteriaList, config: GenerationConfig) -> int:
    """A length criterion of the user's replaces the one that transformers makes, so the list is what counts."""
    lengths = [c.max_length for c in criteria if type(c) is stopping_criteria.MaxLengthCriteria]
    return min(lengths, default=config.max_length)


def stop_tokens_of(criteria: StoppingCriteriaList) -> tuple[int, ...]:
    tokens = [
        t for c in criteria if type(c) is stopping_criteria.EosTokenCriteria for t in c.eos_token_id.flatten().tolist()
    ]
    return tuple(dict.fromkeys(tokens))


#: Criteria that the step decides itself.
_INSIDE = (stopping_criteria.MaxLengthCriteria, stopping_criteria.EosTokenCriteria)
#: Criteria that look at one row at a time, or at none. A subclass may do anything.
_BY_ROW = (stopping_criteria.StopStringCriteria, stopping_criteria.MaxTimeCriteria)


def host_criteria(criteria: StoppingCriteriaList) -> Criteria | None:
    """The criteria that the step does not decide itself."""
    on_host = StoppingCriteriaList(c for c in criteria if type(c) not in _INSIDE)
    if not on_host:
        return None
    by_row = all(type(c) in _BY_ROW for c in on_host)
    names = tuple(type(c).__name__ for c in on_host)
    return Criteria(cast(Callable[..., Tensor], on_host), by_row, pads_ended_rows(criteria), names)


def pads_ended_rows(criteria: StoppingCriteriaList) -> bool:
    """Whether a row that was told to stop is padded while others go on: transformers' own test."""
    return any(hasattr(c, "eos_token_id") for c in criteria)
