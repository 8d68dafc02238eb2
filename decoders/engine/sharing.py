"""Which requests can share their steps: those whose steps differ in the values of tensors and in nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..strategy import Strategy
from .request import Request


def share_steps(one: Request, other: Request) -> bool:
    """Whether two requests on one engine can be decoded in the same steps."""
    return (
        same_strategy(one.strategy, other.strategy)
        and replace(one.plan, masked=False) == replace(other.plan, masked=False)
        and (one.processors is None) == (other.processors is None)
        and one.assistant_model is other.assistant_model and one.tokenizer is other.tokenizer
        and one.compile == other.compile and type(one.verifier) is type(other.verifier)
        and getattr(one.verifier, "settings", None) == getattr(other.verifier, "settings", None)
    )  # fmt: skip


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
    except Exception:  # tensors and the like: whoever cannot say is not the same
        return False
