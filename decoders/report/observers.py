"""What is told of calls while they run."""

from __future__ import annotations

from abc import ABC
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from .report import Report

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, eq=False)
class ObservedCall:
    """One call of ``generate``, or one request of a scheduler. The same object in every method of an observer.

    Attributes:
        model: that decodes.
        strategy: registry name, ``a+b`` of merged ones.
        prompt_tokens: per row.
        max_new_tokens: per row.
        sampled: whether tokens are drawn; greedy otherwise.
    """

    model: PreTrainedModel
    strategy: str
    prompt_tokens: Sequence[int]
    max_new_tokens: int
    sampled: bool


class Observer(ABC):
    """Base class of all observers: methods that do nothing, for subclasses to replace those that they need.

    An observer is made once, without arguments, and told of the calls of all models, in the thread that decodes. What a method
    raises is a warning; the call goes on. Time spent here is part of the call's ``timings.host``.

    Class attributes:
        name: registry name, ``snake_case``.
        summary: one line for listings.
    """

    name: ClassVar[str]
    summary: ClassVar[str] = ""

    def start(self, call: ObservedCall) -> None:
        """Before anything is read or decoded."""

    def step(self, call: ObservedCall, tokens: list[list[int]]) -> None:
        """After every step. tokens: the new ones of each row, none of rows that have ended."""

    def end(self, call: ObservedCall, report: Report, error: BaseException | None) -> None:
        """When the call is over, however it went. error: what ended it, None of calls that came to their end or were cancelled."""
