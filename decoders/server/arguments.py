"""What a body says of sampling, penalties and stop strings, as arguments of ``generate``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .bodies import Body
from .processors import StopStrings, TokenPenalties
from .refusals import Refusal

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase


#: Temperatures below are greedy: what is drawn there is the likeliest token, and float32 has no room for much smaller ones.
LEAST_TEMPERATURE = 1e-5


def sampling(body: Body, model: PreTrainedModel) -> dict[str, Any]:
    """Arguments of ``generate``. A body that says nothing of sampling gets what the model's generation config says."""
    given = [value for value in (body.temperature, body.top_p, body.top_k, body.min_p) if value is not None]
    more = {"repetition_penalty": body.repetition_penalty} if body.repetition_penalty not in (None, 1) else {}
    if not given:
        return more
    if body.temperature is not None and body.temperature < LEAST_TEMPERATURE:
        return {"do_sample": False, "temperature": None, "top_k": None, "top_p": None, "min_p": None, **more}
    own: GenerationConfig = model.generation_config

    def first(value: Any, configured: Any, otherwise: Any) -> Any:
        return next(each for each in (value, configured, otherwise) if each is not None)

    top_k = first(body.top_k, own.top_k, 0)
    options = {
        "do_sample": True,
        "temperature": first(body.temperature, own.temperature, 1.0),
        "top_k": max(top_k, 0),  # without it, transformers would take 50
        "top_p": first(body.top_p, own.top_p, 1.0),
    }
    min_p = first(body.min_p, own.min_p, 0.0)
    return options | ({"min_p": min_p} if min_p else {}) | more


def callbacks(body: Body, tokenizer: PreTrainedTokenizerBase, prompt: int) -> dict[str, Any]:
    """Stop strings, penalties and biases, for a prompt of so many tokens."""
    arguments: dict[str, Any] = {}
    if body.stops:
        arguments["stopping_criteria"] = [StopStrings(tokenizer, body.stops, prompt)]
    bias = _bias(body, len(tokenizer))
    if body.frequency_penalty or body.presence_penalty or bias:
        penalties = TokenPenalties(prompt, body.frequency_penalty or 0.0, body.presence_penalty or 0.0, bias)
        arguments["logits_processor"] = [penalties]
    return arguments


def _bias(body: Body, size: int) -> dict[int, float]:
    bias = {}
    for token, value in (body.logit_bias or {}).items():
        if not (token.isascii() and token.isdigit() and len(token) < 10 and int(token) < size):
            message = f"logit_bias: {token!r} is no token id from 0 to {size - 1}"
            raise Refusal(400, message, param="logit_bias", code="invalid_value")
        bias[int(token)] = value
    return bias


def wrapped(seed: int) -> int:
    """`seed` as a signed number of 64 bits."""
    return (seed + 2**63) % 2**64 - 2**63
