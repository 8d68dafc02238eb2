"""What a call of ``generate`` asks for, in the loop's terms; what it cannot have is refused here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import logits_process, stopping_criteria

from .engine.sampling import SamplingPlan
from .engine.target import context_length
from .errors import ContextLengthError, SettingsError, UnsupportedError

#: Arguments that the loop cannot honour: name → (test on the value, what to do instead).
REFUSED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "num_beams": (lambda v: (v or 1) > 1, "beam search is not a strategy here; drop strategy= to use transformers' own"),
    "penalty_alpha": (lambda v: (v or 0) > 0, "contrastive search re-ranks; drop strategy="),
    "dola_layers": (lambda v: v is not None, "DoLa changes the logits by layer; drop strategy="),
    "use_cache": (lambda v: v is False, "strategies need the key-value cache; leave use_cache out"),
    "prompt_lookup_num_tokens": (lambda v: bool(v), 'use strategy="prompt_lookup" with strategy_config={"length": …}'),
    "assistant_early_exit": (lambda v: v is not None, "early-exit drafting is not a strategy here; drop strategy="),
    "guidance_scale": (lambda v: v not in (None, 1, 1.0), "classifier-free guidance runs the model twice; drop strategy="),
    "output_attentions": (lambda v: bool(v), "fused attention has no weights to return; drop strategy="),
    "output_hidden_states": (lambda v: bool(v), "run model(sequences, output_hidden_states=True) on the result"),
    "past_key_values": (lambda v: v is not None, "the loop owns its static cache; pass the whole conversation as input_ids"),
    "inputs_embeds": (lambda v: v is not None, "tokens are verified by id; pass input_ids"),
    "cache_implementation": (
        lambda v: v not in (None, "static", "dynamic", "hybrid"), "the loop always uses its own static cache"),
    "custom_generate": (lambda v: v is not None, "choose either strategy= or custom_generate="),
    "synced_gpus": (lambda v: bool(v), "sharded models cannot be decoded in one loop"),
    "token_healing": (lambda v: bool(v), "it rewrites the prompt; heal it before the call"),
    "position_ids": (lambda v: v is not None, "positions are those of the tokens; drop strategy="),
    "negative_prompt_ids": (lambda v: v is not None, "classifier-free guidance is not supported; drop strategy="),
}  # fmt: skip


def refuse_arguments(configs: list[GenerationConfig], kwargs: Mapping[str, Any]) -> None:
    """Raises UnsupportedError, before anything is touched, for arguments that cannot be honoured exactly."""
    for name, (refused, advice) in REFUSED.items():
        value = kwargs[name] if kwargs.get(name) is not None else first_of(configs, name)
        if refused(value):
            raise UnsupportedError(f"{name}={value!r} does not go with strategy=: {advice}.")


def unpad(input_ids: Tensor, attention_mask: Tensor | None) -> list[Tensor]:
    """Rows of ``[B, P]`` without their left padding.

    Raises:
        ContextLengthError: a row is empty. UnsupportedError: a mask with holes or right padding.
    """
    if attention_mask is None:
        return list(input_ids)
    mask = attention_mask.bool()
    if (mask[:, 1:] < mask[:, :-1]).any():
        raise UnsupportedError(
            "attention_mask has zeros after ones: rows must be padded on the left (tokenizer.padding_side='left')"
        )
    return [ids[keep] for ids, keep in zip(input_ids, mask, strict=True)]


def check_lengths(model: PreTrainedModel, prompts: list[Tensor], new_tokens: int) -> None:
    """Raises ContextLengthError if a prompt is empty or prompt and new tokens do not fit the model's positions."""
    longest, context = max(len(p) for p in prompts), context_length(model)
    if min(len(p) for p in prompts) == 0:
        raise ContextLengthError("a prompt is empty: give every row at least one token (the BOS token, say)")
    if longest + new_tokens > context:
        raise ContextLengthError(
            f"{longest} prompt tokens plus {new_tokens} new ones exceed the model's context of {context}: "
            f"max_new_tokens can be {max(context - longest, 0)} at most"
        )


def plan_sampling(
    processors: LogitsProcessorList, prompt_length: int, config: GenerationConfig, stop_tokens: tuple[int, ...]
) -> tuple[SamplingPlan, tuple[float, ...], Callable[[Tensor, Tensor], Tensor] | None]:
    """Turns transformers' prepared processors into operations of the step, or keeps them all for the host.

    Only exact types are recognised: a subclass may do anything. One processor that needs the prefix sends all to the
    host, since their order matters.
    """
    p = logits_process
    known: dict[type, Callable[[Any], tuple[str, float]]] = {
        p.TemperatureLogitsWarper: lambda x: ("temperature", x.temperature),
        p.TopKLogitsWarper: lambda x: ("top_k", x.top_k),
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
            and (stops is None or set(stops.tolist()) == set(stop_tokens))
            and getattr(x, "prompt_length_to_skip", prompt_length) == prompt_length
        )

    if all(expressible(x) for x in processors):
        operations = [known[type(x)](x) for x in processors]
        plan = SamplingPlan(tuple(name for name, _ in operations), sample, keep_scores)
        return plan, tuple(float(value) for _, value in operations), None
    return SamplingPlan((), sample, keep_scores), (), cast(Callable[[Tensor, Tensor], Tensor], processors)


def resolve_seed(seed: int | None, generator: torch.Generator | None, sample: bool) -> int:
    """The seed of the sampling noise: given, or drawn from `generator`, or from torch's global generator."""
    if seed is not None and generator is not None:
        raise SettingsError("give seed= or generator=, not both")
    if seed is not None:
        if not -(2**63) <= seed < 2**63:
            raise SettingsError(f"seed {seed} does not fit 64 bits")
        return int(seed)
    if not sample:
        return 0
    device = generator.device if generator is not None else "cpu"
    return int(torch.randint(0, 2**63 - 1, (), generator=generator, device=device))


def first_of(configs: list[GenerationConfig], name: str) -> Any:
    """The first value that one of `configs` gives to `name`; transformers fills gaps in the same order."""
    return next((v for c in configs if (v := getattr(c, name, None)) is not None), None)


def max_length(criteria: StoppingCriteriaList, config: GenerationConfig) -> int:
    """A length criterion of the user's replaces the one that transformers makes, so the list is what counts."""
    lengths = [c.max_length for c in criteria if type(c) is stopping_criteria.MaxLengthCriteria]
    return min(lengths, default=config.max_length)


def stop_tokens_of(criteria: StoppingCriteriaList) -> tuple[int, ...]:
    tokens = [t for c in criteria if type(c) is stopping_criteria.EosTokenCriteria for t in c.eos_token_id.tolist()]
    return tuple(dict.fromkeys(tokens))


def pad_token_of(config: GenerationConfig) -> int:
    pad, stops = getattr(config, "_pad_token_tensor", None), getattr(config, "_eos_token_tensor", None)
    return int(pad) if pad is not None else int(stops[0]) if stops is not None else 0


def host_criteria(criteria: StoppingCriteriaList) -> StoppingCriteriaList | None:
    """The criteria that the step does not decide itself."""
    inside = (stopping_criteria.MaxLengthCriteria, stopping_criteria.EosTokenCriteria)
    return StoppingCriteriaList(c for c in criteria if type(c) not in inside) or None
