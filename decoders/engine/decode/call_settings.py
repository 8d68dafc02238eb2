"""What a call has settled for every model that takes part in it: the target, its draft models, and theirs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from ...report import Report
from ...sampling.processors import SamplingInputs, SamplingPlan
from .engine import Engine
from .request import Request
from .session import Session


@dataclass(frozen=True)
class CallSettings:
    """Of one call.

    Attributes:
        request: the call.
        engine: of the target.
        session: of the target's rows.
        read_rest: makes the target read the end of the prompts now, if it was left to the first step.
        longest: most tokens that a row can come to.
        plan: what runs on the draft's logits; scores are kept if the verifier asks for the draft's distribution.
        sampling: parameters, noise keys (the very tensor of the call: fresh keys show up in it) and stop tokens.
        block_size: nodes of the block in which the model drafted for verifies so many nodes of a draft, the root included.
        report: where compilation is booked.
        stack: closes at the call's end what is opened for it.
        capacity: most rows there can be.
        shared: whether rows join and leave.
    """

    request: Request
    engine: Engine
    session: Session
    read_rest: Callable[[], None]
    longest: int
    plan: SamplingPlan
    sampling: SamplingInputs
    block_size: Callable[[int], int]
    report: Report
    stack: ExitStack
    capacity: int
    shared: bool = False

    def compiler(self, engine: Engine) -> Callable[[Callable], Callable]:
        """``Context.compile`` for strategies on `engine`."""
        return lambda function: engine.function(function, self.request.runtime.compile, self.report)
