"""Which requests can share their steps: those whose steps differ in the values of tensors and in nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ...sampling.processors import SamplingInputs, first_keys
from ...strategy import Strategy
from .request import Request
from .rows import stop_tensor

#: Settings of the loop that hold for a whole step, or for the draft models of all its rows.
SHARED = ("compile", "prune", "memory", "draft_weights")


def share_steps(one: Request, other: Request) -> bool:
    """Whether two requests on one engine can be decoded in the same steps."""
    return (
        same_strategy(one.strategy, other.strategy)
        and one.memory_salt == other.memory_salt
        # With the first grammar a strategy starts anew, and one that reads prompts would have to be shown all texts.
        and (one.plan.masked == other.plan.masked or not one.strategy.reads_prompt)
        and replace(one.plan, masked=False) == replace(other.plan, masked=False)
        and (one.processors is None) == (other.processors is None)
        and one.assistant_model is other.assistant_model and one.tokenizer is other.tokenizer
        and all(getattr(one.runtime, name) == getattr(other.runtime, name) for name in SHARED)
        and type(one.verifier) is type(other.verifier)
        and getattr(one.verifier, "settings", None) == getattr(other.verifier, "settings", None)
    )  # fmt: skip


def sampling_of(requests: list[Request], added: int, device: torch.device) -> SamplingInputs:
    """The tensors that the plan reads for requests of one row each: one row for all where all ask for the same.

    Args:
        added: rows behind them that fill the batch up.
    """
    values = [request.values or (0.0,) for request in requests]
    stops = [request.stop_tokens for request in requests]
    if len(set(values)) == 1:
        values = values[:1]
    if len(set(stops)) == 1:
        stops = stops[:1]
    keys = first_keys([request.seed for request in [*requests, *requests[:1] * added]], device)
    several = len(values) > 1 or len(stops) > 1
    return SamplingInputs(
        torch.tensor(
            values + [values[0]] * added if len(values) > 1 else values[0], dtype=torch.float32, device=device
        ),
        keys,
        stop_tensor(stops + [stops[0]] * added, device)
        if several and len(stops) > 1
        else stop_tensor(stops, device)[0],
    )


def same_strategy(one: Strategy, other: Strategy) -> bool:
    """Whether two strategies are set alike, those that they are made of included."""
    if one is other:
        return True
    own, others = vars(one), vars(other)
    return type(one) is type(other) and own.keys() == others.keys() and all(_same(own[k], others[k]) for k in own)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Strategy) and isinstance(other, Strategy):
        return same_strategy(one, other)
    if isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)):
        return len(one) == len(other) and all(map(_same, one, other))
    try:
        return one is other or bool(one == other)
    except Exception:  # tensors and the like: what cannot be compared is not the same
        return False
